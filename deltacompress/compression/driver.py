"""The main job, top to bottom: `compress` turns a fine-tuned checkpoint into a published delta of its base.

    open both -> plan every tensor -> load calibration tokens -> encode (layer by layer if the recipe calibrates)
    -> publish -> report

Each step has a module of its own: planning, calibrate/, layerwise, encoding, workspace, publication.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress import lossless
from deltacompress.arguments import checked
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.outputs import check_free, check_outside, holds_artifact
from deltacompress.calibration.data import CalibrationTokens, calibration_tokens
from deltacompress.calibration.sources import Calibration, local_file, name_of
from deltacompress.checkpoints.pairing import pair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.encoding import encode_uncalibrated
from deltacompress.compression.fidelity import calibration_kl
from deltacompress.compression.layerwise import compress_layers
from deltacompress.compression.made_from import standing
from deltacompress.compression.planning import Plan, make_plan
from deltacompress.compression.publication import publish
from deltacompress.compression.run_identity import choose_device, identity_of, solver
from deltacompress.compression.steps import Steps
from deltacompress.compression.workspace import Workspace
from deltacompress.errors import BackendError, CalibrationError, InputError, Interrupted, OutputError, option, switch
from deltacompress.files.output import output_errors
from deltacompress.models.config import base_notes, notes
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.triton import fused
from deltacompress.reporter import SILENT, Reporter


@dataclass(frozen=True, slots=True, repr=False)
class CompressResult:
    """What a compression achieved.

    summary: Delta.summary() of the artifact. kl_on_calibration: KL(fine-tuned || compressed) in nats/token over
    calibration tokens (in-sample: an indication, no evaluation), None where the recipe has no teacher. seconds: wall
    time. peak_memory_bytes: resident memory of the process; peak_device_bytes: of the GPU, None on a CPU. used_again:
    the artifact of an earlier run was verified; the figures are of that.
    """

    out: Path
    summary: dict[str, Any]
    kl_on_calibration: float | None
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int | None
    backend: str
    used_again: bool = False

    def __repr__(self) -> str:
        """Short: a notebook shows it, and the summary has a row for each tensor."""
        size, ratio = self.summary["artifact_bytes"], self.summary["ratio"]
        return f"<CompressResult {self.out}: {size:,} bytes, ratio {ratio:.2f}, {self.seconds:.0f} s>"

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `compress --json` prints it."""
        shown = {key: value for key, value in self.summary.items() if key != "tensors"}
        return shown | {
            "kl_on_calibration": self.kl_on_calibration,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "backend": self.backend,
        }


