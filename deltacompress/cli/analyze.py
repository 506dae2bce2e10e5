"""`deltacompress analyze`: what the delta of a pair looks like, before compressing it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.console import Console, verb
from deltacompress.errors import BackendError, OutputError


@verb
def analyze(
    console: Console,
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Directory of the base model.")],
    finetuned: Annotated[Path, typer.Argument(metavar="FINETUNED", help="Directory of the fine-tuned model.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write analysis.json and, where matplotlib is installed, histograms.png "
            "(base, fine-tuned, delta) to this directory."
        ),
    ] = None,
) -> None:
    """Show statistics of the delta between BASE and FINETUNED, per layer."""
    from deltacompress.analysis import analyze as analyze_pair
    from deltacompress.analysis_plot import plot_histograms
    from deltacompress.cli import render

    with _directory(out):
        with console.progress() as reporter:
            found = analyze_pair(base, finetuned, reporter=reporter)
        data = found.to_json()
        if out is not None:
            _write(out / "analysis.json", json.dumps(data, indent=2, allow_nan=False) + "\n")
            console.note(f"wrote {out / 'analysis.json'}")
            try:
                plot_histograms(found, out / "histograms.png")
                console.note(f"wrote {out / 'histograms.png'}")
            except BackendError as error:  # the figures are there all the same
                console.warn(str(error))
    for note in found.notes:
        console.note(note)
    console.result(data, lambda: render.rows(f"{finetuned} against {base}", found.summary_rows()))


@contextmanager
def _directory(out: Path | None) -> Iterator[None]:
    """Make `out` before the work, not after it; if the work fails, leave no new and empty one behind."""
    from deltacompress.workspace import make_directory, remove_empty

    made = [] if out is None else make_directory(out)
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise


def _write(path: Path, text: str) -> None:
    """All of the file or none of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error
