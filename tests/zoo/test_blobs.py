"""Blobs: what is read is what was asked for, never more, and what is stored is what was promised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo.memory import MemoryStore
from zoo.samples import make_artifact, sample_parts

from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries.artifact import describe
from deltacompress.zoo.errors import ConflictError, DamagedBlobError, DamagedRecordError
from deltacompress.zoo.ledger import blobs
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import MAX_ENTRY_BYTES
from deltacompress.zoo.ledger.records import VersionRecord, encode, nonce, now
from deltacompress.zoo.store.layout import blob_key, version_key


class Slow(MemoryStore):
    """Gives a byte at a time, and counts them."""

    given = 0

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        for byte in self.get(key, limit=1 << 60):
            self.given += 1
            yield bytes([byte])


def test_no_blob_is_read_beyond_its_size() -> None:
    digest = sha256_hex(b"right")
    store = Slow({blob_key(digest, 0): b"right, and a million more"})
    seen: list[bytes] = []
    chunks = map(seen.append, blobs.stream(store, blob_key(digest, 0), digest, 5))
    with pytest.raises(DamagedBlobError, match="damaged"):
        list(chunks)
    assert b"".join(seen) == b"right"
    assert store.given <= 6
    store.given = 0
    assert not blobs.intact(store, blob_key(digest, 0), digest, 5)
    assert store.given == 0


def test_a_size_beyond_the_cap_is_damage_before_anything_is_read(tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    key = version_key("team/odd", 1)
    record = VersionRecord(manifest="0" * 64, size=MAX_ENTRY_BYTES + 1, txn=nonce(), created=now())
    zoo.store.put_if_absent(key, encode(key, record))
    with pytest.raises(DamagedRecordError, match=f"manifest of team/odd@1: {MAX_ENTRY_BYTES + 1} bytes, over the cap"):
        zoo.show("team/odd")


@pytest.mark.parametrize("changed", [b"other!", b"longer than it was", b""])
def test_a_source_that_changes_meanwhile_is_told_and_not_stored(changed: bytes) -> None:
    store = MemoryStore()
    blob = Blob(sha256_hex(b"promis"), 6, lambda: (changed,), "the file")
    with pytest.raises(ConflictError, match="the file: not what its hash says, or changed while it was published"):
        blobs.ensure(store, blob)
    assert not list(store.list("blobs/"))


def test_an_artifact_that_changes_while_it_is_published(tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    artifact = make_artifact(tmp_path / "a", sample_parts(1))
    described = describe(artifact)
    (artifact / "config.json").write_bytes(b'{"model_type":"llamb"}')
    with pytest.raises(ConflictError, match=r"config\.json: not what its hash says"):
        zoo.publish(described.entry, described.blobs, "team/bot")
    assert list(zoo.list()) == []
    assert list(zoo.store.list("txn/")) == []
