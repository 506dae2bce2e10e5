"""`deltacompress compress --jobs` and `--dry-run`: many fine-tuned models, and what would be done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltacompress.cli.shown import render
from deltacompress.cli.shown.console import Console
from deltacompress.errors import InputError, option

if TYPE_CHECKING:
    from rich.console import RenderableType


def compress_jobs(
    console: Console,
    jobs: Path,
    own: Mapping[str, object],
    *,
    workers: int | None,
    zoo: str | None,
    resume: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Compress every fine-tuned model of a jobs file. own: what such a file says itself, as it was given.

    Raises:
        InputError: one of these was given; else as compress_fleet; FleetFailedError: jobs failed.
    """
    if said := [name for name, value in own.items() if value not in (None, [])]:
        where = said[0] if said[0].isupper() else option(said[0])
        told = "goes into the jobs file, not beside it" if said[0] not in _ALONE else "is for one model, not for --jobs"
        raise InputError(told, where=where, way_out="see docs/cli.md" if said[0] not in _BUDGET else _BY_RECIPE)
    from deltacompress.fleet.run import compress_fleet, plan_fleet

    with console.progress() as reporter:
        if dry_run:
            plans = [one.to_json() for one in plan_fleet(jobs, zoo=zoo, resume=resume, force=force, reporter=reporter)]
        else:
            result = compress_fleet(jobs, workers=workers, zoo=zoo, resume=resume, force=force, reporter=reporter)
    if dry_run:
        console.result({"jobs": plans}, lambda: render.rows(f"plan of {jobs}", [_planned(one) for one in plans]))
        return
    console.result(result.to_json(), lambda: render.rows(f"jobs of {jobs}", result.rows(), spare=("seconds",)))
    for line in result.errors():
        console.warn(line)
    result.require()


def plan_table(data: Mapping[str, Any]) -> RenderableType:
    """The plan of one job: what becomes of which tensors, then sizes, memory and time, and what estimates rest on."""
    from rich.console import Group
    from rich.text import Text

    shown = [{name: one[name] for name in _COLUMNS} for one in data["tensors"]]
    lines = {key: value for key, value in data.items() if key != "expected_basis"}
    bases = {"expected_bytes": data["expected_basis"]}
    for name in ("memory", "time"):
        given = data[name] or {}
        lines |= {f"{name}: {key}": value for key, value in given.items() if key != "basis"}
        bases[name] = given.get("basis")
    title = "what would become of the tensors"
    plan = render.summary_and_rows("plan; nothing was written", {title: shown} | lines, table=title)
    notes = [f"{name.replace('_', ' ')}: an estimate: {basis}" for name, basis in bases.items() if basis is not None]
    return Group(plan, *map(Text, notes))


_BUDGET = ("target_ratio", "max_size", "max_kl", "judge")
_ALONE = ("devices", "gate", "tasks", "task_dir", "limit", *_BUDGET)
"""What a jobs file cannot say."""
_BY_RECIPE = "compress one model by it, and name the OUT.recipe.yaml that comes of it in the jobs file"
_COLUMNS = (
    "kind",
    "treatment",
    "codec",
    "format",
    "tensors",
    "weights",
    "bits_per_weight",
    "stored_bytes",
    "expected_bytes",
)


def _planned(data: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one job."""
    return {
        "finetuned": data["finetuned"],
        "recipe": data["recipe"],
        "out": data["out"],
        "stored_bytes": data["stored_bytes"],
        "expected_bytes": data["expected_bytes"],
        "memory_bytes": data["memory"]["total_bytes"],
        "used_again": data["used_again"],
    }
