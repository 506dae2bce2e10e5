"""Where each tensor of a file lies: strict parsing of safetensors headers.

Nothing about a file is believed before it passes here.

Why not the safetensors library: it refuses overlaps, holes and trailing bytes, but accepts duplicate names, unknown
fields, empty names and shapes such as [0, 2^62] (version 0.8), and each of those can make two readers see two different
models in one file. The layout is small enough to check whole:

    8 bytes   n, little-endian unsigned: length of the header
    n bytes   JSON object {name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces at the end;
              optional "__metadata__": {text: text}
    the rest  raw little-endian, row-major tensor data; offsets count from its start

Rules on top of the format's own: names unique and by the rule of `tensor_names`, exactly the three fields per tensor,
counts and sizes capped, the data section covered exactly once without holes, and the file ends where the last tensor
ends.

No torch here, so an artifact can be inspected without it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from deltacompress.checkpoints.names import RULE, is_tensor_name, shown
from deltacompress.errors import CheckpointError
from deltacompress.files.json_limits import MAX_DEPTH, is_deep, takes_more
from deltacompress.files.regular import NEVER, Links, open_regular, unreadable
from deltacompress.types import TensorInfo

MAX_HEADER_BYTES = 32 << 20  # of 100,000 tensors: about 16 MB
_MAX_MEMORY = 160 << 20  # of the parsed header of 100,000 tensors: about 120 MB, by the estimate
MAX_TENSORS = 100_000  # per file; the largest public mixture-of-experts shards hold a few thousand
MAX_RANK = 16
MAX_NUMEL = 2**48  # product of the dimensions that are not 0, so that [0, 2^62] cannot overflow a stride

# fmt: off
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8,
    "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
}
# fmt: on
"""Bytes per element of every dtype that is read; the format's sub-byte types (F4, F6) are refused."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""The dtypes that values are computed in, which may differ between a base and what was tuned from it."""

_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor lies: bytes [begin, end) of the file, counted from its first byte."""

    info: TensorInfo
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: `tensors` in file order, free-form text `metadata`, length of the file in bytes."""

    tensors: dict[str, TensorSpan]
    metadata: dict[str, str]
    file_bytes: int


