"""An analysis as files: analysis.json, and a picture where matplotlib is installed; used again for the same pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress._version import __version__
from deltacompress.analysis.pair import analyze
from deltacompress.analysis.plot import plot_histograms
from deltacompress.analysis.result import Aggregate, summary_rows
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import BackendError, switch
from deltacompress.files.finished import new_output
from deltacompress.files.output import make_directory, remove_empty, write_once
from deltacompress.reporter import Reporter

FIRST, PICTURE = "analysis.json", "histograms.png"


@dataclass(frozen=True, slots=True)
class Written:
    """data: as Analysis.to_json. files: what was written, nothing where it was used again. missing: why no picture."""

    data: Mapping[str, Any]
    files: tuple[Path, ...]
    missing: str | None = None

    def rows(self) -> list[dict[str, str | int | float | None]]:
        """As Analysis.summary_rows."""
        parts = (*self.data["layers"], *self.data["outside"], self.data["total"])
        return summary_rows(Aggregate(**part) for part in parts)


def analyze_into(out: Path, base: Path, finetuned: Path, *, force: bool, reporter: Reporter) -> Written:
    """Analyze a pair and write what was found to the directory `out`, made if it is not there.

    force: replace what `out` holds of another pair. A finished analysis of the same weights is read and returned.

    Raises:
        OutputError: `out` holds the analysis of another pair, or cannot be written; nothing new is left there.
        CheckpointError, PairError: as analyze.
    """
    remove_empty(make_directory(out))  # a place that cannot be is told before anything is read
    with new_output(out, (FIRST, PICTURE), _inputs(base, finetuned), force=force) as output:
        if output is None:
            reporter.note(f"{out}: a finished analysis of the same pair, used again ({switch('force')}: analyze anew)")
            lacks = f"{out}: has no {PICTURE}, matplotlib was not installed; {switch('force')}: analyze anew"
            return Written(json.loads((out / FIRST).read_bytes()), (), None if (out / PICTURE).exists() else lacks)
        found = analyze(base, finetuned, reporter=reporter)
        data, missing = found.to_json(), None
        write_once(output.ready / FIRST, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())
        try:
            plot_histograms(found, output.ready / PICTURE)
        except BackendError as error:  # the figures are there all the same
            missing = error.what if error.where is None else f"{out / PICTURE}: {error.what}"
        names = sorted(path.name for path in output.ready.iterdir())
        output.finish()
    return Written(data, tuple(out / name for name in names), missing)


def _inputs(base: Path, finetuned: Path) -> dict[str, str]:
    """What decides on an analysis: weights, by their content, and what looks at them."""
    pair = {"base": base, "fine-tuned model": finetuned}
    return {what: Checkpoint.open(path).fingerprint() for what, path in pair.items()} | {"version": __version__}
