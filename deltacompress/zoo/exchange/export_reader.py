"""Strict reading of an export file: nothing in it is believed before it passes here, nothing of it is written anywhere.

The list at its front is read under a cap and checked against its own digest; from there on every header block must be
the very bytes that the list calls for, so offsets are known, and the rest of the file is only ever read as blobs that
are hashed. Memory holds the list and one chunk.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deltacompress.errors import FormatError, TruncatedFileError
from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo.errors import DamagedBlobError, DamagedRecordError, InvalidNameError, StoreError, ZooFormatError
from deltacompress.zoo.exchange.export_format import (
    BLOCK,
    FORMAT,
    INDEX,
    MAX_INDEX_BYTES,
    ExportManifest,
    ExportRecord,
    ExportVersion,
    blob_member,
    end_of_archive,
    header_for,
    padding_for,
)
from deltacompress.zoo.ledger import names
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.canonical import parse
from deltacompress.zoo.ledger.entry import MAX_ENTRY_BYTES, EntryManifest, parse_entry
from deltacompress.zoo.ledger.records import decode
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import CHUNK
from deltacompress.zoo.store.durable import again, because, close

_Read = Callable[[int, int], bytes]
"""(offset, length) -> exactly so many bytes, or fewer at the end of the file."""


class Archive:
    """An export file whose structure was checked; make it with `Archive.open`.

    record: its list; places: digest -> (offset, size) of every blob; entries: digest -> manifest of every entry in it.
    """

    def __init__(
        self, path: Path, record: ExportRecord, places: dict[str, tuple[int, int]], entries: dict[str, EntryManifest]
    ) -> None:
        self.path = path
        self.record = record
        self.places = places
        self.entries = entries

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Check the file at `path`; reads the list, the headers and the manifests.

        Raises:
            FormatError: not an export, or not as this program writes one.
            TruncatedFileError: it ends too early.
            DamagedRecordError, DamagedBlobError: the list or a manifest is damaged.
            ZooFormatError: written by a newer version.
            StoreError: it cannot be read.
        """
        with _reader(path) as (read, size):
            return cls(path, *examine(read, size, str(path)))

    def blobs(self, entry: EntryManifest) -> list[Blob]:
        """The blobs of an entry, hashed as they are read."""
        return [self._blob(digest) for digest in entry.blobs]

    def _blob(self, digest: str) -> Blob:
        offset, size = self.places[digest]

        def chunks() -> Iterator[bytes]:
            seen = hashlib.sha256()
            with _reader(self.path) as (read, _):
                for at in range(0, size, CHUNK):
                    chunk = read(offset + at, min(CHUNK, size - at))
                    seen.update(chunk)
                    yield chunk
            if seen.hexdigest() != digest:
                raise DamagedBlobError(f"blob {digest[:12]} is damaged", where=self.path, way_out="copy the file again")

        return Blob(digest, size, chunks, f"{self.path}: blob {digest[:12]}")


def examine(
    read: _Read, size: int, where: str
) -> tuple[ExportRecord, dict[str, tuple[int, int]], dict[str, EntryManifest]]:
    """Check an archive of `size` bytes; its list, where each blob lies, its manifests. Raises as Archive.open."""
    record, places = _scan(read, size, where)
    return record, places, _manifests(read, record, places, where)


def _scan(read: _Read, size: int, where: str) -> tuple[ExportRecord, dict[str, tuple[int, int]]]:
    head = read(0, BLOCK)
    try:
        length = tarfile.TarInfo.frombuf(head, "ascii", "strict").size
    except (tarfile.TarError, ValueError) as error:
        raise FormatError("not a file of `zoo export`", where=where) from error
    if not 0 <= length <= MAX_INDEX_BYTES or head != header_for(INDEX, length):
        raise FormatError(f"does not begin with {INDEX}; not a file of `zoo export`", where=where)
    position = BLOCK + length + len(padding_for(length))
    if position > size:
        raise TruncatedFileError("ends within its list", where=where, way_out="copy it again")
    record = _record(read(BLOCK, length), where)
    _expect(read, BLOCK + length, padding_for(length), f"{where}: after the list")
    places: dict[str, tuple[int, int]] = {}
    for blob in record.blobs:
        if blob.digest in places:
            raise DamagedRecordError(f"blob {blob.digest[:12]} is listed twice", where=where)
        told = f"{where}: blob {blob.digest[:12]}"
        _expect(read, position, header_for(blob_member(blob.digest), blob.size), told)
        places[blob.digest] = (position + BLOCK, blob.size)
        position += BLOCK + blob.size
        if position > size:
            raise TruncatedFileError(f"{position - size} bytes are missing", where=told, way_out="copy it again")
        _expect(read, position, padding_for(blob.size), told)
        position += len(padding_for(blob.size))
    _expect(read, position, end_of_archive(), f"{where}: its end")
    if position + len(end_of_archive()) != size:
        raise FormatError(f"{size - position} bytes follow its last blob; not as `zoo export` wrote it", where=where)
    return record, places


