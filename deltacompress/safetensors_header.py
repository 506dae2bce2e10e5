"""Where each tensor of a checkpoint lies: strict parsing of safetensors headers and of the index over the shards.

Nothing about a file is believed before it passes here.

Why not the safetensors library: it refuses overlaps, holes and trailing bytes, but accepts duplicate names, unknown
fields, empty names and shapes such as [0, 2^62] (version 0.8), and each of those can make two readers see two different
models in one file. The layout is small enough to check whole:

    8 bytes   n, little-endian unsigned: length of the header
    n bytes   JSON object {name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces at the end;
              optional "__metadata__": {text: text}
    the rest  raw little-endian, row-major tensor data; offsets count from its start

Rules on top of the format's own: names unique, printable and not empty, exactly the three fields per tensor, counts
and sizes capped, the data section covered exactly once without holes, and the file ends where the last tensor ends.
The index must agree with its shards tensor by tensor, both ways.

No torch here, so an artifact can be inspected without it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress.errors import CheckpointError
from deltacompress.json_memory import parsed_bytes
from deltacompress.types import TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20  # of 100,000 tensors: about 16 MB
_MAX_MEMORY = 160 << 20  # of the parsed header of 100,000 tensors: about 120 MB, by the estimate
MAX_TENSORS = 100_000  # per file; the largest public mixture-of-experts shards hold a few thousand
MAX_RANK = 16
MAX_NUMEL = 2**48  # product of the dimensions that are not 0, so that [0, 2^62] cannot overflow a stride
MAX_NAME = 1024

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of every dtype that is read; the format's sub-byte types (F4, F6) are refused."""

_PICKLES = ("*.bin", "*.pt", "*.pth")
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")
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
        CheckpointError: not UTF-8, not JSON, not an object, a key given twice, or more objects, lists and values than
            a file of this kind holds; the message starts with `where`.
    """
    if parsed_bytes(raw) > _MAX_MEMORY:
        raise CheckpointError(f"{where}: its JSON holds more values than any such file does; get the file again")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: key {_brief(twice)} is given twice; the file is damaged, get it again")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, an endless number, endless nesting
        raise CheckpointError(
            f"{where}: not valid JSON ({_one_line(error)}); the file is damaged, get it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}; get the file again")
    return value


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`; no tensor data is read.

    Raises:
        CheckpointError: the file cannot be read, is truncated, has trailing bytes, or breaks a rule of this module.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if prefix == b"version ":
                raise CheckpointError(
                    f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its directory"
                )
            length = int.from_bytes(prefix, "little")
            if size < 8 or 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({size} bytes, but the header should end at byte "
                    f"{8 + length}); copy or download it again"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: a header of {length} bytes is over the cap of {MAX_HEADER_BYTES}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); make it readable") from error
    return parse_header(raw, size, str(path))


def parse_header(raw: bytes, file_bytes: int, where: str) -> Header:
    """Check the JSON header `raw` (without its 8-byte length) of a file of `file_bytes` bytes; `where` names it.

    Raises:
        CheckpointError: any rule of this module is broken.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{where}: the header does not start with '{{': not a safetensors file; get it again")
    entries = load_json_object(raw, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map text to text")
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(f"{where}: {len(entries)} tensors in one file, over the cap of {MAX_TENSORS}")
    start = 8 + len(raw)
    spans = sorted(
        (_span(name, entry, start, where) for name, entry in entries.items()),
        key=lambda span: (span.begin, span.end, span.info.name),
    )
    _check_coverage(spans, start, file_bytes, where)
    return Header({span.info.name: span for span in spans}, metadata, file_bytes)


def find_weights(root: Path) -> tuple[dict[str, tuple[Path, TensorSpan]], list[Path]]:
    """Name -> (file, span) of every tensor of the checkpoint directory `root`, and its weight files with the index.

    Raises:
        CheckpointError: no safetensors, only pickles, an index that disagrees with its shards, or a damaged shard.
        OSError: the directory or the index cannot be read.
    """
    if (root / INDEX).is_file():
        return _read_shards(root, root / INDEX)
    single = root / SINGLE
    if single.is_file():
        spans = {name: (single, span) for name, span in read_header(single).tensors.items()}
        if not spans:
            raise CheckpointError(f"{single}: holds no tensors; get it again")
        return spans, [single]
    others = sorted(file.name for file in root.glob("*.safetensors"))
    if others:
        if SINGLE in others:
            raise CheckpointError(f"{single}: no regular file, maybe a broken link; put the weights there")
        hint = "it is a PEFT adapter: merge it" if "adapter_model.safetensors" in others else f"found {others[0]}"
        if (root / "manifest.json").is_file() and others[0].startswith("delta-"):
            raise CheckpointError(f"{root}: an artifact of deltacompress, not a model; `restore` makes a model of it")
        if len(others) == 1 and not others[0].startswith("adapter"):
            hint += f"; if that is the whole model, rename it to {SINGLE}"
        raise CheckpointError(f"{root}: neither {SINGLE} nor {INDEX} ({hint}); give the directory of a whole model")
    pickles = sorted(file.name for pattern in _PICKLES for file in root.glob(pattern))
    if pickles:
        what = f"only pickled weights ({pickles[0]}), which are never loaded"
        raise CheckpointError(f"{root}: {what}; convert them to safetensors with save_pretrained")
    raise CheckpointError(f"{root}: no weights; expected {SINGLE}, or {INDEX} and its shards")


def _read_shards(root: Path, index: Path) -> tuple[dict[str, tuple[Path, TensorSpan]], list[Path]]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{index}: over the cap of {MAX_HEADER_BYTES} bytes")
    weight_map = load_json_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map from tensor names to files; get it again")
    for name, file in weight_map.items():
        # One path component, no separator: no entry can lead out of the directory.
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.+-]*\.safetensors", file, re.ASCII):
            raise CheckpointError(
                f"{index}: tensor {_brief(name)} is in {_brief(file)}, not a plain *.safetensors name; get it again"
            )
    files = sorted(set(weight_map.values()))
    present = {file.name for file in root.glob("*.safetensors")}
    if missing := sorted(set(files) - present):
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(files)} shards missing, first {missing[0]}; get it again"
        )
    # A shard of the same series, or a single file, that the index does not name: which of the two is the model?
    series = {match.groups() for file in files if (match := _SHARD.fullmatch(file))}
    for file in sorted(present - set(files)):
        if file == SINGLE or ((match := _SHARD.fullmatch(file)) and match.groups() in series):
            raise CheckpointError(f"{index}: does not name {file}, which lies beside it; remove whichever is stale")
    spans: dict[str, tuple[Path, TensorSpan]] = {}
    for file in files:
        for name, span in read_header(root / file).tensors.items():
            if name in spans:
                raise CheckpointError(
                    f"{root / file}: tensor {name} is also in {spans[name][0].name}; remove one of them"
                )
            if name not in weight_map:
                raise CheckpointError(
                    f"{root / file}: tensor {name} is in this shard but not in {INDEX}; get both again"
                )
            spans[name] = (root / file, span)
    for name, file in weight_map.items():
        if name not in spans or spans[name][0].name != file:
            raise CheckpointError(
                f"{root / file}: tensor {_brief(name)} is not in it, but {INDEX} says so; get both again"
            )
    return spans, [index, *(root / file for file in files)]


