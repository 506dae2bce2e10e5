"""export and import: some versions of a zoo in one tar file, for a machine that no network reaches.

    zoo-export.json            what follows: versions, their attachments, every blob with its size; hashed
    blobs/sha256/ab/<hex>      each blob once, in the order of that list

It is a plain tar that any tool can list, written in one spelling only (export_format); a tar of another tool is
refused (export_reader). The whole structure is checked before anything is written, each blob is hashed while it goes
into the zoo, and each version is published as any other: an import that was interrupted has published some versions
whole, and running it again adds the rest.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deltacompress.files.places import check_place
from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.errors import ConflictError, PullError
from deltacompress.zoo.exchange.export_format import (
    INDEX,
    MAX_INDEX_BYTES,
    ExportBlob,
    ExportManifest,
    ExportRecord,
    ExportVersion,
    blob_member,
    end_of_archive,
    header_for,
    padding_for,
)
from deltacompress.zoo.exchange.export_reader import Archive
from deltacompress.zoo.ledger import blobs, canonical
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.records import encode
from deltacompress.zoo.ledger.versions import version_with
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.durable import NO_HARD_LINKS, again, because, sync_directory, write_new


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export holds. versions: `name@version`; bytes: of the file."""

    versions: tuple[str, ...]
    blobs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Imported:
    """One version of an export. source: `name@version` where it came from; target: here; new: published just now."""

    source: str
    target: str
    new: bool


def export(zoo: Catalog, wanted: Sequence[str], out: Path, *, reporter: Reporter = SILENT) -> Exported:
    """Write versions, with what is attached to them, to the new file `out`; it appears whole or not at all.

    Raises:
        ZooError: no such version, a damaged one, or `out` exists or cannot be written.
    """
    _check_target(out)
    versions: dict[str, ExportVersion] = {}
    sources: dict[str, Blob] = {}
    for name in wanted:
        found, entry = zoo.show(name)
        attached = [(one, _add(zoo, sources, one)) for one in zoo.referrers(str(found))]
        versions[str(found)] = ExportVersion(
            name=found.name,
            version=found.version,
            manifest=found.manifest,
            size=_add(zoo, sources, entry),
            attached=tuple(ExportManifest(manifest=one.digest, size=size) for one, size in attached),
        )
    if not versions:
        raise ConflictError("nothing to export", where=zoo.where, way_out="name some versions")
    record = ExportRecord(
        versions=tuple(sorted(versions.values(), key=lambda one: (one.name, one.version))),
        blobs=tuple(ExportBlob(digest=blob.digest, size=blob.size) for blob in sources.values()),
    )
    index = encode(INDEX, record)
    if not canonical.fits(index, MAX_INDEX_BYTES):
        raise ConflictError("too many blobs for one export", where=zoo.where, way_out="export fewer versions at a time")
    reporter.phase("exporting", len(sources))
    written = _write(out, index, list(sources.values()), reporter)
    return Exported(tuple(versions), len(sources), written)


def import_(zoo: Catalog, path: Path, *, reporter: Reporter = SILENT) -> list[Imported]:
    """Publish every version of the export file `path` that the zoo lacks, under the next number of its name.

    Raises:
        IntegrityError: it is no export, or damaged. Nothing is published then, or, where a blob turns out damaged as
            it is read, only the versions before the one that needs it.
        StoreError: it cannot be read, or the zoo not be written.
    """
    archive = Archive.open(path)
    found = []
    for version in archive.record.versions:
        entry = archive.entries[version.manifest]
        there = version_with(zoo.store, version.name, version.manifest)
        target = there
        if target is None:
            target = str(zoo.publish(entry, archive.blobs(entry), version.name, reporter=reporter))
        for one in version.attached:
            attached = archive.entries[one.manifest]
            zoo.attach(attached, archive.blobs(attached), reporter=reporter)
        found.append(Imported(f"{version.name}@{version.version}", target, there is None))
    return found


def _add(zoo: Catalog, sources: dict[str, Blob], entry: EntryManifest) -> int:
    """Put an entry's manifest and blobs among the sources; the manifest's size."""
    raw = entry.to_bytes()
    sources.setdefault(entry.digest, Blob(entry.digest, len(raw), lambda: (raw,), "the manifest"))
    for digest, size in entry.blobs.items():
        sources.setdefault(digest, blobs.stored(zoo.store, digest, size))
    return len(raw)


def _check_target(out: Path) -> None:
    """Refuse what cannot be the name of a new file, before any work."""
    if not out.name:
        raise PullError(
            "no name of a file", where=f"{str(out)!a}", way_out="give the tar file to write, e.g. models.tar"
        )
    if os.path.lexists(out):
        raise PullError("exists already", where=out, way_out="remove it or choose another name")
    check_place(out)


def _write(out: Path, index: bytes, sources: list[Blob], reporter: Reporter) -> int:
    written = 0

    def members() -> Iterator[bytes | memoryview]:
        nonlocal written
        for chunk in _members(index, sources, reporter):
            written += len(chunk)
            yield chunk

    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
    try:
        write_new(str(temporary), members)
        try:
            _give_name(str(temporary), str(out))
        except FileExistsError as error:
            raise PullError("exists already", where=out, way_out="remove it or choose another name") from error
        sync_directory(str(out.parent))
    except OSError as error:
        raise because(PullError, out, error) from error
    finally:
        with suppress(OSError):
            again(osfs.unlink, str(temporary))
    return written


def _give_name(temporary: str, out: str) -> None:
    try:
        again(osfs.link, temporary, out)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:  # exFAT and the like: what is on most sticks
            raise
        if os.path.lexists(out):
            raise FileExistsError(out) from error
        again(osfs.rename, temporary, out)


def _members(index: bytes, sources: list[Blob], reporter: Reporter) -> Iterator[bytes | memoryview]:
    yield header_for(INDEX, len(index)) + index + padding_for(len(index))
    for blob in sources:
        yield header_for(blob_member(blob.digest), blob.size)
        yield from blob.checked()
        yield padding_for(blob.size)
        reporter.step(blob.digest[:12])
    yield end_of_archive()