def _record(raw: bytes, where: str) -> ExportRecord:
    data = parse(raw, f"{where}/{INDEX}", limit=MAX_INDEX_BYTES)
    if data.get("type") == "export" and type(data.get("format")) is int and data["format"] > FORMAT:
        raise ZooFormatError(
            f"format {data['format']}, this program reads up to {FORMAT}", where=where, way_out="upgrade deltacompress"
        )
    return decode(INDEX, raw, ExportRecord, where, limit=MAX_INDEX_BYTES, way="copy the file again")


def _manifests(
    read: _Read, record: ExportRecord, places: dict[str, tuple[int, int]], where: str
) -> dict[str, EntryManifest]:
    """Every manifest, checked; all that they need must be there, and nothing else."""
    found: dict[str, EntryManifest] = {}
    needed: set[str] = set()
    for version in record.versions:
        try:
            names.parse_name(version.name)
        except InvalidNameError as error:
            raise error.retold(DamagedRecordError, within=where) from error
        manifests: tuple[ExportVersion | ExportManifest, ...] = (version, *version.attached)
        for one in manifests:
            entry = _manifest(read, one, places, where) if one.manifest not in found else found[one.manifest]
            if (entry.subject is not None) != (one is not version) or entry.subject not in (None, version.manifest):
                raise DamagedRecordError(
                    f"{version.name}@{version.version}: what is attached is not about it", where=where
                )
            found[one.manifest] = entry
            needed |= {one.manifest, *entry.blobs}
            for digest, size in entry.blobs.items():
                if digest not in places or places[digest][1] != size:
                    raise DamagedRecordError(f"{version.name}@{version.version}: lacks blob {digest[:12]}", where=where)
    if needed != places.keys():
        raise DamagedRecordError("holds a blob that none of its versions needs", where=where)
    return found


def _manifest(
    read: _Read, one: ExportVersion | ExportManifest, places: dict[str, tuple[int, int]], where: str
) -> EntryManifest:
    if one.manifest not in places or places[one.manifest][1] != one.size or one.size > MAX_ENTRY_BYTES:
        raise DamagedRecordError(f"lacks manifest {one.manifest[:12]}", where=where)
    raw = read(*places[one.manifest])
    if sha256_hex(raw) != one.manifest:
        raise DamagedBlobError(f"manifest {one.manifest[:12]} is damaged", where=where, way_out="copy it again")
    return parse_entry(raw, f"{where}: manifest {one.manifest[:12]}")


def _expect(read: _Read, offset: int, wanted: bytes, what: str) -> None:
    found = read(offset, len(wanted))
    if len(found) < len(wanted):
        raise TruncatedFileError("missing", where=what, way_out="copy it again")
    if found != wanted:
        raise FormatError("not as `zoo export` wrote it", where=what, way_out="copy it again")


@contextmanager
def _reader(path: Path) -> Iterator[tuple[_Read, int]]:
    """A function that reads the file, and its size."""
    try:
        fd = again(osfs.open_plain, str(path), True)  # its name is the user's: a link is fine
        try:

            def read(offset: int, length: int) -> bytes:
                os.lseek(fd, offset, os.SEEK_SET)
                found = bytearray()
                while len(found) < length and (chunk := again(osfs.read, fd, min(CHUNK, length - len(found)))):
                    found += chunk
                return bytes(found)

            yield read, os.fstat(fd).st_size
        finally:
            close(fd)
    except OSError as error:
        raise because(StoreError, path, error) from error
