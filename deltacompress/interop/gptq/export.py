"""An artifact of whole weights -> a GPTQ checkpoint, code by code: nothing is quantized a second time.

For those who serve a variant with another engine, alone. Such engines take dense codes of whole weights, symmetric
around one zero point; `gptq-4bit` is the recipe that makes them. 2:4 patterns and deltas have no place in the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.arguments import checked
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.outputs import check_free, check_outside, holds_checkpoint, publish_checkpoint
from deltacompress.artifact.records import TensorRecord
from deltacompress.artifact.restoration import copy_side_files, fresh_directory, tensor_info
from deltacompress.checkpoints.header import load_json_object
from deltacompress.checkpoints.side_files import MAX_CONFIG_BYTES
from deltacompress.checkpoints.writer import Make, write_checkpoint, write_file
from deltacompress.codecs.formats.packed import PackedSpec, unpack_levels
from deltacompress.errors import InputError
from deltacompress.files.places import CONFIG
from deltacompress.files.regular import read_bytes
from deltacompress.interop.gptq import tensors as gptq
from deltacompress.numerics.grid import constant_zero
from deltacompress.reporter import SILENT, Reporter
from deltacompress.types import TensorInfo

QUANTIZE_CONFIG = "quantize_config.json"
_RECIPE = "gptq-4bit"


@checked
def export_gptq(
    artifact: str | Path, *, out: str | Path, force: bool = False, reporter: Reporter | None = None
) -> Path:
    """Write the directory `out`, a checkpoint that transformers (with GPTQModel), vLLM and others load; returns it.

    Linear weights become int32 words of their codes, scales fp16; everything else is restored as it was. No base is
    needed, since whole weights decode on their own. A checkpoint that `out` holds already is left there if it is the
    very same; force: replaced if it is another.

    Raises:
        InputError: the artifact holds deltas, or codes that GPTQ checkpoints cannot hold; says which tensor.
        IntegrityError: the artifact is damaged.
        OutputError: `out` holds something else, or cannot be written.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target, replaces=holds_checkpoint)
    delta = load_delta(artifact)
    settings = _settings(delta)
    check_outside(target, delta.path)
    reporter.phase("exporting", len(delta.tensors))
    with fresh_directory(target) as ready:
        write_checkpoint(ready, _Writer(delta, reporter).tensors())
        _write_side_files(delta, settings, ready)
        publish_checkpoint(ready, target, force=force, reporter=reporter)
    return target


def _settings(delta: Delta) -> dict[str, Any]:
    """The quantization_config: bits and groups that all linear weights have in common.

    A weight of a single group goes with any group size that it does not exceed.

    Raises:
        InputError: see export_gptq.
    """
    if delta.manifest.scope != "full":
        raise InputError(
            "holds deltas, and a GPTQ checkpoint whole weights",
            where=delta.path,
            way_out=f"restore it, compress the result with recipe {_RECIPE}, and export that",
        )
    specs = {record.name: _spec(delta, record) for record in _linears(delta)}
    if not specs:
        raise InputError(
            "its recipe codes no linear weight", where=delta.path, way_out=f"compress with recipe {_RECIPE}"
        )
    group = next((spec.group for spec in specs.values() if spec.groups > 1), -1)
    bits = next(iter(specs.values())).bits
    for name, spec in specs.items():
        if spec.bits != bits or (group > 0 and (spec.columns > group if spec.groups == 1 else spec.group != group)):
            told = f"{spec.bits} bits in {spec.groups} groups of {min(spec.group, spec.columns)}"
            raise InputError(
                f"{name}: {told}, others have {bits} bits in groups of {group}",
                where=delta.path,
                way_out=f"a GPTQ checkpoint has one setting for all: compress with recipe {_RECIPE}",
            )
    return {
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
    }


def _linears(delta: Delta) -> Iterator[TensorRecord]:
    return (record for record in delta.manifest.tensors if record.kind == "linear")


