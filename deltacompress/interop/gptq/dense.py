"""A GPTQ checkpoint -> the dense checkpoint it stands for, so that it can be compressed, measured and compared.

Tensors are read one layer at a time. `w = s (q - z)` is computed in fp32 and rounded once, to the checkpoint's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.arguments import checked
from deltacompress.artifact.outputs import check_free, check_outside, holds_checkpoint, publish_checkpoint
from deltacompress.artifact.restoration import fresh_directory
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.header import load_json_object
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.side_files import MAX_CONFIG_BYTES
from deltacompress.checkpoints.writer import write_checkpoint, write_file
from deltacompress.errors import CheckpointError, InputError
from deltacompress.files import regular
from deltacompress.files.places import CONFIG
from deltacompress.interop.gptq import tensors as gptq
from deltacompress.interop.gptq.export import QUANTIZE_CONFIG
from deltacompress.reporter import SILENT, Reporter
from deltacompress.types import TensorInfo

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_WORDS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": tuple(_DTYPES.values()), "g_idx": ("I32", "I64")}
_CHUNK = 1 << 22
_OTHERWISE = "save it dense with the tool that made it"


@dataclass(frozen=True, slots=True)
class _Settings:
    """group: columns of a scale, -1 for whole rows. zeros_less_one: zero points are stored as `gptq` does."""

    bits: int
    group: int
    desc_act: bool
    zeros_less_one: bool

    def groups(self, columns: int) -> int:
        return 1 if self.group < 0 else -(-columns // self.group)


@checked
def dequantize(model: str | Path, *, out: str | Path, force: bool = False, reporter: Reporter | None = None) -> Path:
    """Write the dense weights of the GPTQ checkpoint `model` into the directory `out`; returns it.

    Codes of 2, 3, 4 or 8 bits, any groups, reordered columns (desc_act), formats `gptq` and `gptq_v2`. The dtype is
    that of config.json, else that of the tensors that are not quantized.
    A checkpoint that `out` holds already is left there if it is the very same; force: replaced if it is another.

    Raises:
        CheckpointError: `model` cannot be read, or its tensors do not belong together; says which.
        InputError: it is not quantized, or not as GPTQ does.
        OutputError: `out` holds something else, or cannot be written.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target, replaces=holds_checkpoint)
    source = Checkpoint.open(model)
    check_outside(target, source.path)
    settings = _settings(source)
    layers = _layers(source, settings)
    dtype = _dtype(source, layers, reporter)
    reporter.phase("dequantizing", len(layers))
    with fresh_directory(target) as ready:
        write_checkpoint(ready, _tensors(source, layers, settings, dtype, reporter))
        for file in source.side_files():
            if file.name == CONFIG:
                config = {key: value for key, value in source.config.items() if key != "quantization_config"}
                write_file(ready / file.name, [json.dumps(config, indent=2).encode() + b"\n"])
                continue
            with source.open_side_file(file) as opened:
                write_file(ready / file.name, iter(partial(opened.read, _CHUNK), b""))
        publish_checkpoint(ready, target, force=force, reporter=reporter)
    return target


def _settings(source: Checkpoint) -> _Settings:
    """What config.json, or AutoGPTQ's own file, says of the quantization.

    Raises:
        InputError: nothing, or of another kind than GPTQ's.
        CheckpointError: no JSON object.
    """
    where, found = source.path / CONFIG, source.config.get("quantization_config")
    old = source.path / QUANTIZE_CONFIG  # from before transformers knew the format
    if found is None and old.exists():
        try:
            raw = regular.read_bytes(old, at_most=MAX_CONFIG_BYTES, links=regular.ANYWHERE)
        except OSError as error:
            raise regular.unreadable(CheckpointError, old, error) from error
        where, found = old, load_json_object(raw, str(old))
    if found is None:
        raise InputError("config.json has no quantization_config; the checkpoint is dense already", where=source.path)
    if not isinstance(found, dict):
        raise CheckpointError("its quantization_config is no JSON object", where=where, way_out="get the file again")
    # GPTQModel calls them method and format
    method = _said(found, ("quant_method", "method"), where)
    form = _said(found, ("checkpoint_format", "format"), where)
    if method != "gptq" or form not in ("gptq", "gptq_v2"):
        raise InputError(
            f"quantized by {method!r}, format {form!r}",
            where=where,
            way_out=f"only gptq and gptq_v2 are read: {_OTHERWISE}",
        )
    if found.get("dynamic"):
        raise InputError(
            f"some layers have settings of their own (dynamic), which are not read: {_OTHERWISE}", where=where
        )
    bits, group, desc_act = found.get("bits"), found.get("group_size", -1), found.get("desc_act", False)
    if type(bits) is not int or bits not in gptq.BITS:
        told = "no bits are given" if bits is None else f"bits {_brief(bits)}"
        raise InputError(told, where=where, way_out=f"only 2, 3, 4 and 8 are read: {_OTHERWISE}")
    if type(group) is not int or not (group == -1 or group >= 1) or type(desc_act) is not bool:
        told = f"group_size {_brief(group)}, desc_act {_brief(desc_act)}"
        raise InputError(f"{told}; expected a number of columns or -1, and true or false", where=where)
    return _Settings(bits, group, desc_act, form == "gptq")


