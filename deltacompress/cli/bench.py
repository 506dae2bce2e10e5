"""`deltacompress bench`: timings of the parts that decide how long compressing takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.console import Console, verb

app = typer.Typer(help="Measure the speed of the parts on this machine.", no_args_is_help=True)


@app.command("obs")
@verb
def obs(
    console: Console,
    *,
    size: Annotated[int, typer.Option(min=64, help="Rows and columns of the layer.")] = 4096,
) -> None:
    """Time the OBS solver (2:4, 4 bits) on one layer against a plain column-by-column implementation."""
    from deltacompress.bench.obs import run
    from deltacompress.cli import render

    with console.progress() as reporter:
        data = run(size=size, reporter=reporter).to_json()
    console.result(data, lambda: render.summary_and_rows(f"OBS, {size} x {size}", data, table="rows"))


@app.command("pairs")
@verb
def pairs(
    console: Console,
    models: Annotated[Path, typer.Argument(metavar="MODELS", help="Directory with base/ and one checkpoint per task.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Directory with <task>/train.jsonl, validation.jsonl.")],
    *,
    out: Annotated[Path, typer.Option(help="Directory for the artifacts.")],
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas.")] = "int4-24,int2-24",
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas; all that have data by default.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Validation samples of each task.")] = 1000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Compress real pairs and score what is restored, against the fine-tuned models on the same samples."""
    from deltacompress.bench.pairs import run
    from deltacompress.cli import render

    with console.progress() as reporter:
        found = run(
            models=models,
            data=data,
            recipes=[name for name in recipes.split(",") if name],
            tasks=[name for name in tasks.split(",") if name] or None,
            out=out,
            limit=limit,
            device=device,
            reporter=reporter,
        )
    table = found.to_json()
    console.result(table, lambda: render.rows("pairs", table["rows"]))
