"""The main job, top to bottom: `compress` turns a fine-tuned checkpoint into a published delta of its base.

    open both -> plan every tensor -> load calibration tokens -> fit the whole model, if a codec asks for it
    -> encode (layer by layer if the recipe calibrates) -> publish -> report

Meanwhile all weights are hashed and checked; what is wrong with them ends the run before anything is published.
Each has a module of its own: before/prepare, before/scan, planning, layerwise/model, encoding, workspace, publication.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltacompress.arguments import checked
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.outputs import holds_artifact
from deltacompress.calibration.data import CalibrationTokens
from deltacompress.calibration.fitting import fit_codecs
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.prepare import Prepared, open_job, prepare
from deltacompress.compression.encoding import encode_uncalibrated
from deltacompress.compression.job import CompressionJob, CompressResult
from deltacompress.compression.layerwise.fidelity import calibration_kl
from deltacompress.compression.layerwise.model import compress_layers
from deltacompress.compression.layerwise.walk import Streams
from deltacompress.compression.made_from import clear_leftover, standing
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.publication import publish
from deltacompress.compression.ranks.crew import Crew
from deltacompress.compression.ranks.steps import LeaderSteps
from deltacompress.compression.run_identity import identity_file, identity_of, is_same, solver
from deltacompress.compression.steps import Steps
from deltacompress.compression.workspace import Workspace
from deltacompress.devices import current, gpu_name, limited_memory
from deltacompress.errors import Interrupted, switch
from deltacompress.files.output import output_errors
from deltacompress.lossless import Coder
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import SILENT, Reporter


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
    devices: str | Sequence[int] | None = None,
    device_memory: str | int | None = None,
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
        device: "auto", "cpu" or "cuda". devices: numbers of GPUs that share the work, such as "0,1" or [0, 1].
        device_memory: what tensors may take of a GPU's memory at most, such as "26GB"; all of it by default. No byte of
            the artifact depends on it.
        resume: continue the interrupted run of the same `out`, if there is one.
        force: compress anew, and replace an artifact that `out` holds, once the new one is whole. Without it an
            artifact of the same input is verified and used again.

    Raises:
        InputError: one of its subclasses names what is wrong with the input. OutputError: `out` holds something else.
        Interrupted: stopped by Ctrl-C (or SIGTERM, under the command line); what was finished stays in `out`.partial
            for `resume`.
    """
    job = CompressionJob.of(
        base,
        finetuned,
        recipe=recipe,
        out=out,
        calibration=calibration,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        lossless=lossless,
        device=device,
        devices=devices,
        device_memory=device_memory,
        resume=resume,
        force=force,
    )
    return run_job(job, reporter or SILENT)


def run_job(
    job: CompressionJob, reporter: Reporter = SILENT, inputs: Inputs | None = None, *, look: bool = True
) -> CompressResult:
    """Do what a job says; raises as `compress`. inputs: what it shares with other jobs of this process.

    look: measure KL on the calibration tokens in the end.
    """
    started = time.monotonic()
    inputs = inputs or Inputs()
    with _telling_what_waits(job.out, resume=job.resume):
        opened = open_job(job, inputs, reporter)
        where, coder = opened.where, opened.coder
        if opened.there and not job.force:
            delta = standing(job, opened.base, opened.finetuned, inputs, reporter)
            clear_leftover(job.out, delta.manifest, coder)
            return _used_again(job.out, delta, time.monotonic() - started)
    with current(where), Crew(job, opened.base, opened.finetuned, opened.devices) as crew:
        with _telling_what_waits(job.out, resume=job.resume):
            prepared = prepare(job, opened.base, opened.finetuned, where, inputs, reporter)
        with closing(prepared.scan):
            with _telling_what_waits(job.out, resume=job.resume):
                work = _open_workspace(job, prepared, opened.devices, coder, reporter)
            with work, limited_memory(where, job.device_memory), prepared.scan.explaining():
                kl = _encode_and_publish(prepared, work, coder, crew, reporter, look=look)
    return CompressResult(
        out=job.out,
        summary=load_delta(job.out).summary(),
        kl_on_calibration=kl,
        seconds=time.monotonic() - started,
        peak_memory_bytes=Steps.peak_memory(),
        peak_device_bytes=torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None,
        backend=_backend(opened.devices, coder, calibrated=prepared.plan.calibrated),
    )