@checked
def compress(
    base: str | Path,
    finetuned: str | Path,
    *,
    recipe: Recipe | str | Path,
    out: str | Path,
    calibration: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    lossless: str = "zstd",
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
) -> CompressResult:
    """Compress `finetuned` into the artifact directory `out`.

    Args:
        base, finetuned: checkpoint directories (or hub ids).
        recipe: a Recipe, the name of a shipped one, or the path of a YAML file.
        calibration: file or data set id, or the records themselves: texts, or mappings with the fields of a file's
            records; needed by recipes that calibrate.
        samples, seq_len, seed: override the recipe's calibration.
        lossless: "none", "zstd", "gdeflate" or "ans".
        device: "auto", "cpu" or "cuda".
        resume: continue the interrupted run of the same `out`, if there is one.
        force: compress anew, and replace an artifact that `out` holds, once the new one is whole. Without it an
            artifact of the same input is verified and used again.

    Raises:
        InputError: one of its subclasses names what is wrong with the input. OutputError: `out` holds something else.
        Interrupted: stopped by Ctrl-C (or SIGTERM, under the command line); what was finished stays in `out`.partial
            for `resume`.
    """
    started = time.monotonic()
    reporter = reporter or SILENT
    target = Path(out)
    there = check_free(target, replaces=holds_artifact)
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    where = choose_device(device)
    _check_codec(lossless, device)
    if calibration is not None:
        if isinstance(calibration, str | Path):
            local_file(str(calibration))  # a slip of the hand is told at once, and also where the recipe needs no data
        if not chosen.needs_calibration:
            reporter.note(f"{name_of(calibration)}: not read, since recipe {chosen.name} does not calibrate")
    chosen.check_calibration(calibration)
    if not chosen.needs_calibration:
        given = {"samples": samples, "seq_len": seq_len, "seed": seed}
        for name in (name for name, value in given.items() if value is not None):
            reporter.note(f"{option(name)}: not used, since recipe {chosen.name} does not calibrate")
    with _telling_what_waits(target, resume=resume):
        pair_of = Checkpoint.open(base), Checkpoint.open(finetuned)
        check_outside(target, *(checkpoint.path for checkpoint in pair_of))
        if there and not force:
            delta = standing(
                target, *pair_of, chosen, calibration, samples=samples, seq_len=seq_len, seed=seed, lossless=lossless,
                reporter=reporter,
            )  # fmt: skip
            return _used_again(target, delta, time.monotonic() - started)
        plan, skeleton = _plan(*pair_of, chosen, where)
        for note in plan.notes:
            reporter.note(note)
        if skeleton is not None:
            for note in (
                *base_notes(plan.base.config, plan.base.path),
                *notes(plan.finetuned.config, plan.finetuned.path),
            ):
                reporter.note(note)
        if where.type == "cuda" and plan.calibrated and (reason := fused.missing(where)):
            reporter.note(f"the solver's loops run in PyTorch, tens of times slower than its kernels: {reason}")
        tokens = None
        if plan.calibrated and skeleton is not None:
            tokens = _tokens(plan, skeleton, calibration, samples, seq_len, seed)
        earlier = _finished_steps(target)
        work = Workspace.open(
            target,
            identity_of(plan, tokens, lossless, device),
            resume=resume,
            replaces=holds_artifact if force else None,
        )
    if earlier:
        fate = "used again" if resume else f"removed; {switch('resume')} would have used them"
        reporter.note(f"{work.path}: {earlier} finished step{'s' * (earlier > 1)} of an earlier run {fate}")
    kl = None
    try:
        with closing(Steps(plan, work, lossless, device)) as steps:
            if tokens is not None and skeleton is not None:
                streams = compress_layers(plan, skeleton, tokens.ids, steps, reporter)
                publish(plan, work, steps, lossless, tokens)  # first: nothing that only informs may stand in its way
                kl = calibration_kl(plan, skeleton, streams, steps)
            else:
                _compress_plain(plan, steps, reporter)
                publish(plan, work, steps, lossless, tokens)
    except KeyboardInterrupt as stop:
        if work.published:
            work.discard()
            raise Interrupted(f"interrupted, but {target} was published whole before; nothing is left to do") from stop
        if not work.keep():
            raise Interrupted("interrupted before a step was finished: nothing is left of it, run it again") from stop
        raise Interrupted(
            "interrupted, nothing published",
            way_out=f"what is finished waits in {work.path}: run again with {switch('resume')}",
        ) from stop
    except InputError as error:
        if not isinstance(error, OutputError | BackendError) or work.published:
            work.discard()  # other input means other bytes: nothing here could be resumed
        elif work.keep():  # a full disk or a busy device costs no finished layer: mend it, then --resume
            reporter.note(
                f"what is finished waits in {work.path}: mend the cause and run again with {switch('resume')}"
            )
        raise
    except BaseException:
        if work.published:
            work.discard()
            reporter.note(f"{target} is published; only the look at its fidelity failed")
        elif work.keep():  # out of memory, a lost device: what is finished is good
            reporter.note(f"what is finished waits in {work.path}: run again with {switch('resume')}")
        raise
    work.discard()
    return CompressResult(
        out=target,
        summary=load_delta(target).summary(),
        kl_on_calibration=kl,
        seconds=time.monotonic() - started,
        peak_memory_bytes=Steps.peak_memory(),
        peak_device_bytes=torch.cuda.max_memory_allocated() if where.type == "cuda" else None,
        backend=_backend(where, lossless, device, calibrated=plan.calibrated),
    )


