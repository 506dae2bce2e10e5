"""`deltacompress analyze`: what the delta of a pair looks like, before compressing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.compressing.budget import (
    PredictDevice,
    PredictJudge,
    PredictOn,
    PredictSamples,
    PredictSeed,
    PredictSeqLen,
    show_frontier,
)
from deltacompress.cli.given import early
from deltacompress.cli.given.options import BaseArgument, FinetunedArgument
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown.console import Console, verb
from deltacompress.errors import InputError, option, switch


@verb
def analyze(
    console: Console,
    base: BaseArgument,
    finetuned: FinetunedArgument,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write analysis.json and, where matplotlib is installed, histograms.png "
            "(base, fine-tuned, delta) to this directory; with --predict frontier.json and frontier.png."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what --out holds of another pair.")] = False,
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Predict KL against size instead, for which --calibration is needed."),
    ] = False,
    calibration: PredictOn = None,
    judge: PredictJudge = None,
    samples: PredictSamples = None,
    seq_len: PredictSeqLen = None,
    seed: PredictSeed = None,
    device: PredictDevice = None,
) -> None:
    """Show statistics of the delta between BASE and FINETUNED, per layer; or predict what each size would keep."""
    given = {"calibration": calibration, "judge": judge, "samples": samples, "seq_len": seq_len, "seed": seed}
    given |= {"device": device}
    if predict:
        show_frontier(console, base, finetuned, given, out, force=force)
        return
    for name, value in given.items():
        if value is not None:
            raise InputError(f"says what --predict measures on: give {switch('predict')}", where=option(name))
    if out is not None:
        early.folder(out)
    early.checkpoints(base, finetuned)
    from deltacompress.cli.shown import render

    title = f"{finetuned} against {base}"
    if out is None:
        with nothing_begun():
            from deltacompress.analysis.pair import analyze as analyze_pair

        with console.progress() as reporter:
            found = analyze_pair(base, finetuned, reporter=reporter)
        data, rows = found.to_json(), found.summary_rows()
    else:
        with nothing_begun():
            from deltacompress.analysis.output import analyze_into

        with console.progress() as reporter:
            written = analyze_into(out, base, finetuned, force=force, reporter=reporter)
        for path in written.files:
            console.note(f"wrote {path}")
        if written.missing is not None:
            console.warn(written.missing)
        data, rows = dict(written.data), written.rows()
    for note in data["notes"]:
        console.note(note)
    console.result(data, lambda: render.rows(title, rows))
