"""A pair, opened, checked and measured: what a choice is made from, and what judges it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from deltacompress.budget.measuring.judge import Against, Judge, Judged
from deltacompress.budget.measuring.kept import Kept, Tried, kept_path
from deltacompress.budget.measuring.sizes import fixed_bytes
from deltacompress.budget.measuring.walk import Walked, walk
from deltacompress.budget.request import Request
from deltacompress.budget.rungs import CALIBRATED, RUNGS, Rung
from deltacompress.budget.survey import Survey, survey_of
from deltacompress.budget.target import check_size
from deltacompress.calibration.held_back import Enough, Records, batched, held_back
from deltacompress.calibration.sources import Calibration
from deltacompress.checkpoints.pairing import Pairing
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.prepare import Opened, Prepared, open_job, prepare, tokens_of
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.run_identity import identity_of
from deltacompress.devices import current, limited_memory
from deltacompress.errors import UnsupportedModelError, option
from deltacompress.files.output import make_directory, remove_empty
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import Reporter

PROBED, WHOLE, JUDGED = Enough(1024, 128, 4096), Enough(4096, 512, 16384), Enough(16384, 512, 16384)
"""Records that each group is measured on, the whole model, and all, by which an artifact is judged."""
_SAMPLES_SHARE, _LEAST_TOKENS = 8, 8192
"""Of the calibration sequences one in so many gives the Hessians of the rungs, and no fewer than these tokens."""
_BATCHES = 2  # of records: more have less to fill up, and smaller products


@dataclass(frozen=True)
class Surveyed:
    """A pair that is measured. kept: where that is kept."""

    survey: Survey
    base: Checkpoint
    kept: Path
    _identity: str
    _earlier: Kept | None
    _where: torch.device
    _judge: Judge
    _pairing: Pairing

    def judge(self, artifact: str) -> Judged:
        """An artifact of this pair."""
        with current(self._where):
            return self._judge.judge(artifact, self.base)

    def against_base(self) -> Against:
        """The base on the same records."""
        with current(self._where):
            return self._judge.against_base(self._pairing)

    def tried(self, asked: str) -> tuple[Tried, ...] | None:
        """The attempts of an interrupted run, if there was one that asked the same and is resumed."""
        earlier = self._earlier
        return earlier.tried if earlier is not None and earlier.asked == asked else None

    def keep(self, asked: str, tried: Sequence[Tried]) -> None:
        """For a run that is resumed; raises OutputError."""
        Kept(of=self._identity, survey=self.survey, asked=asked, tried=tuple(tried)).write(self.kept)

    def forget(self) -> None:
        """What was measured is of no more use."""
        self.kept.unlink(missing_ok=True)


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
        InputError: as compress; a mixture of experts; too little data to hold any back.
        UnreachedError: no choice is as small as was asked, whatever would be measured.
    """
    opened = open_job(job, inputs, reporter)
    assert job.calibration is not None
    records = held_back(opened.finetuned, job.calibration, job.calibration_spec, JUDGED, judge=judge)
    kept = kept_path(job.out)
    with current(opened.where), limited_memory(opened.where, job.device_memory), _folder_for(kept):
        prepared = prepare(job, opened.base, opened.finetuned, opened.where, inputs, reporter)
        with closing(prepared.scan):
            skeleton = _skeleton(prepared)
            prepared.scan.wait()
            identity = _identity(prepared, opened, records)
            earlier = Kept.read(kept, identity) if job.resume else None
            if earlier is None:
                fixed = fixed_bytes(prepared.plan, opened.coder)
                if request is not None:
                    check_size(request, fixed=fixed, finetuned=opened.finetuned.nbytes)
                found = _walked(job, inputs, prepared, skeleton, opened, records, rungs, reporter)
                survey = survey_of(found, finetuned_bytes=opened.finetuned.nbytes, fixed_bytes=fixed)
                Kept(of=identity, survey=survey).write(kept)
            else:
                survey = earlier.survey
                reporter.note(f"{kept}: measured by an earlier run, used again")
            by = Judge(skeleton, opened.finetuned, batched(records, at_most=_BATCHES))
    return Surveyed(survey, opened.base, kept, identity, earlier, opened.where, by, prepared.plan.pairing)


@contextmanager
def _folder_for(kept: Path) -> Iterator[None]:
    """Its folder, made before anything is measured; taken back if nothing comes to lie there."""
    made = make_directory(kept.parent)
    try:
        yield
    finally:
        remove_empty(made)


def _skeleton(prepared: Prepared) -> Skeleton:
    skeleton = prepared.skeleton
    assert skeleton is not None
    if any(skeleton.expert_stages(i) for i in range(skeleton.num_layers)):
        raise UnsupportedModelError(
            "a mixture of experts, whose groups are not measured yet",
            where=skeleton.path,
            way_out=f"give {option('recipe')}",
        )
    return skeleton


def _walked(
    job: CompressionJob,
    inputs: Inputs,
    prepared: Prepared,
    skeleton: Skeleton,
    opened: Opened,
    records: Records,
    rungs: Sequence[Rung],
    reporter: Reporter,
) -> Walked:
    tokens = prepared.tokens or tokens_of(job, opened.finetuned, skeleton, inputs)
    rows = max(len(tokens.ids) // _SAMPLES_SHARE, -(-_LEAST_TOKENS // tokens.ids.shape[1]))
    some, every = (batched(one.of(records), at_most=_BATCHES) for one in (PROBED, WHOLE))
    return walk(prepared.plan, skeleton, tokens.ids[:rows], some, every, rungs, opened.coder, reporter)


def _identity(prepared: Prepared, opened: Opened, records: Records) -> str:
    """Everything that what is measured depends on."""
    own = identity_of(prepared.plan, prepared.tokens, opened.devices, opened.coder, hashed=True)
    own["rungs"] = [[name, dict(rung.fields)] for name, rung in RUNGS.items()]
    own["held back"] = records
    return json.dumps({name: value for name, value in own.items() if name != "files"}, sort_keys=True)
