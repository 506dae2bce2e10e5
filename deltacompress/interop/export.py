"""An artifact of whole weights -> a GPTQ checkpoint, code by code: nothing is quantized a second time.

For those who serve a variant with another engine, alone. Such engines take dense codes of whole weights, symmetric
around one zero point; `gptq-4bit` is the recipe that makes them. 2:4 patterns and deltas have no place in the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.artifact import Delta, load_delta
from deltacompress.checkpoint import Checkpoint
from deltacompress.checkpoint_writer import write_checkpoint, write_file
from deltacompress.codecs.packed import PackedSpec, unpack_levels
from deltacompress.errors import InputError
from deltacompress.interop import gptq
from deltacompress.manifest import TensorRecord
from deltacompress.numerics.grid import constant_zero
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import fresh_directory, side_files, tensor_info
from deltacompress.types import TensorInfo
from deltacompress.workspace import check_free, check_outside, publish_directory

CONFIG, QUANTIZE_CONFIG = "config.json", "quantize_config.json"
_RECIPE = "gptq-4bit"


def export_gptq(artifact: str | Path, *, base: str | Path, out: str | Path, reporter: Reporter | None = None) -> Path:
    """Write the new directory `out`, a checkpoint that transformers (with GPTQModel), vLLM and others load; returns it.

    Linear weights become int32 words of their codes, scales fp16; everything else is restored as it was.

    Raises:
        InputError: the artifact holds deltas, or codes that GPTQ checkpoints cannot hold; says which tensor.
        BaseMismatchError: `base` is not the base of this artifact.
        IntegrityError: the artifact is damaged.
        OutputError: `out` exists or cannot be written.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target)
    delta = load_delta(artifact)
    spec = _common_spec(delta)
    checkpoint = Checkpoint.open(base)
    check_outside(target, delta.path, checkpoint.path)
    delta.check_base(checkpoint)
    reporter.phase("exporting", len(delta.tensors))
    with fresh_directory(target) as ready:
        write_checkpoint(ready, _tensors(delta, checkpoint, reporter))
        _write_side_files(delta, spec, ready)
        publish_directory(ready, target)
    return target


def _common_spec(delta: Delta) -> PackedSpec:
    """What all linear weights have in common.

    Raises:
        InputError: see export_gptq.
    """
    if delta.manifest.recipe.get("scope") != "full":
        raise InputError(
            f"{delta.path}: holds deltas, and a GPTQ checkpoint whole weights; restore it, compress the result with "
            f"`--recipe {_RECIPE}`, and export that"
        )
    chosen: PackedSpec | None = None
    for record in _linears(delta):
        if chosen is None:
            chosen = _spec(delta, record)
        else:
            _check_alike(delta, record, _spec(delta, record), chosen)
    if chosen is None:
        raise InputError(f"{delta.path}: its recipe codes no linear weight; compress with `--recipe {_RECIPE}`")
    return chosen


def _linears(delta: Delta) -> Iterator[TensorRecord]:
    return (record for record in delta.manifest.tensors if record.kind == "linear")


def _spec(delta: Delta, record: TensorRecord) -> PackedSpec:
    spec, where = delta.spec(record.name), f"{delta.path}: {record.name}"
    hint = f"compress with `--recipe {_RECIPE}`"
    if spec is None or not record.name.endswith(".weight"):
        raise InputError(f"{where}: is not quantized, and GPTQ quantizes every linear layer; {hint}")
    if spec.sparsity.kind != "dense" or spec.grid != "symmetric" or spec.bits not in gptq.BITS:
        told = f"{spec.bits} bits, {spec.sparsity}, grid {spec.grid}"
        raise InputError(f"{where}: {told}; GPTQ checkpoints hold dense symmetric codes of 2, 3, 4 or 8 bits; {hint}")
    if (spec.rows, spec.columns) != record.shape or not gptq.fits(spec.rows, spec.columns, spec.bits):
        raise InputError(f"{where}: {list(record.shape)} at {spec.bits} bits does not fill whole 32-bit words")
    return spec


def _check_alike(delta: Delta, record: TensorRecord, spec: PackedSpec, first: PackedSpec) -> None:
    if (spec.bits, _group_size(spec)) != (first.bits, _group_size(first)):
        raise InputError(
            f"{delta.path}: {record.name}: {spec.bits} bits in groups of {spec.group}, others {first.bits} bits in "
            f"groups of {first.group}; a GPTQ checkpoint has one setting for all"
        )


def _group_size(spec: PackedSpec) -> int:
    """-1: one scale for a whole row."""
    return -1 if spec.groups == 1 else spec.group


def _tensors(delta: Delta, base: Checkpoint, reporter: Reporter) -> Iterator[tuple[TensorInfo, Callable[[], Tensor]]]:
    packed = lru_cache(maxsize=1)(partial(_packed, delta))  # the writer takes the parts of a layer one after another

    def part(name: str, kind: str) -> Tensor:
        if kind == gptq.PARTS[0]:
            reporter.step(name)
        return packed(name)[kind]

    def restored(name: str) -> Tensor:
        reporter.step(name)
        return delta.restored(name, delta.read_base(name, base))

    for record in delta.manifest.tensors:
        if record.kind != "linear":
            yield tensor_info(record), partial(restored, record.name)
            continue
        spec = _spec(delta, record)
        infos = gptq.part_infos(record.name.removesuffix(".weight"), spec.rows, spec.columns, spec.bits, spec.group)
        for kind, info in zip(gptq.PARTS, infos, strict=True):
            yield info, partial(part, record.name, kind)


def _packed(delta: Delta, name: str) -> dict[str, Tensor]:
    spec, parts = delta.spec(name), delta.parts(name)
    assert spec is not None  # `_spec` saw to it
    codes, _, grid = unpack_levels(spec, parts)
    if not torch.isfinite(grid.scale.half()).all():
        raise InputError(f"{delta.path}: {name}: a scale is beyond fp16, which is what GPTQ checkpoints store")
    zeros = torch.full((spec.rows, spec.groups), int(constant_zero(spec.grid, spec.bits)), dtype=torch.uint8)
    return gptq.pack(codes, zeros, grid.scale, spec.bits, spec.group)


def _write_side_files(delta: Delta, spec: PackedSpec, out: Path) -> None:
    settings: dict[str, Any] = {
        "bits": spec.bits,
        "group_size": _group_size(spec),
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
    }
    for name, raw in side_files(delta):
        if name == CONFIG:
            config = json.loads(raw) | {"quantization_config": settings}
            raw = json.dumps(config, indent=2).encode() + b"\n"
        write_file(out / name, [raw])
    write_file(out / QUANTIZE_CONFIG, [json.dumps(settings, indent=2).encode() + b"\n"])
