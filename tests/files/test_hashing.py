"""Hashes of files, and of canonical JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from io import BufferedReader, BytesIO
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from deltacompress.files import hashing
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest, canonical_fields, join_fields
from deltacompress.files.regular import ANYWHERE, UnfitFileError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_files_are_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 3)
    file, link = tmp_path / "a", tmp_path / "link"
    file.write_bytes(b"0123456789")
    link.symlink_to(file)
    whole = (hashlib.sha256(b"0123456789").hexdigest(), 10)
    assert hashing.hash_file(file) == hashing.hash_file(link, links=ANYWHERE) == whole
    with pytest.raises(UnfitFileError, match="a symbolic link"):
        hashing.hash_file(link)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnfitFileError, match="a named pipe"):
        hashing.hash_file(tmp_path / "pipe")


def test_blake3_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that are large enough for its threads, and in a process that another one forked after it had some."""
    monkeypatch.setattr(hashing, "_CHUNK", 300_000)
    file, link, raw = tmp_path / "a", tmp_path / "link", os.urandom(1_000_003)
    file.write_bytes(raw)
    link.symlink_to(file)
    whole = blake3(raw).hexdigest()
    assert hashing.blake3_file(file) == hashing.blake3_file(link, links=ANYWHERE) == hashing.blake3_hex(raw) == whole
    with pytest.raises(UnfitFileError, match="a symbolic link"):
        hashing.blake3_file(link)
    child = os.fork()
    if child == 0:
        wrong = True
        try:
            wrong = hashing.blake3_file(file) != whole
        finally:
            os._exit(wrong)  # whatever happens, into no second pytest
    for _ in range(600):
        if (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
            assert ended == (child, 0)
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child waits for threads that it has not")


@given(st.binary(max_size=40), st.integers(0, 50))
def test_no_more_is_read_than_was_asked_for(raw: bytes, nbytes: int) -> None:
    file = BufferedReader(BytesIO(raw))  # type: ignore[arg-type]
    assert b"".join(hashing.read_chunks(file, nbytes)) == raw[:nbytes]
    assert b"".join(hashing.read_chunks(file)) == raw[nbytes:]


@given(st.dictionaries(st.text(), PLAIN))
def test_canonical_json(data: dict[str, object]) -> None:
    raw = canonical_bytes(data)
    assert json.loads(raw) == data
    assert raw == canonical_bytes(dict(reversed(data.items()))) == join_fields(canonical_fields(data))
    assert raw.isascii()
    assert canonical_digest(data) == hashlib.sha256(raw).hexdigest()


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_bytes({"a": float("nan")})