def _span(name: str, entry: Any, start: int, where: str) -> TensorSpan:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(f"{where}: {name[:80]!a} is not a usable tensor name (empty, too long or unprintable)")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise CheckpointError(f"{where}: tensor {name} must have exactly the fields {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise CheckpointError(f"{where}: tensor {name} has dtype {_brief(dtype)}; readable are {', '.join(ITEMSIZE)}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise CheckpointError(f"{where}: tensor {name} has shape {_brief(shape)}; need at most {MAX_RANK} sizes >= 0")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: tensor {name} has data_offsets {_brief(offsets)}; need two offsets >= 0")
    extent = 1
    for size in shape:
        extent *= size or 1
    if extent > MAX_NUMEL:
        raise CheckpointError(f"{where}: tensor {name} has shape {_brief(shape)}, over the cap of {MAX_NUMEL} elements")
    numel = 0 if 0 in shape else extent
    begin, end = offsets
    if end - begin != numel * ITEMSIZE[dtype]:
        raise CheckpointError(
            f"{where}: tensor {name}, {dtype} {shape}, needs {numel * ITEMSIZE[dtype]} bytes but is given "
            f"[{_brief(begin)}, {_brief(end)}); the file is damaged, get it again"
        )
    return TensorSpan(TensorInfo(name, dtype, tuple(shape), end - begin), start + begin, start + end)


def _check_coverage(spans: Iterable[TensorSpan], start: int, file_bytes: int, where: str) -> None:
    """The tensors, sorted by place, must tile the data section [start, file_bytes): no overlap, hole or trailer."""
    position = start
    for span in spans:
        if span.begin != position:
            fault = "overlaps the tensor before it" if span.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{where}: tensor {span.info.name} {fault}; the file is damaged, get it again")
        position = span.end
    if position > file_bytes:
        raise CheckpointError(
            f"{where}: truncated, {position - file_bytes} of {position} bytes are missing; copy or download it again"
        )
    if position < file_bytes:
        raise CheckpointError(f"{where}: {file_bytes - position} bytes follow the last tensor; get the file again")


def _is_sizes(value: Any) -> bool:
    # `type is int`, because True is an int to isinstance.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _brief(value: Any) -> str:
    """`value` for a message: one ASCII line of bounded length, whatever a hostile header put there."""
    try:
        text = ascii(value)
    except ValueError:  # an integer beyond Python's limit for decimal digits
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: Exception) -> str:
    return ascii(str(error).partition("\n")[0])[1:-1][:120]