def _open_workspace(
    job: CompressionJob, prepared: Prepared, devices: Sequence[torch.device], coder: Coder, reporter: Reporter
) -> Workspace:
    earlier, scan = _finished_steps(job.out), prepared.scan
    scan.wait() if earlier or job.resume else scan.check()  # only a sound input may use or remove what is there
    identity, hashed = partial(identity_of, prepared.plan, prepared.tokens, devices, coder), scan.done
    fits = earlier > 0 and is_same(identity_file(job.out), identity(hashed=hashed))
    work = Workspace.open(
        job.out,
        identity(hashed=hashed),
        resume=job.resume,
        replaces=holds_artifact if job.force else None,
        reporter=reporter,
    )
    if job.resume or not hashed:
        scan.when_known(lambda: work.identify(identity(hashed=True)))
    if earlier:
        would = f"removed; {switch('resume')} would have used {'them' if earlier > 1 else 'it'}"
        told = would if fits else "removed, of no use to this one"
        if job.resume:
            told = "used again" if fits else "removed, since no identity.json says what they are of"
        reporter.note(f"{work.path}: {earlier} finished step{'s' * (earlier > 1)} of an earlier run {told}")
    return work


def _encode_and_publish(
    prepared: Prepared, work: Workspace, coder: Coder, crew: Crew, reporter: Reporter, *, look: bool
) -> float | None:
    """The long part; KL on the calibration tokens, None where nothing is calibrated on them layer by layer, or nobody
    looks.
    """
    skeleton, tokens = prepared.skeleton, prepared.tokens
    plan = prepared.plan
    if tokens is not None and skeleton is not None:
        plan = _fitted(plan, tokens, work, skeleton.device, reporter)
    with closing(Steps(plan, work, coder, prepared.scan.check)) as steps:
        if tokens is None or skeleton is None or not plan.calibrated:
            _compress_plain(plan, steps, reporter)
            prepared.scan.wait()
            publish(plan, work, steps, coder.codec, tokens)
            return None
        try:
            streams = _walk(plan, skeleton, tokens.ids, steps, crew, reporter)
        finally:
            for checkpoint in (plan.base, plan.finetuned):
                checkpoint.forget_ahead()
        prepared.scan.wait()
        publish(plan, work, steps, coder.codec, tokens)  # first: nothing that only informs may stand in its way
        return calibration_kl(plan, skeleton, streams, steps) if look else None


def _walk(plan: Plan, skeleton: Skeleton, ids: torch.Tensor, steps: Steps, crew: Crew, reporter: Reporter) -> Streams:
    """compress_layers, together with the crew."""
    with crew.at_work(plan) as ranks:
        told = steps if ranks.size == 1 else LeaderSteps(steps, ranks)
        return compress_layers(plan, skeleton, ranks.same(ids), told, crew.reporting(reporter), ranks)


def _fitted(plan: Plan, tokens: CalibrationTokens, work: Workspace, device: torch.device, reporter: Reporter) -> Plan:
    """The plan with what its codecs fit, if they do: a step of its own, so that a resumed run has the very same."""
    if not plan.to_fit:
        return plan
    values: dict[str, Any] | None = work.values("fit")
    if values is None:
        bases = {name: {one.name: _base_of(plan, one) for one in some} for name, some in plan.to_fit.items()}
        settings = {one.name: one.settings for some in plan.to_fit.values() for one in some}
        values = fit_codecs(plan.finetuned, bases, settings, tokens, device, reporter)
        work.save_values("fit", values)
    elif wrong := plan.wrong_with(values):
        raise work.damaged("fit", wrong)
    return plan.with_fitted(values)


def _base_of(plan: Plan, tensor: TensorPlan) -> torch.Tensor:
    base = plan.base_of(tensor)
    return torch.zeros(tensor.pair.info.shape) if base is None else base


def _used_again(out: Path, delta: Delta, seconds: float) -> CompressResult:
    return CompressResult(
        out, delta.summary(), None, seconds, Steps.peak_memory(), None, "an earlier run's", used_again=True
    )


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


def _compress_plain(plan: Plan, steps: Steps, reporter: Reporter) -> None:
    """Recipes without calibration: tensor by tensor, in any order."""
    todo = {
        f"tensor-{i:05d}": one for i, one in enumerate(one for one in plan.tensors.values() if one.treatment != "alias")
    }
    reporter.phase("compressing", len(todo))
    for step, tensor in todo.items():
        if not steps.check(step, [tensor.name]):
            steps.save(step, [steps.finish_on_disk(tensor, encode_uncalibrated(plan, tensor))])
        reporter.step(tensor.name, loss=steps.records(step)[0].loss, memory_bytes=Steps.peak_memory())


def _backend(devices: Sequence[torch.device], coder: Coder, *, calibrated: bool) -> str:
    where = devices[0]
    compute = gpu_name(where) or f"CPU, {torch.get_num_threads()} threads"
    compute = f"{len(devices)} x {compute}" if len(devices) > 1 else compute
    ran = f", {solver(where)}" if calibrated else ""
    return f"{compute}{ran}; {coder.name}"