def _spec(delta: Delta, record: TensorRecord) -> PackedSpec:
    spec, where = delta.spec(record.name), f"{delta.path}: {record.name}"
    hint = f"compress with recipe {_RECIPE}"
    if spec is None or not record.name.endswith(".weight"):
        raise InputError("is not quantized, and GPTQ quantizes every linear layer", where=where, way_out=hint)
    if spec.sparsity.kind != "dense" or spec.grid != "symmetric" or spec.bits not in gptq.BITS:
        told = f"{spec.bits} bits, {spec.sparsity}, grid {spec.grid}"
        raise InputError(
            f"{told}; GPTQ checkpoints hold dense symmetric codes of 2, 3, 4 or 8 bits", where=where, way_out=hint
        )
    if (spec.rows, spec.columns) != record.shape:
        raise InputError(
            f"{list(record.shape)} is stored as {spec.rows} x {spec.columns}; GPTQ checkpoints hold whole linears",
            where=where,
            way_out="`deltacompress restore` writes it dense",
        )
    if not gptq.fits(spec.rows, spec.columns, spec.bits):
        raise InputError(
            f"{list(record.shape)} at {spec.bits} bits does not fill whole 32-bit words, so GPTQ checkpoints "
            "cannot hold it",
            where=where,
            way_out="`deltacompress restore` writes it dense",
        )
    return spec


class _Writer:
    """Makes the tensors one after another. A layer is decoded once: of its parts only the scales are written later,
    behind all wider types of their file, so what waits in memory is one layer and the scales of those before it.
    """

    def __init__(self, delta: Delta, reporter: Reporter) -> None:
        self._delta, self._reporter = delta, reporter
        self._waiting: dict[tuple[str, str], Tensor] = {}

    def tensors(self) -> Iterator[tuple[TensorInfo, Make]]:
        for record in self._delta.manifest.tensors:
            if record.kind != "linear":
                yield tensor_info(record), partial(self._restored, record.name)
                continue
            spec = _spec(self._delta, record)
            layer = record.name.removesuffix(".weight")
            infos = gptq.part_infos(layer, spec.rows, spec.columns, spec.bits, spec.group)
            for part, info in zip(gptq.PARTS, infos, strict=True):
                yield info, partial(self._part, record.name, spec, part)

    def _restored(self, name: str) -> Iterator[Tensor]:
        self._reporter.step(name)
        return self._delta.restored_pieces(name, None)

    def _part(self, name: str, spec: PackedSpec, part: str) -> Tensor:
        if (name, part) not in self._waiting:
            self._reporter.step(name)
            self._waiting |= {(name, key): made for key, made in self._packed(name, spec).items()}
        return self._waiting.pop((name, part))

    def _packed(self, name: str, spec: PackedSpec) -> dict[str, Tensor]:
        codes, _, grid = unpack_levels(spec, self._delta.parts(name))
        half = grid.scale.half().float()
        if not torch.isfinite(half).all():
            raise InputError(
                f"{name}: a scale is beyond fp16, which is what GPTQ checkpoints store", where=self._delta.path
            )
        odd = half != grid.scale
        if bool(odd.any()):  # below fp16's normal numbers
            worst = float(((half - grid.scale).abs() / grid.scale)[odd].max())
            self._reporter.note(f"{name}: {int(odd.sum())} tiny scales change in fp16, by up to {worst:.1%}")
        zeros = torch.full((spec.rows, spec.groups), int(constant_zero(spec.grid, spec.bits)), dtype=torch.uint8)
        return gptq.pack(codes, zeros, grid.scale, spec.bits, spec.group)


def _write_side_files(delta: Delta, settings: dict[str, Any], out: Path) -> None:
    copy_side_files(delta, out)
    config = out / CONFIG
    if config.exists():  # the checked copy
        found = load_json_object(read_bytes(config, at_most=MAX_CONFIG_BYTES), str(delta.path / CONFIG))
        config.unlink()
        write_file(config, [json.dumps(found | {"quantization_config": settings}, indent=2).encode() + b"\n"])
    write_file(out / QUANTIZE_CONFIG, [json.dumps(settings, indent=2).encode() + b"\n"])
