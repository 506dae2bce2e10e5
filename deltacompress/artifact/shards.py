"""Where the parts of an artifact lie: its shards' headers, held against its manifest. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deltacompress.artifact.records import Manifest
from deltacompress.checkpoints.header import TensorSpan, read_header
from deltacompress.codecs.formats.spec import AGAIN
from deltacompress.errors import CheckpointError, ChecksumError, FormatError


def spans_of(root: Path, manifest: Manifest) -> dict[str, tuple[Path, TensorSpan]]:
    """Where each part lies; parts of manifest and shards must be the same, one for one."""
    spans: dict[str, tuple[Path, TensorSpan]] = {}
    for shard in manifest.shards:
        path = root / shard.file
        try:
            header = read_header(path)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # no permission: no word on the bytes
                raise
            raise error.retold(ChecksumError) from error
        if twice := spans.keys() & header.tensors.keys():
            raise FormatError(f"part {min(twice)} stands in two shards", where=root, way_out=AGAIN)
        spans |= {name: (path, span) for name, span in header.tensors.items()}
    wanted = dict(_stored_parts(manifest))
    found = {name: span.info.nbytes for name, (_, span) in spans.items()}
    if found.keys() != wanted.keys():
        odd = min(found.keys() ^ wanted.keys())
        raise FormatError(f"part {odd} is not in both manifest and shards", where=root, way_out=AGAIN)
    if found != wanted:
        odd = next(name for name, size in wanted.items() if found[name] != size)
        told = f"part {odd} has {found[odd]} bytes, the manifest says {wanted[odd]}"
        raise FormatError(told, where=root, way_out=AGAIN)
    return spans


def _stored_parts(manifest: Manifest) -> Iterator[tuple[str, int]]:
    for record in manifest.tensors:
        for part in record.parts:
            yield f"{record.name}.{part.name}", part.bytes
