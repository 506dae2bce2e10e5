"""A job's input, held together before any work: data to calibrate on, a plan for every tensor, the model's skeleton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deltacompress import lossless
from deltacompress.artifact.outputs import check_free, check_outside, holds_artifact
from deltacompress.calibration.data import CalibrationTokens
from deltacompress.calibration.sources import local_file, name_of
from deltacompress.checkpoints.pairing import Pairing, pair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.scan import Scan
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.planning import Plan, make_plan
from deltacompress.compression.run_identity import solver_note
from deltacompress.devices import chosen_devices, map_in_pages
from deltacompress.errors import CalibrationError, InputError, option
from deltacompress.lossless import Coder
from deltacompress.models.config import base_notes, notes, stored_notes
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.triton import fused
from deltacompress.reporter import Reporter
from deltacompress.types import OddLinears, TensorKind


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose input fits together, as far as it is known: `scan` still looks at the weights.

    skeleton: None if nothing is asked of the model; tokens: if no codec asks.
    """

    scan: Scan
    plan: Plan
    skeleton: Skeleton | None
    tokens: CalibrationTokens | None


@dataclass(frozen=True, slots=True)
class Opened:
    """A job's checkpoints, where it computes (a device for each process), and what codes its bytes.

    there: whether an artifact lies at its out.
    """

    base: Checkpoint
    finetuned: Checkpoint
    devices: tuple[torch.device, ...]
    coder: Coder
    there: bool

    @property
    def where(self) -> torch.device:
        """The device of this process."""
        return self.devices[0]


def open_job(job: CompressionJob, inputs: Inputs, reporter: Reporter) -> Opened:
    """The cheap checks of a job, in the order in which `compress` makes them; raises as it."""
    there = check_free(job.out, replaces=holds_artifact)
    devices = _devices(job, reporter)
    coder = lossless.coder(job.lossless, device=job.device)
    check_calibration(job, reporter)
    base, finetuned = inputs.base(job.base), Checkpoint.open(job.finetuned)
    check_outside(job.out, base.path, finetuned.path)
    return Opened(base, finetuned, devices, coder, there)


def _devices(job: CompressionJob, reporter: Reporter) -> tuple[torch.device, ...]:
    """A device for each process; one, where there is nothing to share."""
    if job.device != "cpu":
        map_in_pages()
    devices = chosen_devices(job.devices, job.device)
    if len(devices) > 1 and not job.recipe.walks_layers:
        told = f"only {devices[0]} is used, since recipe {job.recipe.name} does not calibrate layer by layer"
        reporter.note(f"{option('devices')}: {told}")
        return devices[:1]
    if (samples := job.calibration_spec.samples) < len(devices):
        told = f"{samples} samples are too few for {len(devices)} GPUs, which share them"
        raise InputError(told, where=option("devices"), way_out="give more samples, or fewer GPUs")
    return devices


def check_calibration(job: CompressionJob, reporter: Reporter) -> None:
    """Before anything is opened or fetched: is there something to calibrate on, and is all that is given of use?"""
    recipe = job.recipe
    if isinstance(job.calibration, str):
        local_file(job.calibration)  # a slip of the hand is told at once, and also where the recipe needs no data
    if job.calibration is not None and not recipe.needs_calibration:
        reporter.note(f"{name_of(job.calibration)}: not read, since recipe {recipe.name} does not calibrate")
    recipe.check_calibration(job.calibration)
    if not recipe.needs_calibration:
        given = {"samples": job.samples, "seq_len": job.seq_len, "seed": job.seed}
        for name in (name for name, value in given.items() if value is not None):
            reporter.note(f"{option(name)}: not used, since recipe {recipe.name} does not calibrate")


def prepare(
    job: CompressionJob,
    base: Checkpoint,
    finetuned: Checkpoint,
    where: torch.device,
    inputs: Inputs,
    reporter: Reporter,
) -> Prepared:
    """Everything that can be wrong with a job's input is told here, or by the scan; raises as `compress`."""
    pairing = pair(base, finetuned)  # first: of what is wrong with a pair, it names the cause and not a consequence
    scan = Scan(pairing, job.recipe)
    try:
        if where.type == "cuda" and job.recipe.needs_calibration:
            fused.probe_early(where)
        return _prepared(job, pairing, scan, where, inputs, reporter)
    except BaseException:
        scan.close()
        raise


def _prepared(
    job: CompressionJob, pairing: Pairing, scan: Scan, where: torch.device, inputs: Inputs, reporter: Reporter
) -> Prepared:
    base, finetuned = pairing.base, pairing.finetuned
    skeleton = skeleton_of(finetuned, job.recipe, where)
    plan = make_plan(pairing, job.recipe, kind_of(skeleton), odd_linears(skeleton))
    if skeleton is not None:
        told = (*base_notes(base.config, base.path), *notes(finetuned.config, finetuned.path))
    else:
        told = tuple(stored_notes(finetuned.config, finetuned.path))
    for note in (*plan.notes, *told):
        reporter.note(note)
    if job.device_memory is not None and where.type != "cuda":
        reporter.note(f"{option('device_memory')}: not used, since no GPU computes")
    if plan.calibrated and (told_of_solver := solver_note(where)):
        reporter.note(told_of_solver)
    wanted = any(one.treatment == "code" and one.codec.needs_tokens for one in plan.tensors.values())
    tokens = tokens_of(job, finetuned, skeleton, inputs) if wanted and skeleton is not None else None
    return Prepared(scan, plan if tokens is None else plan.with_counts(tokens.ids), skeleton, tokens)


def skeleton_of(finetuned: Checkpoint, recipe: Recipe, device: torch.device) -> Skeleton | None:
    """The model's skeleton where the recipe needs to know it; an all-exact recipe takes any model."""
    if not recipe.needs_kinds:
        return None
    skeleton = Skeleton.from_config(finetuned.path, finetuned.tensors, device=device)
    skeleton.check_shapes({name: info.shape for name, info in finetuned.tensors.items()})
    return skeleton


def kind_of(skeleton: Skeleton | None) -> Callable[[str], TensorKind]:
    """What a tensor is in its model, as the recipe's rules ask it; "other" where none does."""
    return (lambda _name: "other") if skeleton is None else skeleton.kind


def odd_linears(skeleton: Skeleton | None) -> OddLinears:
    """Linears that are not all that others are; none where the recipe does not ask."""
    return OddLinears() if skeleton is None else skeleton.odd_linears


def tokens_of(job: CompressionJob, finetuned: Checkpoint, skeleton: Skeleton, inputs: Inputs) -> CalibrationTokens:
    """The tokens to calibrate on, each with a row of the embedding; raises CalibrationError."""
    tokens = inputs.tokens(finetuned, job)
    rows = finetuned.tensors[skeleton.embedding_name].shape[0]
    if int(tokens.ids.max()) >= rows:
        raise CalibrationError(
            f"its tokenizer gives token {int(tokens.ids.max())}, its embedding has {rows} rows; the "
            "tokenizer is not this model's",
            where=finetuned.path,
            way_out="put the one it was trained with there",
        )
    return tokens
