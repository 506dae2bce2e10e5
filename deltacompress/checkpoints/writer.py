"""Deterministic writer of checkpoints and shards.

The bytes depend on the tensors alone. Every file is synced before the call returns; giving a directory its final name
is the caller's job, once all of it is there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.weight_files import INDEX, SINGLE
from deltacompress.errors import OutputError
from deltacompress.files.output import output_errors
from deltacompress.types import TensorInfo

if TYPE_CHECKING:
    import torch

Make: TypeAlias = "Callable[[], torch.Tensor | Iterator[torch.Tensor]]"
"""Gives a tensor, or its elements in row-major order, flat and piece by piece."""
METADATA = {"format": "pt"}
"""Of every shard, as other readers expect it."""


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[TensorInfo, Make]],
    *,
    max_shard_bytes: int = 2 * 2**30,
) -> None:
    """Write weights into the existing empty directory `out`: one file, or shards of at most `max_shard_bytes` + index.

    The bytes depend on the tensors alone, not on their order. Each callable is called once, when its turn comes, and
    what it gives dropped after it is written: one tensor, or one piece, is in memory at a time. Files are synced;
    renaming the directory is the caller's job. A tensor larger than `max_shard_bytes` gets a shard of its own.

    Raises:
        OutputError: `out` is not an empty directory, a tensor does not fit its info, disk full, no permission.
    """
    todo = list(tensors)
    if not todo:
        raise OutputError("a checkpoint needs at least one tensor", where=out)
    with output_errors(out):
        if not out.is_dir() or any(out.iterdir()):
            raise OutputError("weights are written into an existing empty directory", where=out)
    weight_map = write_shards(out, todo, stem="model", max_shard_bytes=max_shard_bytes, single=SINGLE)
    if len(set(weight_map.values())) > 1:
        total = {"total_size": sum(info.nbytes for info, _ in todo)}
        index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        write_file(out / INDEX, [index.encode()])


def write_shards(
    out: Path,
    tensors: Iterable[tuple[TensorInfo, Make]],
    *,
    stem: str,
    max_shard_bytes: int = 2 * 2**30,
    single: str | None = None,
) -> dict[str, str]:
    """Write tensors as `stem`-0000i-of-0000n.safetensors (or as `single`, if one file will do); name -> file.

    Raises:
        OutputError: as write_checkpoint.
    """
    weight_map: dict[str, str] = {}
    for file, shard in split_into_shards(out, tensors, stem=stem, max_shard_bytes=max_shard_bytes, single=single):
        write_file(file, shard_chunks(file, shard, METADATA))
        weight_map |= {info.name: file.name for info, _ in shard}
    return weight_map


def split_into_shards(
    out: Path,
    tensors: Iterable[tuple[TensorInfo, Make]],
    *,
    stem: str,
    max_shard_bytes: int = 2 * 2**30,
    single: str | None = None,
) -> Iterator[tuple[Path, list[tuple[TensorInfo, Make]]]]:
    """Which file holds which tensors; as write_shards, which writes them."""
    todo = sorted(tensors, key=lambda item: item[0].name)
    names = [info.name for info, _ in todo]
    if len(set(names)) != len(names) or max_shard_bytes < 1:
        raise OutputError("need names given once, and max_shard_bytes of at least 1", where=out)
    shards: list[list[tuple[TensorInfo, Make]]] = [[]]
    filled = 0
    for info, make in todo:
        if shards[-1] and filled + info.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((info, make))
        filled += info.nbytes
    for i, shard in enumerate(shards, 1):
        numbered = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        yield out / (single if single is not None and len(shards) == 1 else numbered), shard


def shard_chunks(
    path: Path, tensors: Iterable[tuple[TensorInfo, Make]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The bytes of the safetensors file `path` with these tensors.

    Raises:
        OutputError: a tensor does not fit its info.
    """
    # Wide types first, as the safetensors library does: every tensor then starts at a multiple of its item size.
    tensors = sorted(tensors, key=lambda item: (-ITEMSIZE[item[0].dtype], item[0].name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for info, _ in tensors:
        end = begin + info.nbytes
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    yield len(raw).to_bytes(8, "little") + raw
    for info, make in tensors:
        left = info.nbytes
        for piece in _pieces(make(), info, path):
            left -= piece.nbytes
            yield tensor_bytes(piece)
        if left:
            raise OutputError(f"tensor {info.name} lacks {left} of its {info.nbytes} bytes", where=path)


def _pieces(made: torch.Tensor | Iterator[torch.Tensor], info: TensorInfo, path: Path) -> Iterator[torch.Tensor]:
    """On the CPU and contiguous; a tensor that does not fit its info is refused."""
    import torch

    from deltacompress.checkpoints.dtypes import DTYPES

    whole = isinstance(made, torch.Tensor)
    for piece in [made] if isinstance(made, torch.Tensor) else made:
        if piece.dtype != DTYPES[info.dtype] or (whole and tuple(piece.shape) != info.shape):
            given = f"{piece.dtype} {tuple(piece.shape)}"
            raise OutputError(f"tensor {info.name} should be {info.dtype} {info.shape}, got {given}", where=path)
        yield piece.detach().cpu().contiguous()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Create `path` from `chunks` and sync it; errors that come from the chunks themselves keep their own class."""
    with output_errors(path):
        file = path.open("xb", buffering=0)  # a buffer would be flushed once more, and fail once more, on closing
    with file:
        for chunk in chunks:
            view = memoryview(chunk)
            with output_errors(path):
                while len(view):
                    view = view[file.write(view) :]  # the system writes at most 2 GiB at once
        with output_errors(path):
            os.fsync(file.fileno())


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """As write_file; the hex SHA-256 and the length of what was written."""
    digest, size = hashlib.sha256(), 0

    def passing() -> Iterator[bytes | memoryview]:
        nonlocal size
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    write_file(path, passing())
    return digest.hexdigest(), size
