"""`deltacompress bench tuning`: what is worth training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.bench.pairs import Data, names, numbers
from deltacompress.cli.given import early
from deltacompress.cli.given.models import model
from deltacompress.cli.given.options import BenchDevice
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import check_driver


@verb
def tuning(
    console: Console,
    base: Annotated[Path, typer.Argument(metavar="BASE", parser=model, help="Directory of the base model.")],
    data: Data,
    *,
    out: Annotated[Path, typer.Option(help="Directory for models, reports and the table.")],
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas: folders of DATA.")],
    methods: Annotated[
        str, typer.Option(help="full, delta, lora, dora, boft, rosa, or one of their rows, such as lora-r16.")
    ] = "full,delta,lora,dora,boft,rosa",
    seeds: Annotated[str, typer.Option(help="Seeds of training, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="Batches that each model is trained on.")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 32,
    held_out: Annotated[
        int, typer.Option(min=1, help="Training samples that learning rates are chosen by, the last ones.")
    ] = 200,
    limit: Annotated[int, typer.Option(min=1, help="Validation samples of each task.")] = 1000,
    device: BenchDevice = "auto",
) -> None:
    """Train a base fully and with adapters on the same data, and measure all; the same call goes on."""
    from deltacompress.bench.tuning.methods import check_data, chosen
    from deltacompress.cli.shown import render

    drawn, asked = numbers("seeds", seeds, int), names(methods)
    chosen(asked)
    check_driver(device)
    check_data(names(tasks), data)
    early.tasks(tasks, data)
    early.folder(out)
    early.checkpoints(base)
    from deltacompress.bench.tuning.run import run

    with console.progress() as reporter:
        found = run(
            base=base,
            data=data,
            tasks=names(tasks),
            methods=asked,
            out=out,
            seeds=drawn,
            steps=steps,
            rows=rows,
            held_out=held_out,
            limit=limit,
            device=device,
            reporter=reporter,
        )
    shown = [{name: value for name, value in row.items() if name != "spread"} for row in found.means]
    console.result(found.to_json(), lambda: render.rows(f"tuning, in {out}", shown))


def register(app: typer.Typer) -> None:
    """Add this verb to those of `deltacompress bench`."""
    app.command("tuning")(tuning)
