"""A pair, opened, checked and measured: what a choice is made from, and what judges it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from deltacompress.artifact.delta import load_delta
from deltacompress.budget.measuring.judge import Against, Judge, Judged
from deltacompress.budget.measuring.kept import Kept, Tried, kept_path
from deltacompress.budget.measuring.measured import Walked
from deltacompress.budget.measuring.progress import Progress, progress_path
from deltacompress.budget.measuring.sizes import fixed_bytes, group_bytes, unsure_bytes
from deltacompress.budget.measuring.walk import walk
from deltacompress.budget.parts import survey_of
from deltacompress.budget.request import Request
from deltacompress.budget.rungs import CALIBRATED, RUNGS, Rung
from deltacompress.budget.survey import Survey
from deltacompress.budget.target import check_size
from deltacompress.calibration.held_back import Enough, HeldBack, Records, batched, held_back
from deltacompress.calibration.sources import Calibration
from deltacompress.checkpoints.pairing import Pairing
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.prepare import Opened, Prepared, open_job, prepare, tokens_of
from deltacompress.compression.job import CompressionJob, CompressResult
from deltacompress.compression.planning import Plan
from deltacompress.compression.run_identity import identity_of
from deltacompress.devices import current, limited_memory
from deltacompress.errors import switch
from deltacompress.files.output import output_errors
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import Reporter

PROBED, JUDGED = Enough(512, 64, 1024), Enough(8192, 512, 16384)
"""Records that groups are measured on, and all, by which an artifact is judged."""
_SAMPLES_SHARE, _LEAST_TOKENS, _MORE_TOKENS = 32, 2048, 4096
"""Of the calibration sequences one in so many gives the Hessians of the rungs, and is what the first choice is tried
on. They have no fewer tokens than the first of these, or twice the inputs of the widest linear, up to the second: of
fewer tokens than inputs a Hessian is singular."""
TRIAL = "trial: "
"""Before all that is told of one: it compresses, too."""
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
"""Of records that run at once, about: small batches have little to fill up, and a GPU waits for launches."""


@dataclass(frozen=True)
class Surveyed:
    """A pair that is measured. kept: where that is kept."""

    survey: Survey
    base: Checkpoint
    kept: Path
    _identity: str
    _few: int
    _earlier: Kept | None
    _where: torch.device
    _memory: int | None
    _judge: Judge
    _pairing: Pairing

    def judge(self, artifact: str) -> Judged:
        """An artifact of this pair."""
        with current(self._where), limited_memory(self._where, self._memory):
            return self._judge.judge(artifact, self.base)

    def tried_as(self, made: CompressResult) -> Tried:
        """What a compression of this pair came to."""
        groups = group_bytes(load_delta(made.out).manifest, (group.names for group in self.survey.groups))
        return Tried(bytes=int(made.summary["artifact_bytes"]), groups=groups, judged=self.judge(str(made.out)))

    def against_base(self, *, one_in: int = 1) -> Against:
        """The base on the same records, or on those of one in so many batches."""
        with current(self._where), limited_memory(self._where, self._memory):
            return self._judge.against_base(self._pairing, one_in=one_in)

    def trial(self, job: CompressionJob) -> CompressionJob | None:
        """The job on as many calibration sequences as the walk has seen, on one device; None where that is all of them,
        or nothing is to be chosen.
        """
        spec = job.calibration_spec
        if self._few >= spec.samples or not self.survey.groups:
            return None
        return job.model_copy(update={"samples": self._few, "devices": job.devices and job.devices[:1]})

    def tried(self, asked: str) -> tuple[Tried, ...] | None:
        """The attempts of an interrupted run, if there was one that asked the same and is resumed."""
        earlier = self._earlier
        return earlier.tried if earlier is not None and earlier.asked == asked else None

    def keep(self, asked: str, tried: Sequence[Tried]) -> None:
        """For a run that is resumed; raises OutputError."""
        Kept(of=self._identity, survey=self.survey, asked=asked, tried=tuple(tried)).write(self.kept)


def survey_pair(
    job: CompressionJob,
    inputs: Inputs,
    reporter: Reporter,
    rungs: Sequence[Rung] = CALIBRATED,
    *,
    request: Request | None = None,
    judge: Calibration | None = None,
) -> Surveyed:
    """Measure the pair of a job of `rungs.template`; what an interrupted run measured is used again, to resume.

    rungs: of linears. request: what it is measured for. judge: records to judge by; None: some of those of calibration.

    Raises:
        InputError: as compress; too little data to hold any back.
        UnreachedError: no choice is as small as was asked, whatever would be measured.
    """
    opened = open_job(job, inputs, reporter)
    assert job.calibration is not None
    records = held_back(opened.finetuned, job.calibration, job.calibration_spec, JUDGED, judge=judge)
    kept = kept_path(job.out)
    with current(opened.where), limited_memory(opened.where, job.device_memory):
        prepared = prepare(job, opened.base, opened.finetuned, opened.where, inputs, reporter)
        with closing(prepared.scan):
            skeleton = prepared.skeleton
            assert skeleton is not None
            prepared.scan.wait()
            few = _few(job.calibration_spec, prepared.plan)
            identity = _identity(prepared, opened, records, few)
            earlier = Kept.read(kept, identity) if job.resume else None
            progress = None
            if request is not None:
                progress = Progress(progress_path(job.out), identity, asked=repr(request), resume=job.resume)
            if earlier is None:
                fixed = fixed_bytes(prepared.plan, opened.coder)
                if request is not None:
                    least = fixed - unsure_bytes(prepared.plan)
                    check_size(request, least=least, finetuned=opened.finetuned.nbytes)
                if kept.exists():
                    _make_room(kept, identity, reporter)
                if progress is not None and progress.path.exists() and not job.resume:
                    _begin_anew(progress, reporter)
                found = _walked(job, few, inputs, prepared, skeleton, opened, records, rungs, reporter, progress)
                survey = survey_of(found, finetuned_bytes=opened.finetuned.nbytes, fixed_bytes=fixed)
                Kept(of=identity, survey=survey, asked=None if request is None else repr(request)).write(kept)
            else:
                survey = earlier.survey
                reporter.note(f"{kept}: measured by an earlier run, used again")
            if progress is not None:
                progress.remove()
            by = Judge(skeleton, opened.finetuned, _batches(records, opened.where))
    where, memory = opened.where, job.device_memory
    return Surveyed(survey, opened.base, kept, identity, few, earlier, where, memory, by, prepared.plan.pairing)


def _begin_anew(progress: Progress, reporter: Reporter) -> None:
    """What an earlier run measured of some layers goes."""
    told = f"; {switch('resume')} would have gone on with it" if progress.fits() else ""
    reporter.note(f"{progress.path}: what an earlier run measured so far is removed{told}")
    progress.remove()


def _make_room(kept: Path, identity: str, reporter: Reporter) -> None:
    """What an earlier run measured stays until this is measured, if whoever interrupts that can go on with it."""
    if Kept.fits(kept, identity):
        told = f"is measured anew; {switch('resume')} would have used it"
    else:
        told = "is of no use to this one, and is removed"
        with output_errors(kept):
            kept.unlink()
    reporter.note(f"{kept}: what an earlier run measured {told}")


def _walked(
    job: CompressionJob,
    few: int,
    inputs: Inputs,
    prepared: Prepared,
    skeleton: Skeleton,
    opened: Opened,
    records: Records,
    rungs: Sequence[Rung],
    reporter: Reporter,
    progress: Progress | None,
) -> Walked:
    tokens = prepared.tokens or tokens_of(job, opened.finetuned, skeleton, inputs)
    some = _batches(PROBED.of(records), opened.where)
    try:
        return walk(prepared.plan, skeleton, tokens.ids[:few], some, rungs, opened.coder, reporter, progress)
    finally:
        for checkpoint in (opened.base, opened.finetuned):
            checkpoint.forget_ahead()


def _few(spec: CalibrationSpec, plan: Plan) -> int:
    """How many of the calibration sequences are enough to predict by."""
    widest = max((one.inputs for one in plan.tensors.values() if one.calibrated), default=0)
    least = max(_LEAST_TOKENS, min(2 * widest, _MORE_TOKENS))
    return max(spec.samples // _SAMPLES_SHARE, -(-least // spec.seq_len))


def _batches(records: Records, where: torch.device) -> list[HeldBack]:
    return batched(records, at_most=-(-sum(len(ids) for ids, _ in records) // _BATCH_TOKENS[where.type]))


def _identity(prepared: Prepared, opened: Opened, records: Records, few: int) -> str:
    """Everything that what is measured depends on."""
    own = identity_of(prepared.plan, prepared.tokens, opened.devices, opened.coder, hashed=True)
    own["rungs"] = [[name, dict(rung.fields), rung.left] for name, rung in RUNGS.items()]
    own["held back"], own["measured on"] = records, [few, astuple(PROBED)]
    return json.dumps({name: value for name, value in own.items() if name != "files"}, sort_keys=True)
