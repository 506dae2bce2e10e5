"""`deltacompress bench pairs`, `bench frontier`: what recipes and methods keep of real pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from deltacompress.cli.given import early
from deltacompress.cli.given.options import BenchDevice
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import DeviceName, check_driver
from deltacompress.errors import InputError, option

Number = TypeVar("Number", int, float)
Models = Annotated[Path, typer.Argument(metavar="MODELS", help="Directory with base/ and one checkpoint per task.")]
Data = Annotated[Path, typer.Argument(metavar="DATA", help="Directory with <task>/train.jsonl, validation.jsonl.")]
Tasks = Annotated[str, typer.Option(help="Tasks, separated by commas; all that have data by default.")]
Limit = Annotated[int, typer.Option(min=1, help="Validation samples of each task.")]


@verb
def pairs(
    console: Console,
    models: Models,
    data: Data,
    *,
    out: Annotated[Path, typer.Option(help="Directory for the artifacts.")],
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas.")] = "int4-24,int2-24",
    tasks: Tasks = "",
    limit: Limit = 1000,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**50, help="Seed of the calibration.", show_default="the recipe's, normally 0"),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where to compress.")] = "auto",
    score_device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to score.")] = "cpu",
    precisions: Annotated[
        str, typer.Option(help="Score in each of these, separated by commas: fp32, bf16-autocast.")
    ] = "fp32",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was interrupted in --out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace artifacts of other input in --out.")] = False,
) -> None:
    """Compress real pairs and score what is restored, against the fine-tuned models on the same samples."""
    from deltacompress.cli.shown import render

    early.recipes(*names(recipes))
    check_driver(device, score_device)
    _look_early(models, data, tasks, out)
    from deltacompress.bench.pairs.run import run

    with console.progress() as reporter:
        found = run(
            models=models,
            data=data,
            recipes=names(recipes),
            tasks=names(tasks) or None,
            out=out,
            limit=limit,
            seed=seed,
            device=device,
            score_device=score_device,
            precisions=names(precisions),
            resume=resume,
            force=force,
            reporter=reporter,
        )
    table = found.to_json()
    shown = [without(row, "seed", "backend") for row in table["rows"]]
    console.result(table, lambda: render.rows(f"pairs, scored on {table['scored_on']}", shown))


@verb
def frontier(
    console: Console,
    models: Models,
    data: Data,
    *,
    out: Annotated[Path, typer.Option(help="Directory for the table, the picture and finished rows.")],
    methods: Annotated[
        str,
        typer.Option(help="Recipes, baselines and sketches, separated by commas.", show_default="all"),
    ] = "",
    ratios: Annotated[
        str, typer.Option(help="Ratios of sizes that are asked of methods that take one.")
    ] = "4,6,8,10,12,16,24,32",
    tasks: Tasks = "",
    seeds: Annotated[str, typer.Option(help="Seeds of the calibration, separated by commas.")] = "0,1,2",
    limit: Limit = 1000,
    kl_only: Annotated[bool, typer.Option("--kl-only", help="Do not score the answers, which takes longer.")] = False,
    judge_rest: Annotated[
        bool, typer.Option("--judge-rest", help="Judge budgets by the validation samples after those of --limit.")
    ] = False,
    device: BenchDevice = "auto",
) -> None:
    """Measure what methods keep of real pairs at every size; the same call goes on where it was stopped."""
    from deltacompress.cli.shown import render

    asked, drawn = numbers("ratios", ratios, float), numbers("seeds", seeds, int)
    check_driver(device)
    _look_early(models, data, tasks, out)
    from deltacompress.bench.frontier.methods import METHODS
    from deltacompress.bench.frontier.run import run

    with console.progress() as reporter:
        found = run(
            models=models,
            data=data,
            methods=names(methods or METHODS),
            out=out,
            tasks=names(tasks),
            ratios=asked,
            seeds=drawn,
            limit=limit,
            scores=not kl_only,
            judge_rest=judge_rest,
            device=device,
            reporter=reporter,
        )
    told = found.to_json()
    shown = {**without(told, "out", "rows"), "means": [without(row, "kl_least", "kl_most") for row in found.means]}
    console.result(told, lambda: render.summary_and_rows(f"frontier, in {out}", shown, table="means"))


def _look_early(models: Path, data: Path, tasks: str, out: Path) -> None:
    """What can be told of the folders before torch is imported."""
    early.folder(out)
    from deltacompress.bench.pairs.tasks import tasks_of

    for task in ("base", *tasks_of(models, data, names(tasks))):
        early.checkpoints(models / task)


def numbers(name: str, listed: str, kind: type[Number]) -> list[Number]:
    """A list that commas separate; raises InputError."""
    try:
        return [kind(one) for one in names(listed)]
    except ValueError as error:
        raise InputError(f"{listed} is no list of numbers", where=option(name), way_out="such as 1,2") from error


def names(listed: str) -> list[str]:
    """A list that commas separate."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def parts_of(only: str | None, known: Sequence[str]) -> list[str]:
    """Those of the known parts that a list names; None: all.

    Raises:
        InputError: it names one that there is not, or none.
    """
    parts = [part for part in known if only is None or part in names(only)]
    if unknown := sorted({*names(only or "")} - {*known}) or ([""] if not parts else []):
        told = f"no part {unknown[0]!r}"
        raise InputError(told, where=option("only"), way_out=f"give some of {', '.join(known)}, with commas")
    return parts


def without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    """What a table has room for; the rest is left to --json."""
    return {key: value for key, value in row.items() if key not in keys}


def register(app: typer.Typer) -> None:
    """Add these verbs to those of `deltacompress bench`."""
    app.command("pairs")(pairs)
    app.command("frontier")(frontier)
