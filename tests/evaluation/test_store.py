"""Answers on disk: what is whole is used again, from the first line on that is not nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltacompress.evaluation.scoring.store import AnswerStore, _line

IDENTITY = {"weights": "a"}


def stored(folder: Path) -> AnswerStore:
    store = AnswerStore(folder, IDENTITY)
    store.add([("one", [1]), ("two", "2")])
    store.close()
    return store


@pytest.mark.parametrize(
    "line",
    [
        b'["three"',
        b'["three", 3, "0"]',
        b'["three", 3]\n',
        b"\n",
        b"3\n",
        b'["three"]\n',
        b"[3, 3, 3]\n",
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        _line("three", 3).replace(b"3", b"4", 1),
        _line("three", 3)[:-1],
        _line(3, 3),  # type: ignore[arg-type]
    ],
)
def test_from_the_first_damaged_line_on_nothing_is_used(tmp_path: Path, line: bytes) -> None:
    path = stored(tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(whole + line + (_line("four", 4) if line.endswith(b"\n") else b""))
    again = AnswerStore(tmp_path, IDENTITY)
    assert again.resumed == 2
    assert (again["one"], again["two"]) == ([1], "2")
    assert "three" not in again
    assert "four" not in again
    again.add([("five", None)])
    again.close()
    assert path.read_bytes() == whole + _line("five", None)
    assert json.loads(_line("five", None))[:2] == ["five", None]


def test_answers_of_another_model_are_other_answers(tmp_path: Path) -> None:
    stored(tmp_path)
    other = AnswerStore(tmp_path, {"weights": "b"})
    assert other.resumed == 0
    other.close()
