"""A GPTQ checkpoint -> the dense checkpoint it stands for, so that it can be compressed, measured and compared.

Tensors are read one layer at a time. `w = s (q - z)` is computed in fp32 and rounded once, to the checkpoint's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.checkpoint import DTYPES, Checkpoint
from deltacompress.checkpoint_writer import write_checkpoint, write_file
from deltacompress.errors import CheckpointError, InputError
from deltacompress.interop import gptq
from deltacompress.interop.export import CONFIG, QUANTIZE_CONFIG
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import fresh_directory
from deltacompress.safetensors_header import load_json_object
from deltacompress.types import TensorInfo
from deltacompress.workspace import check_free, check_outside, publish_directory

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def dequantize(model: str | Path, *, out: str | Path, reporter: Reporter | None = None) -> Path:
    """Write the dense weights of the GPTQ checkpoint `model` into the new directory `out`; returns it.

    Codes of 2, 3, 4 or 8 bits, any groups, reordered columns (desc_act), formats `gptq` and `gptq_v2`. The dtype is
    that of config.json, or fp16.

    Raises:
        CheckpointError: `model` cannot be read, or its tensors do not belong together; says which.
        InputError: it is not quantized, or not as GPTQ does.
        OutputError: `out` exists or cannot be written.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target)
    source = Checkpoint.open(model)
    check_outside(target, source.path)
    settings = _settings(source)
    dtype = _DTYPES.get(str(source.config.get("dtype") or source.config.get("torch_dtype")), "F16")
    reporter.phase("dequantizing", sum(name.endswith(".qweight") for name in source.tensors))
    with fresh_directory(target) as ready:
        write_checkpoint(ready, _tensors(source, settings, dtype, reporter))
        for file in source.side_files():
            raw = file.read_bytes()
            if file.name == CONFIG:
                config = {key: value for key, value in source.config.items() if key != "quantization_config"}
                raw = json.dumps(config, indent=2).encode() + b"\n"
            write_file(ready / file.name, [raw])
        publish_directory(ready, target)
    return target


def _settings(source: Checkpoint) -> dict[str, Any]:
    """bits, and whether zero points are stored less one.

    Raises:
        InputError: see dequantize.
    """
    found = source.config.get("quantization_config")
    old = source.path / QUANTIZE_CONFIG  # AutoGPTQ's own file, before transformers knew the format
    if found is None and old.is_file():
        found = load_json_object(old.read_bytes(), str(old))
    if not isinstance(found, dict):
        raise InputError(f"{source.path}: config.json has no quantization_config; the checkpoint is dense already")
    method = found.get("quant_method", "gptq")
    if method != "gptq":
        raise InputError(f"{source.path}: quantized by {method!r}, only GPTQ checkpoints are read; get its dense twin")
    bits, group, form = found.get("bits"), found.get("group_size", -1), found.get("checkpoint_format", "gptq")
    if bits not in gptq.BITS or form not in ("gptq", "gptq_v2") or not isinstance(group, int):
        told = f"{bits!r} bits, groups of {group!r}, format {form!r}"
        raise InputError(f"{source.path}: {told}: only 2, 3, 4 and 8 bits of gptq and gptq_v2 are read")
    return {"bits": bits, "zeros_less_one": form == "gptq", "group_size": group}


def _tensors(
    source: Checkpoint, settings: dict[str, Any], dtype: str, reporter: Reporter
) -> Iterator[tuple[TensorInfo, Callable[[], Tensor]]]:
    layers = [name.removesuffix(".qweight") for name in source.tensors if name.endswith(".qweight")]
    if not layers:
        raise CheckpointError(f"{source.path}: holds no .qweight although it says that it is quantized")
    taken = {f"{layer}.{part}" for layer in layers for part in gptq.PARTS}
    for name, info in source.tensors.items():
        if name not in taken:
            yield info, partial(source.read, name)
    for layer in layers:
        words, out_features = source.tensors[f"{layer}.qweight"].shape
        shape = (out_features, words * gptq.WORD // settings["bits"])
        info = TensorInfo(f"{layer}.weight", dtype, shape, torch.Size(shape).numel() * DTYPES[dtype].itemsize)
        yield info, partial(_dense, source, layer, settings, DTYPES[dtype], reporter)


def _dense(source: Checkpoint, layer: str, settings: dict[str, Any], dtype: torch.dtype, reporter: Reporter) -> Tensor:
    names = {part: f"{layer}.{part}" for part in gptq.PARTS}
    if missing := [name for part, name in names.items() if name not in source.tensors and part != "g_idx"]:
        raise CheckpointError(f"{source.path}: {missing[0]} is missing; get the checkpoint again")
    parts = {part: source.read(name) for part, name in names.items() if name in source.tensors}
    if "g_idx" not in parts:
        count = parts["qweight"].shape[0] * gptq.WORD // settings["bits"]
        group = settings["group_size"] if settings["group_size"] > 0 else max(count, 1)
        parts["g_idx"] = torch.arange(count) // group
    try:
        weight = gptq.unpack(parts, settings["bits"], zeros_less_one=settings["zeros_less_one"])
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {layer}: {error}; get the checkpoint again") from error
    reporter.step(layer)
    return weight.to(dtype)
