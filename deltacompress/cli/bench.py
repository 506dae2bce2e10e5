"""`deltacompress bench`: timings of the parts that decide how long compressing takes."""

from __future__ import annotations

from typing import Annotated

import typer

from deltacompress.cli.console import Console, verb

app = typer.Typer(help="Measure the speed of the parts on this machine.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Keep `obs` a verb of its own: Typer folds a group of one into its parent otherwise."""


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
    console.result(data, lambda: render.summary(f"OBS, {size} x {size}", data))