def load_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse `raw` as one JSON object without duplicate keys.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, a key given twice, nested too deeply, or more objects,
            lists and values than a file of this kind holds; the message starts with `where`.
    """
    if takes_more(raw, _MAX_MEMORY):
        raise CheckpointError(
            "its JSON holds more values than any such file does", where=where, way_out="get the file again"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(
                f"key {brief(twice)} is given twice", where=where, way_out="the file is damaged, get it again"
            )
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, an endless number, endless nesting
        raise CheckpointError(
            f"not valid JSON ({_one_line(error)})", where=where, way_out="the file is damaged, get it again"
        ) from None
    if is_deep(raw):
        raise CheckpointError(f"nested deeper than {MAX_DEPTH} levels", where=where, way_out="get the file again")
    if not isinstance(value, dict):
        raise CheckpointError(
            f"expected a JSON object, found {type(value).__name__}", where=where, way_out="get the file again"
        )
    return value


def read_header(path: Path, *, links: Links = NEVER) -> Header:
    """Read and check the header of the safetensors file at `path`; no tensor data is read.

    links: as files.regular.open_regular takes them.

    Raises:
        CheckpointError: the file cannot be read, is truncated, has trailing bytes, or breaks a rule of this module.
    """
    try:
        with open_regular(path, links=links) as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if prefix == b"version ":
                raise CheckpointError(
                    "a Git LFS pointer, not the weights", where=path, way_out="run `git lfs pull` in its directory"
                )
            length = int.from_bytes(prefix, "little")
            if size < 8 or 8 + length > size:
                raise CheckpointError(
                    f"truncated or not a safetensors file ({size} bytes, but the header should end at byte "
                    f"{8 + length})",
                    where=path,
                    way_out="copy or download it again",
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"a header of {length} bytes is over the cap of {MAX_HEADER_BYTES}",
                    where=path,
                    way_out="get it again",
                )
            raw = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError("no such file", where=path, way_out="get it again") from error
    except OSError as error:
        raise unreadable(CheckpointError, path, error) from error
    return parse_header(raw, size, str(path))


def parse_header(raw: bytes, file_bytes: int, where: str) -> Header:
    """Check the JSON header `raw` (without its 8-byte length) of a file of `file_bytes` bytes; `where` names it.

    Raises:
        CheckpointError: any rule of this module is broken.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError(
            "the header does not start with '{': not a safetensors file", where=where, way_out="get it again"
        )
    if (count := raw.count(b'"data_offsets"')) > MAX_TENSORS:  # before they take memory; no name holds a quote
        raise CheckpointError(
            f"{count} tensors in one file, over the cap of {MAX_TENSORS}", where=where, way_out="get it again"
        )
    entries = load_json_object(raw, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ must map text to text", where=where, way_out="get it again")
    start = 8 + len(raw)
    spans = sorted(
        (_span(name, entry, start, where) for name, entry in entries.items()),
        key=lambda span: (span.begin, span.end, span.info.name),
    )
    _check_coverage(spans, start, file_bytes, where)
    return Header({span.info.name: span for span in spans}, metadata, file_bytes)


def _span(name: str, entry: Any, start: int, where: str) -> TensorSpan:
    if not is_tensor_name(name):
        raise CheckpointError(f"{shown(name)} is no tensor name ({RULE})", where=where, way_out="rename it")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise CheckpointError(
            f"tensor {name} must have exactly the fields {', '.join(sorted(_FIELDS))}",
            where=where,
            way_out="get it again",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise CheckpointError(
            f"tensor {name} has dtype {brief(dtype)}; readable are {', '.join(ITEMSIZE)}", where=where
        )
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise CheckpointError(
            f"tensor {name} has shape {brief(shape)}; need at most {MAX_RANK} sizes >= 0",
            where=where,
            way_out="get it again",
        )
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"tensor {name} has data_offsets {brief(offsets)}; need two offsets >= 0",
            where=where,
            way_out="get it again",
        )
    sizes = tuple(shape)
    extent, needed = _extent(sizes, dtype)
    if extent > MAX_NUMEL:
        raise CheckpointError(
            f"tensor {name} has shape {brief(shape)}, over the cap of {MAX_NUMEL} elements",
            where=where,
            way_out="get it again",
        )
    begin, end = offsets
    if end - begin != needed:
        raise CheckpointError(
            f"tensor {name}, {dtype} {shape}, needs {needed} bytes but is given [{brief(begin)}, {brief(end)})",
            where=where,
            way_out="the file is damaged, get it again",
        )
    return TensorSpan(TensorInfo(name, dtype, sizes, needed), start + begin, start + end)


@lru_cache(maxsize=1024)
def _extent(sizes: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """The product of the sizes that are not 0, and bytes; most tensors have the shape of others."""
    extent = math.prod(filter(None, sizes))
    return extent, 0 if 0 in sizes else extent * ITEMSIZE[dtype]


def _check_coverage(spans: Iterable[TensorSpan], start: int, file_bytes: int, where: str) -> None:
    """The tensors, sorted by place, must tile the data section [start, file_bytes): no overlap, hole or trailer."""
    position = start
    for span in spans:
        if span.begin != position:
            fault = "overlaps the tensor before it" if span.begin < position else "leaves a hole before it"
            raise CheckpointError(
                f"tensor {span.info.name} {fault}", where=where, way_out="the file is damaged, get it again"
            )
        position = span.end
    if position > file_bytes:
        raise CheckpointError(
            f"truncated, {position - file_bytes} of {position} bytes are missing",
            where=where,
            way_out="copy or download it again",
        )
    if position < file_bytes:
        raise CheckpointError(
            f"{file_bytes - position} bytes follow the last tensor", where=where, way_out="get the file again"
        )


def _is_sizes(value: Any) -> bool:
    # `type is int`, because True is an int to isinstance.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def brief(value: Any) -> str:
    """`value` for a message: one ASCII line of bounded length, whatever a hostile header put there."""
    try:
        text = ascii(value)
    except ValueError:  # an integer beyond Python's limit for decimal digits
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: Exception) -> str:
    return ascii(str(error).partition("\n")[0])[1:-1][:120]