def _brief(value: object) -> str:
    return repr(value)[:40]


def _said(found: dict[str, Any], keys: tuple[str, ...], where: Path) -> str:
    """The value that all of these keys agree on, as far as they are there; "gptq" if none is."""
    said = {str(found[key]).lower() for key in keys if found.get(key) is not None}
    if len(said) > 1:
        raise InputError(f"{' and '.join(keys)} contradict each other", where=where, way_out="correct one")
    return next(iter(said), "gptq")[:40]


def _layers(source: Checkpoint, settings: _Settings) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each quantized layer, after a look at the shapes and dtypes of its parts.

    Raises:
        CheckpointError: parts are missing or do not belong together.
    """
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in source.tensors.items():
        layer, _, part = name.rpartition(".")
        if part in gptq.PARTS:
            found.setdefault(layer, {})[part] = info
    if not found:
        raise CheckpointError(
            "says that it is quantized, but holds no .qweight", where=source.path, way_out="get it again"
        )
    return {layer: _sizes(source, layer, parts, settings) for layer, parts in found.items()}


def _sizes(source: Checkpoint, layer: str, parts: dict[str, TensorInfo], settings: _Settings) -> tuple[int, int]:
    needed = gptq.PARTS if settings.desc_act else gptq.PARTS[:-1]
    if missing := [part for part in needed if part not in parts]:
        raise CheckpointError(f"{layer}.{missing[0]} is missing", where=source.path, way_out="get the checkpoint again")
    if f"{layer}.weight" in source.tensors:
        raise CheckpointError(
            f"holds both {layer}.weight and {layer}.qweight", where=source.path, way_out="get the checkpoint again"
        )
    for part, info in parts.items():
        if info.dtype not in _WORDS[part] or len(info.shape) != (1 if part == "g_idx" else 2):
            raise CheckpointError(
                f"{info.name} is {info.dtype} {list(info.shape)}, as in no GPTQ checkpoint",
                where=source.path,
                way_out="get it again",
            )
    words, rows = parts["qweight"].shape
    columns = words * gptq.WORD // settings.bits
    wanted = {info.name.rpartition(".")[2]: info.shape
              for info in gptq.part_infos(layer, rows, columns, settings.bits, max(columns, 1))}  # fmt: skip
    groups = settings.groups(columns)
    wanted |= {"qzeros": (groups, rows * settings.bits // gptq.WORD), "scales": (groups, rows)}
    odd = [info.name for part, info in parts.items() if info.shape != wanted[part]]
    if odd or not columns or not gptq.fits(rows, columns, settings.bits):
        shapes = ", ".join(f"{part} {list(info.shape)}" for part, info in sorted(parts.items()))
        raise CheckpointError(
            f"{layer}: shapes that do not belong together at {settings.bits} bits in groups of "
            f"{settings.group}: {shapes}",
            where=source.path,
            way_out="get the checkpoint again",
        )
    return rows, columns


def _dtype(source: Checkpoint, layers: dict[str, tuple[int, int]], reporter: Reporter) -> str:
    said = str(source.config.get("dtype") or source.config.get("torch_dtype")).removeprefix("torch.")
    if said in _DTYPES:
        return _DTYPES[said]
    plain = (info.dtype for name, info in source.tensors.items() if name.rpartition(".")[0] not in layers)
    chosen = next((dtype for dtype in plain if dtype in _DTYPES.values()), "F16")
    reporter.note(f"{source.path}: config.json names no dtype that is known; weights become {chosen}")
    return chosen


def _tensors(
    source: Checkpoint, layers: dict[str, tuple[int, int]], settings: _Settings, dtype: str, reporter: Reporter
) -> Iterator[tuple[TensorInfo, Callable[[], Tensor]]]:
    taken = {f"{layer}.{part}" for layer in layers for part in gptq.PARTS}
    for name, info in source.tensors.items():
        if name not in taken:
            yield info, partial(source.read, name)
    for layer, shape in layers.items():
        info = TensorInfo(f"{layer}.weight", dtype, shape, shape[0] * shape[1] * DTYPES[dtype].itemsize)
        yield info, partial(_dense, source, layer, settings, DTYPES[dtype], reporter)


def _dense(source: Checkpoint, layer: str, settings: _Settings, dtype: torch.dtype, reporter: Reporter) -> Tensor:
    names = {part: f"{layer}.{part}" for part in gptq.PARTS}
    parts = {part: source.read(name) for part, name in names.items() if name in source.tensors}
    if "g_idx" not in parts:
        columns = parts["qweight"].shape[0] * gptq.WORD // settings.bits
        parts["g_idx"] = torch.arange(columns) // min(settings.group if settings.group > 0 else columns, columns)
    try:
        weight = gptq.unpack(parts, settings.bits, zeros_less_one=settings.zeros_less_one).to(dtype)
    except ValueError as error:
        raise CheckpointError(f"{layer}: {error}", where=source.path, way_out="get the checkpoint again") from error
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            f"{layer}: scales that give NaN or Inf as {dtype}",
            where=source.path,
            way_out="get the checkpoint again, or let its config.json name a wider dtype",
        )
    reporter.step(layer)
    return weight
