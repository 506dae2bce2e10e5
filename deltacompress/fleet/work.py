"""One job of a fleet, from its first state to its last: compress, publish in the zoo, never raise for its own sake."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deltacompress.compression.driver import run_job
from deltacompress.errors import Interrupted
from deltacompress.files.hashing import hash_file
from deltacompress.files.places import MANIFEST
from deltacompress.fleet.jobs_file import FleetJob
from deltacompress.fleet.state import JobState, earlier, failed

if TYPE_CHECKING:
    from deltacompress.compression.before.inputs import Inputs
    from deltacompress.compression.job import CompressResult
    from deltacompress.reporter import Reporter


def do_job(one: FleetJob, zoo: str | None, inputs: Inputs, reporter: Reporter) -> JobState:
    """Do a job and keep its state beside its output; a job that fails says so in its state, and the next can begin.

    Raises:
        Interrupted, KeyboardInterrupt: it was stopped; its state says so.
    """
    out, before = one.job.out, earlier(one.job.out)
    told = JobState(label=one.label, out=str(out), state="begun")
    try:
        told.save(out)
        result = run_job(one.job, reporter, inputs)
        data = _figures(result, before)
        published = None if one.name is None else publish_once(out, one.name, zoo, reporter)
        told = told.model_copy(
            update={"state": "done", "result": data, "published": published, "used_again": result.used_again}
        )
        told.save(out)
    except (Interrupted, KeyboardInterrupt):
        told.model_copy(update={"state": "stopped"}).try_to_save(out)
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's, and the others go on
        told = failed(one.label, out, error)
        told.try_to_save(out)
    finally:
        _free_memory()
    return told


def publish_once(out: Path, name: str, zoo: str | None, reporter: Reporter) -> str:
    """Publish an artifact in the zoo, unless a version of that name is it already; name@version."""
    from deltacompress.zoo.exchange.resolve import open_zoo, publish_artifact

    digest = hash_file(out / MANIFEST)[0]
    opened = open_zoo(zoo)
    for found in opened.list(all_versions=True):
        if found.name == name and found.problem is None and not found.removed:
            place = f"{found.name}@{found.version}"
            if opened.show(place)[1].config.digest == digest:
                reporter.note(f"{place} is this artifact already")
                return place
    return publish_artifact(out, name, zoo, reporter=reporter)


def _figures(result: CompressResult, before: JobState | None) -> dict[str, Any]:
    """As JSON; of an artifact that was used again, what its run told, if it left that."""
    data = result.to_json()
    known = before.result if before is not None and result.used_again else None
    return known if known is not None and known.get("digest") == data["digest"] else data


def _free_memory() -> None:
    """What a job held on a GPU goes back, so that the next one finds what a lone run would."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