def _used_again(out: Path, delta: Delta, seconds: float) -> CompressResult:
    return CompressResult(
        out, delta.summary(), None, seconds, Steps.peak_memory(), None, "an earlier run's", used_again=True
    )


def _plan(
    base: Checkpoint, finetuned: Checkpoint, recipe: Recipe, device: torch.device
) -> tuple[Plan, Skeleton | None]:
    """The plan, and the model's skeleton where the recipe needs to know it (an all-exact recipe takes any model)."""
    pairing = pair(base, finetuned)  # first: of what is wrong with a pair, it names the cause and not a consequence
    if not recipe.needs_kinds:
        return make_plan(pairing, recipe, lambda _name: "other"), None
    skeleton = Skeleton.from_config(finetuned.path, finetuned.tensors, device=device)
    skeleton.check_shapes({name: info.shape for name, info in finetuned.tensors.items()})
    return make_plan(pairing, recipe, skeleton.kind), skeleton


@contextmanager
def _telling_what_waits(out: Path, *, resume: bool) -> Iterator[None]:
    """An interrupt before the workspace is open: whoever resumes is told that the steps are still there."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if resume and _finished_steps(out):
            raise Interrupted(
                "interrupted",
                way_out=f"what an earlier run finished waits in {out}.partial: run again with {switch('resume')}",
            ) from stop
        raise


def _finished_steps(out: Path) -> int:
    """How many steps an unfinished run of `out` has left: resume uses them, a run without it throws them away."""
    with output_errors(out):
        return len(list(out.with_name(out.name + ".partial").glob("step-*.safetensors")))


def _tokens(
    plan: Plan,
    skeleton: Skeleton,
    source: Calibration | None,
    samples: int | None,
    seq_len: int | None,
    seed: int | None,
) -> CalibrationTokens:
    spec = plan.recipe.calibration.overridden(samples=samples, seq_len=seq_len, seed=seed)
    assert source is not None  # checked before anything was opened
    tokens = calibration_tokens(plan.finetuned, source, spec)
    rows = plan.finetuned.tensors[skeleton.embedding_name].shape[0]
    if int(tokens.ids.max()) >= rows:
        raise CalibrationError(
            f"its tokenizer gives token {int(tokens.ids.max())}, its embedding has {rows} rows; the "
            "tokenizer is not this model's",
            where=plan.finetuned.path,
            way_out="put the one it was trained with there",
        )
    return tokens


def _compress_plain(plan: Plan, steps: Steps, reporter: Reporter) -> None:
    """Recipes without calibration: tensor by tensor, in any order."""
    todo = [tensor for tensor in plan.tensors.values() if tensor.fate != "alias"]
    reporter.phase("compressing", len(todo))
    for i, tensor in enumerate(todo):
        step = f"tensor-{i:05d}"
        if not steps.check(step):
            steps.save(step, [steps.finish_on_disk(tensor, encode_uncalibrated(plan, tensor))])
        reporter.step(tensor.name, loss=steps.records(step)[0].loss, memory_bytes=Steps.peak_memory())


def _check_codec(codec: str, device: str) -> None:
    lossless.check_available(codec, encode=True, device=device)


def _backend(where: torch.device, codec: str, device: str, *, calibrated: bool) -> str:
    compute = f"CPU, {torch.get_num_threads()} threads"
    if where.type == "cuda":
        compute = torch.cuda.get_device_name(where) + (f", {solver(where)}" if calibrated else "")
    return f"{compute}; {lossless.backend_for(codec, encode=True, device=device)}"
