"""`deltacompress compare`: what other methods keep of the same fine-tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.given import early
from deltacompress.cli.given.options import (
    BaseArgument,
    BatchSize,
    EvalBackend,
    EvalDevice,
    FinetunedArgument,
    Limit,
    MakeAnew,
    TaskDir,
    Tasks,
)
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import check_driver

Samples = Annotated[
    int | None, typer.Option(min=1, help="Calibration sequences.", show_default="the recipes', normally 256")
]
SeqLen = Annotated[
    int | None, typer.Option(min=2, help="Tokens of each sequence.", show_default="the recipes', normally 256")
]
Methods = Annotated[
    str,
    typer.Option(
        help="Recipes by name (calibration/recipes, evals/baselines) or path, bitdelta, low-rank; separated by commas.",
        show_default="all baselines, and ours at 4, 2 and 1 bit",
    ),
]


@verb
def compare(
    console: Console,
    base: BaseArgument,
    finetuned: FinetunedArgument,
    *,
    tasks: Tasks,
    calibration: Annotated[Path, typer.Option(help="Calibration data of the methods that want some.")],
    samples: Samples = None,
    seq_len: SeqLen = None,
    out: Annotated[Path, typer.Option(help="Directory for artifacts, report and comparison.png.")],
    methods: Methods = "",
    task_dir: TaskDir = None,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the calibration sampling, and of bootstraps.")] = 0,
    batch_size: BatchSize = 64,
    device: EvalDevice = "cpu",
    backend: EvalBackend = "auto",
    force: MakeAnew = False,
) -> None:
    """Compress FINETUNED with several methods, and show size, quality, fidelity and time of each."""
    from deltacompress.cli.shown import render

    early.tasks(tasks, task_dir, limit=limit)
    calibrates = early.methods(methods)
    check_driver(device)
    early.calibration(calibration)
    early.folder(out)
    early.checkpoints(base, finetuned)
    if not calibrates:
        console.note(f"{calibration}: not read, since none of these methods calibrates")
    with nothing_begun():
        from deltacompress.evaluation import compare as run

    with console.progress() as reporter:
        found = run(
            base,
            finetuned,
            tasks=[name for name in tasks.split(",") if name],
            out=out,
            calibration=calibration,
            samples=samples,
            seq_len=seq_len,
            methods=[name for name in methods.split(",") if name] or None,
            task_dir=task_dir,
            limit=limit,
            seed=seed,
            batch_size=batch_size,
            device=device,
            backend=backend,
            force=force,
            reporter=reporter,
        )
    data = found.to_json()
    console.result(data, lambda: render.rows(f"comparison in {out}", data["rows"]))
