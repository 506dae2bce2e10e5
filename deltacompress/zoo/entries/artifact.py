"""An artifact directory as an entry: which blobs, and how they make up the files again, byte for byte.

Every part of a shard is a blob of its own, so that entries share equal parts; the shard's header (with its 8-byte
length) is one, the artifact's manifest.json is the config, side files are one each. Parts under SMALL bytes (scales of
narrow tensors, norms) would make most of the objects and hardly any of the bytes: those of one shard go together into
one bundle. Counted on 25.7M-parameter Llama deltas: int2-24 has 192 parts, 60 of them large, and becomes 67 objects;
int4-24 has 248, 116 large, and becomes 123.

Reassembly needs no table: walk the header's tensors in file order; one of under SMALL bytes is next in the bundle, any
other is the next part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from deltacompress.artifact.manifest import MAX_MANIFEST_BYTES, parse_manifest, read_manifest_bytes
from deltacompress.artifact.parts import check_alone, check_file, check_size
from deltacompress.artifact.records import FileRecord, Manifest, PartRecord
from deltacompress.checkpoints.header import Header, TensorSpan, read_header
from deltacompress.errors import CheckpointError, ChecksumError, FormatError, TruncatedFileError
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.places import MANIFEST
from deltacompress.zoo.errors import InvalidNameError, StoreError
from deltacompress.zoo.ledger import blobs
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import (
    ARTIFACT,
    BUNDLE,
    FILE,
    HEADER,
    PART,
    RELATIONS,
    Descriptor,
    EntryManifest,
    Lineage,
)
from deltacompress.zoo.ledger.names import check_texts
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import Store
from deltacompress.zoo.store.durable import again, because, close

SMALL = 4096
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [begin, end) of a file."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Described:
    """What to publish: the manifest of the entry and its blobs, hashed but not yet stored. notes: to tell about it."""

    entry: EntryManifest
    blobs: list[Blob]
    notes: tuple[str, ...] = ()


def describe(artifact: Path, *, parents: tuple[str, ...] = (), relation: str | None = None) -> Described:
    """Check the artifact directory and every hash of it; stores nothing.

    Raises:
        IntegrityError: it is not what its manifest says (as deltacompress.artifact.delta.load_delta, plus every hash).
        InvalidNameError: no such relation, or a name in it that cannot be printed.
        StoreError: it cannot be read.
    """
    if relation is not None and relation not in RELATIONS:
        raise InvalidNameError(f"relation {str(relation)[:40]!a}: one of {', '.join(RELATIONS)}")
    raw = read_manifest_bytes(artifact)
    manifest = parse_manifest(raw, str(artifact / MANIFEST))
    named = {"name of the base": manifest.base.name, "name of the fine-tuned model": manifest.finetuned.name}
    check_texts(named | {"recipe": manifest.recipe.get("name")}, str(artifact / MANIFEST))
    config = Descriptor(media_type=ARTIFACT, digest=sha256_hex(raw), size=len(raw))
    blobs = [Blob(config.digest, config.size, lambda: (raw,), str(artifact / MANIFEST))]
    layers: list[Descriptor] = []
    parts = {f"{t.name}.{p.name}": p for t in manifest.tensors for p in t.parts}
    seen: set[str] = set()
    for record in manifest.shards:
        header = _header(artifact / record.file, record)
        _check_parts(artifact / record.file, header, parts, seen)
        _add_shard(artifact / record.file, record, header, parts, layers, blobs)
    if missing := sorted(parts.keys() - seen):
        raise FormatError(f"part {missing[0]} is not in any shard", where=artifact)
    for record in manifest.files:
        stored = record.stored
        path = artifact / stored.file
        check_size(path, stored)
        check_alone(artifact, record)
        pieces = (FileRange(str(path), 0, stored.bytes),)
        _check_hash(path, stored, _hash(pieces))
        if record.zstd is not None:
            check_file(artifact, record)
        layers.append(_layer(FILE, stored.file, stored.sha256, stored.bytes))
        blobs.append(_blob(stored.sha256, pieces))
    entry = EntryManifest(
        kind="delta",
        config=config,
        layers=tuple(layers),
        lineage=Lineage(
            base=manifest.base.content_hash,
            base_name=manifest.base.name,
            finetuned=manifest.finetuned.content_hash,
            finetuned_name=manifest.finetuned.name,
            parents=parents,
            relation=relation or "quantized",  # type: ignore[arg-type]
        ),
        summary=_summary(manifest, len(raw)),
    )
    return Described(entry, blobs)


def runs(header: Header) -> Iterator[tuple[TensorSpan, bool]]:
    """The tensors of a shard in file order, each with whether it lies in the bundle; empty ones are left out."""
    for span in header.tensors.values():
        if span.info.nbytes:
            yield span, span.info.nbytes < SMALL


def _add_shard(
    path: Path,
    record: FileRecord,
    header: Header,
    parts: dict[str, PartRecord],
    layers: list[Descriptor],
    blobs: list[Blob],
) -> None:
    data = min((span.begin for span in header.tensors.values()), default=header.file_bytes)
    _check_hash(path, record, _hash((FileRange(str(path), 0, record.bytes),)))
    head = (FileRange(str(path), 0, data),)
    digest = _hash(head)
    layers.append(_layer(HEADER, record.file, digest, data))
    blobs.append(_blob(digest, head))
    bundle = []
    for span, small in runs(header):
        piece, part = FileRange(str(path), span.begin, span.end), parts[span.info.name]
        alike = part.blake3 is None or _hash((piece,), blake3) == part.blake3
        if small:
            bundle.append(piece)
            alike = alike and _hash((piece,)) == part.sha256
        if not alike:
            raise ChecksumError(f"{span.info.name}: its bytes differ from their recorded hash", where=path)
    if bundle:
        digest, size = _hash(tuple(bundle)), sum(piece.end - piece.begin for piece in bundle)
        layers.append(_layer(BUNDLE, record.file, digest, size))
        blobs.append(_blob(digest, tuple(bundle)))
    for span, small in runs(header):
        if not small:  # the bytes are those of the file's hash; those of the part's hash they must be to be stored
            name = span.info.name
            layers.append(_layer(PART, record.file, parts[name].sha256, span.info.nbytes, part=name))
            blobs.append(_blob(parts[name].sha256, (FileRange(str(path), span.begin, span.end),)))


def _check_parts(path: Path, header: Header, parts: dict[str, PartRecord], seen: set[str]) -> None:
    for name, span in header.tensors.items():
        if name in seen:
            raise FormatError(f"part {name} stands in two shards", where=path)
        if name not in parts or parts[name].bytes != span.info.nbytes:
            raise FormatError(f"part {name} is not the one that the manifest lists", where=path)
        seen.add(name)


def _header(path: Path, record: FileRecord) -> Header:
    check_size(path, record)
    try:
        header = read_header(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # no permission: no word on the bytes
            raise
        raise error.retold(ChecksumError) from error
    return header


def _summary(manifest: Manifest, manifest_bytes: int) -> dict[str, str | int | float | None]:
    size = manifest_bytes + sum(record.bytes for record in manifest.stored_files)
    name = manifest.recipe.get("name")
    return {
        "artifact": manifest.digest,
        "artifact_bytes": size,
        "finetuned_bytes": manifest.finetuned.bytes,
        "lossless": manifest.lossless,
        "ratio": round(manifest.finetuned.bytes / size, 6),
        "recipe": name if isinstance(name, str) else None,
        "scope": manifest.scope,
        "tensors": len(manifest.tensors),
    }


def _layer(media_type: str, file: str, digest: str, size: int, **annotations: str) -> Descriptor:
    return Descriptor(media_type=media_type, digest=digest, size=size, annotations={"file": file, **annotations})


def _blob(digest: str, pieces: tuple[FileRange, ...]) -> Blob:
    return Blob(digest, sum(piece.end - piece.begin for piece in pieces), lambda: _chunks(pieces), pieces[0].path)


def _hash(pieces: tuple[FileRange, ...], algorithm: Callable[[], Any] = hashlib.sha256) -> str:
    seen = algorithm()
    for chunk in _chunks(pieces):
        seen.update(chunk)
    return str(seen.hexdigest())


def _chunks(pieces: tuple[FileRange, ...]) -> Iterator[bytes]:
    """The bytes of some pieces of one file."""
    if not pieces:
        return
    path = pieces[0].path
    try:
        fd = again(osfs.open_plain, path)
        try:
            for piece in pieces:
                os.lseek(fd, piece.begin, os.SEEK_SET)
                left = piece.end - piece.begin
                while left:
                    chunk = again(osfs.read, fd, min(_CHUNK, left))
                    if not chunk:
                        raise TruncatedFileError(
                            "cut short while it was read", where=path, way_out="copy the artifact again"
                        )
                    left -= len(chunk)
                    yield chunk
        finally:
            close(fd)
    except OSError as error:
        raise because(StoreError, path, error) from error


def manifest_in(store: Store, entry: EntryManifest, name: str) -> Manifest:
    """The artifact's manifest in a delta `name` of a store.

    Raises:
        IntegrityError: it is damaged.
    """
    config = entry.config
    raw = blobs.read(store, config.digest, config.size, limit=MAX_MANIFEST_BYTES, what=f"{MANIFEST} of {name}")
    return parse_manifest(raw, f"{store.where}: {name}")


def _check_hash(path: Path, record: FileRecord, digest: str) -> None:
    if digest != record.sha256:
        raise ChecksumError("its bytes differ from their recorded hash", where=path, way_out="copy the artifact again")
