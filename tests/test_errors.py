"""Errors carry fields; their message is put together from these, and both survive pickle and copy."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest

from deltacompress import errors
from deltacompress.errors import (
    CheckpointError,
    DeltaCompressError,
    FormatError,
    InputError,
    for_the_command_line,
    to_free_memory,
)
from deltacompress.evaluation.gate.rules import GateFailedError
from deltacompress.files import regular
from deltacompress.zoo import errors as zoo_errors
from deltacompress.zoo.store.durable import because


def _kinds() -> list[type[DeltaCompressError]]:
    found: set[type[DeltaCompressError]] = {GateFailedError}
    for module in (errors, zoo_errors):
        found |= {kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Exception)}
    return sorted(found, key=lambda kind: kind.__name__)


def _fields(error: DeltaCompressError) -> tuple[str | None, str, str | None]:
    return error.where, error.what, error.way_out


def _pickled(error: DeltaCompressError) -> DeltaCompressError:
    again: DeltaCompressError = pickle.loads(pickle.dumps(error))  # noqa: S301 - of our own making
    return again


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InputError("wrong"), "wrong"),
        (InputError("wrong", where="a.json"), "a.json: wrong"),
        (InputError("wrong", way_out="mend it"), "wrong; mend it"),
        (
            InputError("wrong: a; b", where=Path("a.json"), way_out="mend it; or not"),
            "a.json: wrong: a; b; mend it; or not",
        ),
    ],
)
def test_a_message_is_put_together_from_fields(error: InputError, told: str) -> None:
    assert str(error) == told
    assert error.where is None or type(error.where) is str


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.__name__)
def test_every_kind_survives_pickle_and_copy(kind: type[DeltaCompressError]) -> None:
    error = kind("wrong: so; so", where="a: b.json", way_out="mend it; or not")
    for again in (_pickled(error), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert _fields(again) == ("a: b.json", "wrong: so; so", "mend it; or not")
        assert str(again) == str(error)
    assert _fields(_pickled(kind("wrong"))) == (None, "wrong", None)


def test_an_error_told_as_another_kind_keeps_its_fields() -> None:
    error = CheckpointError("wrong", where="a.json", way_out="mend it")
    assert _fields(error.retold(FormatError)) == ("a.json", "wrong", "mend it")
    assert _fields(error.retold(FormatError, what="odd", way_out="copy it")) == ("a.json", "odd", "copy it")
    assert _fields(error.retold(FormatError, also="or wait")) == ("a.json", "wrong", "mend it; or wait")
    assert _fields(error.retold(FormatError, within="a.tar")) == ("a.tar", "a.json: wrong", "mend it")
    assert _fields(CheckpointError("wrong").retold(FormatError, within="a.tar", also="wait")) == (
        "a.tar",
        "wrong",
        "wait",
    )
    assert type(error.retold(FormatError)) is FormatError


def test_a_file_that_cannot_be_read_keeps_its_own_way_out() -> None:
    denied = PermissionError(13, "Permission denied", "a.json")
    error = regular.unreadable(CheckpointError, "a.json", denied, what="tensor w ")
    assert _fields(error) == ("a.json", "tensor w cannot be read (Permission denied)", "make it readable")
    unfit = regular.UnfitFileError("a.json", 40, "a symbolic link", "put a copy there")
    assert regular.unreadable(CheckpointError, "a.json", unfit, "give another").way_out == "put a copy there"
    assert _fields(because(FormatError, "a.json", unfit)) == ("a.json", "a symbolic link", "put a copy there")
    assert because(FormatError, "a.json", denied).what == "no permission"


def test_the_way_out_of_a_full_gpu_names_no_option_that_a_verb_lacks() -> None:
    """`generate` and `chat` have none of them; in Python they are arguments."""
    assert "budget_bytes, max_batch or max_new_tokens" in to_free_memory()
    with for_the_command_line():
        assert to_free_memory().endswith("; of `serve` lower --budget or --max-batch")
