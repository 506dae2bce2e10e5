"""`deltacompress demo`: the main job on the small pair that ships with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.given import early
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown.console import Console, verb


@verb
def demo(
    console: Console,
    *,
    out: Annotated[Path, typer.Option(help="Directory for the artifacts and restored models.")] = Path("demo-out"),
    force: Annotated[bool, typer.Option("--force", help="Run it anew; replace an earlier demo in --out.")] = False,
) -> None:
    """Compress, restore and score the shipped demo pair; needs no GPU and no network."""
    from deltacompress.cli.shown import render

    early.folder(out)
    with nothing_begun():
        from deltacompress.demo.run import run_demo

    with console.progress() as reporter:
        data = run_demo(out, force=force, reporter=reporter).to_json()
    notes = {"loss": "in nats per token of the completions"}
    console.result(data, lambda: render.summary_and_rows(f"results in {out}", data, table="variants", notes=notes))
    console.note(
        "next, a pair of your own: deltacompress compress BASE FINETUNED --recipe int2-24 --calibration DATA.jsonl "
        "--out DELTA (`deltacompress recipes` says which recipe for whom)"
    )
