"""The fuzzer of tests/zoo/fuzz.py, thinned, and what hypothesis finds between its inputs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo.fuzz import fuzz
from zoo.fuzz_targets import RECORDS, targets

from deltacompress.errors import DeltaCompressError
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest
from deltacompress.zoo.errors import InvalidNameError
from deltacompress.zoo.ledger.names import MAX_PART, parse, parse_alias
from deltacompress.zoo.ledger.records import decode

TARGETS = targets()
FIELDS = st.sampled_from(sorted({field for record in RECORDS.values() for field in type(record).model_fields}))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_no_input_does_more_than_fail_cleanly() -> None:
    outcomes, faults = fuzz(6_000, seed=1)
    assert not faults
    for name in TARGETS:  # each parser is reached, and let some changed inputs pass or refused them
        assert sum(count for told, count in outcomes.items() if told.startswith(f"{name}: ")) > 20


def test_little_memory() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-m", "tests.zoo.fuzz", "--inputs", "500", "--seed", "3"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults 0" in done.stdout


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_valid_is_accepted(name: str) -> None:
    for raw in TARGETS[name].inputs:
        TARGETS[name].run(raw)


@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_any_bytes(name: str, raw: bytes) -> None:
    with suppress(DeltaCompressError):
        TARGETS[name].run(raw)


@given(st.sampled_from(sorted(RECORDS)), st.dictionaries(st.text(max_size=8) | FIELDS, JSON, max_size=3))
@settings(max_examples=200, deadline=None)
def test_records_with_any_fields(key: str, fields: dict[str, object]) -> None:
    record = RECORDS[key]
    data = record.model_dump(mode="json") | fields | {"key": key}
    try:
        raw = canonical_bytes(data | {"digest": canonical_digest(data)})
    except ValueError:
        return  # NaN and the like have no spelling
    with suppress(DeltaCompressError):
        assert decode(key, raw, type(record), "zoo").type == record.type


@given(st.text(max_size=30) | st.from_regex(r"[a-z0-9._-]{1,5}/[a-z0-9._-]{1,5}(@[a-z0-9._-]{1,9})?", fullmatch=True))
@settings(max_examples=300, deadline=None)
def test_a_name_is_refused_or_comes_back_as_it_was(text: str) -> None:
    try:
        found = parse(text)
    except InvalidNameError:
        return
    assert str(found) in (text, text.removesuffix("@latest"))
    assert text.isascii()
    assert text == text.lower()
    for part in found.name.split("/"):
        assert part[0].isalnum()
        assert part[-1].isalnum()
        assert len(part) <= MAX_PART
    assert found.alias is None or parse_alias(found.alias) == found.alias
