"""A frontier as files: frontier.json, and a picture where matplotlib is installed; used again for the same input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress._version import __version__
from deltacompress.budget.prediction.frontier import predict
from deltacompress.budget.prediction.plot import plot_frontier
from deltacompress.calibration.sources import local_file
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import BackendError, switch
from deltacompress.files.finished import new_output
from deltacompress.files.hashing import hash_file
from deltacompress.files.output import make_directory, remove_empty, write_once
from deltacompress.files.regular import ANYWHERE
from deltacompress.reporter import Reporter

FIRST, PICTURE = "frontier.json", "frontier.png"


@dataclass(frozen=True, slots=True)
class Written:
    """data: as Frontier.to_json. files: what was written, nothing where it was used again. missing: why no picture."""

    data: Mapping[str, Any]
    files: tuple[Path, ...]
    missing: str | None = None


def predict_into(out: Path, base: Path, finetuned: Path, *, force: bool, reporter: Reporter, **given: Any) -> Written:
    """Predict a pair's frontier and write it to the directory `out`, made if it is not there.

    given: of `predict`. force: replace what `out` holds of another input. What is there of the same is returned.

    Raises:
        OutputError: `out` holds the frontier of another input, or cannot be written; nothing new is left there.
        InputError: as predict.
    """
    remove_empty(make_directory(out))  # a place that cannot be is told before anything is read
    with new_output(out, (FIRST, PICTURE), _inputs(base, finetuned, given), force=force) as output:
        if output is None:
            reporter.note(f"{out}: a finished prediction of the same input, used again ({switch('force')}: anew)")
            return Written(json.loads((out / FIRST).read_bytes()), ())
        found = predict(base, finetuned, reporter=reporter, **given)
        data, missing = found.to_json(), None
        write_once(output.ready / FIRST, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())
        try:
            plot_frontier(found, output.ready / PICTURE)
        except BackendError as error:  # the figures are there all the same
            missing = f"{out / PICTURE}: {error.what}"
        names = sorted(path.name for path in output.ready.iterdir())
        output.finish()
    return Written(data, tuple(out / name for name in names), missing)


def _inputs(base: Path, finetuned: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What decides on a prediction."""
    pair = {"base": Checkpoint.open(base), "fine-tuned model": Checkpoint.open(finetuned)}
    models = {what: [one.fingerprint(), one.side_file_hashes()] for what, one in pair.items()}
    read: dict[str, Any] = {}
    for name in ("calibration", "judge"):
        data = None if given[name] is None else local_file(str(given[name]), name)
        read[name] = given[name] if data is None else hash_file(data, links=ANYWHERE)[0]
    return models | dict(given) | read | {"version": __version__}
