"""A fleet, top to bottom: read the jobs file, check all of it, do the jobs, tell what became of each.

one worker: in this process, one job after another; more: a process each (workers.py), one for each GPU
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from deltacompress.arguments import Count, checked
from deltacompress.errors import Interrupted, switch
from deltacompress.fleet.check import check_early, check_whole
from deltacompress.fleet.jobs_file import Fleet
from deltacompress.fleet.result import FleetResult
from deltacompress.fleet.state import JobState
from deltacompress.reporter import SILENT, Named, Reporter

if TYPE_CHECKING:
    from deltacompress.compression.before.dry_run import CompressionPlan
    from deltacompress.compression.before.inputs import Inputs


@checked
def compress_fleet(
    jobs: str | Path,
    *,
    workers: Count | None = None,
    zoo: str | None = None,
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
) -> FleetResult:
    """Compress every fine-tuned model of a jobs file; a job that fails stops no other.

    Args:
        jobs: the jobs file (docs/cli.md).
        workers: processes that work at the same time; by default one for each GPU, or one where there is none.
        zoo: where jobs with a name are published, in the place of what the file says.
        resume: go on with unfinished runs; what is published is verified and used again, with or without it.
        force: compress anew, as `compress` does.

    Raises:
        DeltaCompressError: the file, or a job in it, is wrong: nothing was begun.
        Interrupted: stopped; what is done stays, and `resume` goes on.
    """
    started, reporter = time.monotonic(), reporter or SILENT
    fleet, inputs = _opened(Path(jobs), zoo, reporter, resume=resume, force=force)

    from deltacompress.fleet.workers import crew, on_workers

    environments = crew(fleet, workers)
    done: dict[str, JobState] = {}
    try:
        states = on_workers(fleet, environments, reporter) if environments else _one_by_one(fleet, inputs, reporter)
        with closing(states):
            for state in states:
                done[state.out] = state
    except (Interrupted, KeyboardInterrupt) as stop:
        finished = sum(state.state == "done" for state in done.values())
        told = f"interrupted; {finished} of {len(fleet.jobs)} jobs are done and stay"
        raise Interrupted(told, where=jobs, way_out=f"run again with {switch('resume')}") from stop
    return FleetResult(tuple(done[str(one.job.out)] for one in fleet.jobs), time.monotonic() - started)


def plan_fleet(
    jobs: str | Path,
    *,
    zoo: str | None = None,
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
) -> list[CompressionPlan]:
    """What compress_fleet would do, job by job; nothing is written. Raises as it, of the first job that is refused."""
    fleet, inputs = _opened(Path(jobs), zoo, reporter or SILENT, resume=resume, force=force)

    from deltacompress.compression.before.dry_run import plan_job

    found = []
    for one in fleet.jobs:
        with one.told():
            found.append(plan_job(one.job, reporter or SILENT, inputs))
    return found


def _opened(jobs: Path, zoo: str | None, reporter: Reporter, *, resume: bool, force: bool) -> tuple[Fleet, Inputs]:
    """The fleet, checked whole; torch is imported for what the light checks let pass."""
    fleet = Fleet.load(jobs, zoo=zoo, resume=resume, force=force)
    pairs = check_early(fleet)

    from deltacompress.compression.before.inputs import Inputs

    inputs = Inputs({fleet.jobs[0].job.base: pairs[0].base})
    check_whole(fleet, pairs, inputs, reporter)
    return fleet, inputs


def _one_by_one(fleet: Fleet, inputs: Inputs, reporter: Reporter) -> Generator[JobState]:
    from deltacompress.fleet.work import do_job

    for i, one in enumerate(fleet.jobs):
        state = do_job(one, fleet.zoo, inputs, Named(reporter, f"{i + 1}/{len(fleet.jobs)} {one.label}: "))
        state.note_failure(reporter)
        yield state
