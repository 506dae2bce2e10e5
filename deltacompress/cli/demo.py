"""`deltacompress demo`: the main job on the small pair that ships with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.console import Console, verb


@verb
def demo(
    console: Console,
    *,
    out: Annotated[Path, typer.Option(help="Directory for the artifacts and restored models.")] = Path("demo-out"),
) -> None:
    """Compress, restore and score the shipped demo pair; needs no GPU and no network."""
    from deltacompress.cli import render
    from deltacompress.demo.run import run_demo

    with console.progress() as reporter:
        data = run_demo(out, reporter=reporter).to_json()
    console.result(data, lambda: render.summary_and_rows(f"results in {out}", data, table="variants"))
