"""A whole fleet, checked before its first job begins: everything that can be told without reading all weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltacompress.artifact.outputs import check_free, check_outside, holds_artifact
from deltacompress.calibration.sources import local_file
from deltacompress.checkpoints.hub import model_directory
from deltacompress.checkpoints.pairing import Pairing, pair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.devices import check_driver
from deltacompress.errors import DeltaCompressError
from deltacompress.fleet.jobs_file import Fleet, FleetJob
from deltacompress.fleet.state import check_state

if TYPE_CHECKING:
    from deltacompress.compression.before.inputs import Inputs
    from deltacompress.reporter import Reporter


def check_early(fleet: Fleet) -> list[Pairing]:
    """What needs no torch: outputs, names, data, models, and that each belongs to the base; the pair of each job.

    Raises:
        DeltaCompressError: its subclasses name the jobs file, the line, the job, and the first thing that is wrong.
    """
    for one in fleet.jobs:  # the cheapest first; nothing is fetched from the hub before
        with one.told():
            _check_alone(one, fleet.zoo)
    try:
        base = Checkpoint.open(fleet.jobs[0].job.base)
    except DeltaCompressError as error:
        raise error.retold(type(error), within=f"{fleet.path}, base") from error
    pairs = []
    for one in fleet.jobs:
        with one.told():
            pairs.append(pair(base, Checkpoint.open(one.job.finetuned)))
    read = [base.path, *(found.finetuned.path for found in pairs)]
    for one in fleet.jobs:
        with one.told():
            check_outside(one.job.out, *read)
    return pairs


def _check_alone(one: FleetJob, zoo: str | None) -> None:
    job = one.job
    check_free(job.out, replaces=holds_artifact)
    check_state(job.out)
    check_driver(job.device)
    if isinstance(job.calibration, str):
        local_file(job.calibration)
    job.recipe.check_calibration(job.calibration)
    model_directory(job.finetuned)
    if one.name is not None:
        from deltacompress.zoo.exchange.resolve import check_destination

        check_destination(one.name, zoo)


def check_whole(fleet: Fleet, pairs: list[Pairing], inputs: Inputs, reporter: Reporter) -> None:
    """What needs torch: devices, lossless codecs, models that can be walked, a rule for each tensor, enough tokens.

    Raises:
        DeltaCompressError: as check_early.
    """
    from deltacompress import lossless
    from deltacompress.compression.before.prepare import kind_of, skeleton_of, tokens_of
    from deltacompress.devices import named_device

    reporter.phase("checking the jobs", len(fleet.jobs))
    for one, found in zip(fleet.jobs, pairs, strict=True):
        with one.told():
            job = one.job
            where = named_device(job.device)
            lossless.coder(job.lossless, device=job.device)
            skeleton = skeleton_of(found.finetuned, job.recipe, where)
            kind = kind_of(skeleton)
            for tensor in found.pairs:
                job.recipe.rule_for(tensor.info.name, kind(tensor.info.name))
            if job.recipe.needs_calibration and skeleton is not None:
                tokens_of(job, found.finetuned, skeleton, inputs)
        reporter.step(one.label)
