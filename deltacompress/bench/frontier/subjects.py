"""What a method makes of a pair, as a checkpoint to score: restored from an artifact, or sketched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.records import TensorRecord
from deltacompress.artifact.restoration import copy_side_files, restore, tensor_info
from deltacompress.bench.frontier.sketches import SKETCHES, by_variance
from deltacompress.budget.measuring.kept import kept_path
from deltacompress.budget.measuring.pair import survey_pair
from deltacompress.budget.run import compress_to
from deltacompress.budget.rungs import template
from deltacompress.budget.target import UnreachedError
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.writer import write_checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.driver import compress
from deltacompress.compression.job import CompressionJob
from deltacompress.errors import InputError
from deltacompress.reporter import SILENT

REST = Recipe.parse(
    {
        "name": "rest",
        "description": "All but the linears as int2-24 has it, the linears as they are.",
        "rules": [
            {"kind": "linear", "codec": "exact"},
            {"kind": "head", "codec": "obs", "bits": 2},
            {"kind": "embedding", "codec": "rtn", "bits": 2},
            {"codec": "exact"},
        ],
    }
)
"""What sketches are laid into, so that they are compared with recipes by their linears alone."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A fine-tuned model, its base and its calibration data. judge: as of compress_to."""

    base: Path
    finetuned: Path
    calibration: Path
    judge: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint to score; nbytes: of the whole artifact; linear_bits: for each weight of the linears.

    told: of a budget, the KL that was predicted before its first compression, and that of the records that judge in the
    end (kl_judged; kl_error: its standard error).
    """

    path: Path
    nbytes: int
    linear_bits: float | None
    told: Mapping[str, float] = field(default_factory=dict)

    def figures(self, full: int) -> dict[str, Any]:
        """As a row has them. full: bytes of the fine-tuned checkpoint."""
        sizes = {"ratio": full / self.nbytes, "bytes": self.nbytes, "linear_bits_per_weight": self.linear_bits}
        return sizes | dict(self.told)


def packed(pair: Pair, recipe: Recipe, seed: int | None, folder: Path, device: str) -> Made:
    """What a recipe keeps; its artifact is made in `folder`, and restored there."""
    return _restored(pair, _artifact(pair, recipe, seed, folder / "artifact", device), folder)


def _restored(pair: Pair, delta: Delta, folder: Path) -> Made:
    restored = restore(delta.path, base=pair.base, out=folder / "restored")
    size = delta.summary()
    return Made(restored, size["artifact_bytes"], size["linear_bits_per_weight"])


def surveyed(pair: Pair, seed: int | None, folder: Path, device: str) -> Path:
    """What the budget solver measures before it chooses, the same for every size: a file in `folder`."""
    out, data = folder / f"survey-{seed}", pair.calibration
    job = CompressionJob.of(
        pair.base, pair.finetuned, recipe=template(), out=out, calibration=data, seed=seed, device=device
    )
    return survey_pair(job, Inputs(), SILENT, judge=pair.judge).kept


def chosen_for(pair: Pair, ratio: float, seed: int | None, survey: Path, folder: Path, device: str) -> Made | None:
    """What the budget solver's choice for a size keeps; None: none is so small, of those that were tried.

    survey: as `surveyed` made it of the same pair and seed.
    """
    out, data = folder / "artifact", pair.calibration
    shutil.copyfile(survey, kept_path(out))  # a copy, that takes in this size's attempts and goes with the artifact
    asked: dict[str, Any] = {"target_ratio": ratio, "seed": seed, "device": device, "judge": pair.judge, "resume": True}
    try:
        found = compress_to(pair.base, pair.finetuned, out=out, calibration=data, **asked)
    except UnreachedError:
        return None
    judged = found.judged
    told = {"kl_predicted": found.first.kl, "kl_judged": judged.kl, "kl_error": judged.error}
    return replace(_restored(pair, load_delta(out), folder), told=told)


def rest(pair: Pair, folder: Path, device: str) -> Delta:
    """The artifact that sketches of a pair are laid into."""
    return _artifact(pair, REST, None, folder, device)


def _artifact(pair: Pair, recipe: Recipe, seed: int | None, out: Path, device: str) -> Delta:
    data = pair.calibration if recipe.needs_calibration else None
    compress(pair.base, pair.finetuned, recipe=recipe, out=out, calibration=data, seed=seed, device=device)
    return load_delta(out)


def sketched(pair: Pair, around: Delta, method: str, ratio: float, seed: int, folder: Path) -> Made | None:
    """What a method of SKETCHES keeps where the whole artifact is `ratio` times as small as the fine-tuned checkpoint.

    around: as `rest` makes it. None: the method cannot be so small.
    """
    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    linears = [one for one in around.manifest.tensors if one.kind == "linear" and one.base_name is not None]
    if not linears:
        raise InputError("has no linear weights of its base's", where=pair.finetuned)
    weights = sum(torch.Size(one.shape).numel() for one in linears)
    others = around.summary()["artifact_bytes"] - sum(one.bytes for one in linears)
    allowed = (finetuned.nbytes / ratio - others) * 8 / weights
    chance = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    spent = 0.0

    def weights_of(one: TensorRecord) -> tuple[Tensor, Tensor]:
        before = base.read(str(one.base_name)).float()
        return before, finetuned.read(one.name).float() - before

    shares = [1.0] * len(linears)
    if method == "ultradelta":
        shares = by_variance([(delta.numel(), float(delta.std(correction=0))) for _, delta in map(weights_of, linears)])
    for one, share in zip(linears, shares, strict=True):
        before, delta = weights_of(one)
        found = SKETCHES[method](delta, allowed * share * delta.numel(), chance)
        if found is not None:
            values[one.name] = (before + found.values).to(DTYPES[one.dtype])
            spent += found.bits
    if not values:
        return None
    bases = {one.name: str(one.base_name) for one in linears if one.name not in values}
    path = folder / "sketched"
    path.mkdir()

    def tensor(one: TensorRecord) -> Tensor | Iterator[Tensor]:
        if one.name in bases:  # so few bits are no use to it
            return base.read(bases[one.name]).to(DTYPES[one.dtype])
        return values[one.name] if one.name in values else around.restored_pieces(one.name, base)

    made = ((tensor_info(one), partial(tensor, one)) for one in around.manifest.tensors)
    write_checkpoint(path, made)
    copy_side_files(around, path)
    return Made(path, others + round(spent / 8), spent / weights)
