"""`deltacompress analyze`: what the delta of a pair looks like, before compressing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.console import Console, verb
from deltacompress.errors import OutputError


@verb
def analyze(
    console: Console,
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Directory of the base model.")],
    finetuned: Annotated[Path, typer.Argument(metavar="FINETUNED", help="Directory of the fine-tuned model.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write analysis.json and histograms.png (base, fine-tuned, delta) to this directory."),
    ] = None,
) -> None:
    """Show statistics of the delta between BASE and FINETUNED, per layer."""
    from deltacompress.analysis import analyze as analyze_pair
    from deltacompress.analysis_plot import plot_histograms, require_matplotlib
    from deltacompress.cli import render

    if out is not None:  # before the work, not after it
        require_matplotlib()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{out}: cannot be created ({error.strerror}); choose another --out") from error
    with console.progress() as reporter:
        found = analyze_pair(base, finetuned, reporter=reporter)
    data = found.to_json()
    if out is not None:
        (out / "analysis.json").write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        plot_histograms(found, out / "histograms.png")
        console.note(f"wrote {out / 'analysis.json'} and {out / 'histograms.png'}")
    for note in found.notes:
        console.note(note)
    console.result(data, lambda: render.rows(f"{finetuned} against {base}", found.summary_rows()))
