"""From a version to what it holds: manifest and referrers, each checked against its hash on the way."""

from __future__ import annotations

from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.ledger import blobs
from deltacompress.zoo.ledger.entry import MAX_ENTRY_BYTES, EntryManifest, parse_entry
from deltacompress.zoo.ledger.versions import Resolved
from deltacompress.zoo.store.base import Store


def open_entry(store: Store, found: Resolved) -> EntryManifest:
    """The manifest of a version.

    Raises:
        MissingBlobError, DamagedBlobError, DamagedRecordError: it is not there as it was written; names the entry.
    """
    return open_manifest(store, found.manifest, found.size, str(found))


def open_manifest(store: Store, digest: str, size: int, name: str) -> EntryManifest:
    """As open_entry, by digest."""
    raw = blobs.read(store, digest, size, limit=MAX_ENTRY_BYTES, what=f"manifest of {name}")
    return parse_entry(raw, f"{store.where}: manifest of {name}")


def copy_sources(store: Store, entry: EntryManifest, *, trash: bool = False) -> list[blobs.Blob]:
    """The blobs of an entry of this store, to be put again."""
    return [blobs.stored(store, digest, size, trash=trash) for digest, size in entry.blobs.items()]


def need_kind(found: Resolved, entry: EntryManifest, *kinds: str) -> None:
    """Refuse an entry that is none of `kinds`.

    Raises:
        NotFoundError: says what it is.
    """
    if entry.kind not in kinds:
        article = "an" if entry.kind == "adapter" else "a"
        raise NotFoundError(
            f"{article} {entry.kind}, not a {' or '.join(kinds)}", where=found, way_out="`zoo list` tells kinds"
        )
