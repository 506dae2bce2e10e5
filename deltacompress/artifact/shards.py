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
        for name, span in header.tensors.items():
            if name in spans:
                raise FormatError(f"part {name} stands in two shards", where=root, way_out=AGAIN)
            spans[name] = (path, span)
    wanted = dict(_stored_parts(manifest))
    if spans.keys() != wanted.keys():
        odd = min(spans.keys() ^ wanted.keys())
        raise FormatError(f"part {odd} is not in both manifest and shards", where=root, way_out=AGAIN)
    for key, size in wanted.items():
        if spans[key][1].info.nbytes != size:
            found = spans[key][1].info.nbytes
            raise FormatError(f"part {key} has {found} bytes, the manifest says {size}", where=root, way_out=AGAIN)
    return spans


def _stored_parts(manifest: Manifest) -> Iterator[tuple[str, int]]:
    for record in manifest.tensors:
        for part in record.parts:
            yield f"{record.name}.{part.name}", part.bytes
