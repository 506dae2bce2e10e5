"""What methods keep of real pairs at every size: the rows of the table, made one by one, kept in OUT.

As `bench pairs`, calibration comes from train, scores from validation. A method of one size (a recipe) has one row for
each task and seed; one that takes a size has a row for each ratio that is asked. Finished rows are kept in OUT by all
that can change them, and used again: what was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from deltacompress._version import __version__
from deltacompress.artifact.delta import Delta
from deltacompress.artifact.outputs import check_outside
from deltacompress.bench.frontier.methods import BUDGET, RATIOS, Point, chosen, points
from deltacompress.bench.frontier.picture import draw
from deltacompress.bench.frontier.reference import Reference
from deltacompress.bench.frontier.subjects import Made, Pair, chosen_for, packed, rest, sketched, surveyed
from deltacompress.bench.frontier.table import means, predictions, to_markdown
from deltacompress.bench.pairs.tasks import tasks_of
from deltacompress.calibration.held_back import FEWEST
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.side_files import side_file_bytes
from deltacompress.demo.score import read_task
from deltacompress.devices import resolve_device
from deltacompress.errors import InputError, Interrupted, option, switch
from deltacompress.evaluation.scoring.store import AnswerStore
from deltacompress.files.hashing import hash_file
from deltacompress.files.output import write_once
from deltacompress.reporter import SILENT, Reporter

TABLE, PICTURE = "frontier.md", "frontier.svg"


@dataclass(frozen=True, slots=True)
class Frontier:
    """rows: one for each measurement; means: over the seeds of each."""

    out: Path
    rows: tuple[dict[str, Any], ...]
    means: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        told = predictions(self.rows)
        return {"out": str(self.out), **told, "means": list(self.means), "rows": list(self.rows)}


def run(
    *,
    models: Path,
    data: Path,
    methods: Sequence[str],
    out: Path,
    tasks: Sequence[str] = (),
    ratios: Sequence[float] = RATIOS,
    seeds: Sequence[int] = (0, 1, 2),
    limit: int = 1000,
    scores: bool = True,
    judge_rest: bool = False,
    device: str = "auto",
    reporter: Reporter = SILENT,
) -> Frontier:
    """Measure every method on every task; table and picture are written into `out` as rows come.

    Args:
        models, data, tasks: as `bench pairs`. methods: names of shipped recipes, baselines and sketches, or paths.
        ratios: whole fine-tuned checkpoint over whole artifact, asked of methods that take a size.
        limit: the first validation samples. scores: score the answers, too, not only the divergence.
        judge_rest: budgets are judged by the validation samples after those, else by records of the calibration data.
        device: where models are compressed and run.

    Raises:
        InputError: no such task, method or device, or a ratio or seed that is none or given twice.
        Interrupted: stopped; the same call goes on.
    """
    for name, numbers in (("ratios", ratios), ("seeds", seeds)):
        _check_once(name, numbers)
    if wrong := [ratio for ratio in ratios if not 1 < ratio < float("inf")]:
        raise InputError(
            f"{wrong[0]:g} is no ratio to compress by", where=option("ratios"), way_out="give some above 1"
        )
    found = tasks_of(models, data, list(tasks))
    todo = list(points(found, chosen(methods), ratios, seeds))
    check_outside(out, models, data)
    if judge_rest and any(point.method.label == BUDGET for point in todo):
        _check_rest(data, found, limit)
    where = str(resolve_device(device))
    rows: list[dict[str, Any]] = []
    reporter.phase("measuring", len(todo))
    try:
        for task in found:
            bench = _Task(models, data, task, out, limit, where, scores=scores, judge_rest=judge_rest)
            try:
                for point in (one for one in todo if one.task == task):
                    rows.append(bench.row(point, reporter))
                    if rows[-1]["ratio"] is None:
                        reporter.note(f"{point}: it has nothing so small")
                    reporter.step(str(point))
                    _write(out, rows)
            finally:
                bench.close()
    except (KeyboardInterrupt, Interrupted) as stop:  # a compression's own tells of a folder that is gone
        raise Interrupted("interrupted", way_out=f"finished rows stay in {out}: run it again") from stop
    return Frontier(out, tuple(rows), tuple(means(rows)))


def _check_once(name: str, numbers: Sequence[float]) -> None:
    if not numbers:
        raise InputError("names none", where=option(name), way_out="give one or more")
    if twice := [number for number in numbers if numbers.count(number) > 1]:
        raise InputError(f"{twice[0]:g} is given twice", where=option(name), way_out="give each once")


def _check_rest(data: Path, tasks: Sequence[str], limit: int) -> None:
    """Whether samples enough to judge by are left after those that are scored."""
    for task in tasks:
        file = data / task / "validation.jsonl"
        count = len(read_task(file))
        if count - limit < FEWEST:
            told = f"{count} samples, of which {max(count - limit, 0)} are left to judge by"
            fewer = f"give {option('limit')} {count - FEWEST}" if count > FEWEST else "give more"
            raise InputError(told, where=file, way_out=f"{fewer}, or leave out {switch('judge_rest')}")


def _write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    mean = means(rows)
    write_once(out / TABLE, to_markdown(mean).encode(), replace=True)
    write_once(out / PICTURE, draw(mean).encode(), replace=True)


class _Task:
    """One task: its pair, its finished rows, and, once one is missing, its reference and what rows share."""

    def __init__(
        self,
        models: Path,
        data: Path,
        task: str,
        out: Path,
        limit: int,
        device: str,
        *,
        scores: bool,
        judge_rest: bool,
    ) -> None:
        every = read_task(data / task / "validation.jsonl")
        self._samples = every[:limit]
        rest = tuple({"prompt": one.prompt, "completion": one.completion} for one in every[limit:])
        self._pair = Pair(models / "base", models / task, data / task / "train.jsonl", rest if judge_rest else None)
        self._device, self._scores, self._out = device, scores, out
        self._finetuned = Checkpoint.open(self._pair.finetuned)
        self._reference: Reference | None = None
        self._rest: Delta | None = None
        self._surveys: dict[int | None, Path] = {}
        identity = {
            "base": Checkpoint.open(self._pair.base).fingerprint(),
            "finetuned": self._finetuned.fingerprint(),
            "samples": [repr(one) for one in self._samples],
            "files": [Checkpoint.open(self._pair.base).side_file_hashes(), self._finetuned.side_file_hashes()],
            "side_file_bytes": side_file_bytes(self._finetuned, lossless="zstd"),  # in the size of every row
            "calibration": hash_file(self._pair.calibration)[0],
            "judge": [list(one.values()) for one in rest] if judge_rest else None,
            "scores": scores,
            "device": device,
            "versions": [__version__, torch.__version__],
        }
        self._rows = AnswerStore(out / "rows", identity)
        self._shared = TemporaryDirectory(prefix=".shared.", dir=out)

    def close(self) -> None:
        """Let go of files."""
        self._rows.close()
        self._shared.cleanup()

    def row(self, point: Point, reporter: Reporter) -> dict[str, Any]:
        """A measurement, made now or kept from before."""
        if point.key not in self._rows:
            self._rows.add([(point.key, self._measured(point, reporter))])
        told = {"task": point.task, "method": point.method.label, "asked": point.asked, "seed": point.seed}
        found: dict[str, Any] = self._rows[point.key]
        return told | found

    def _measured(self, point: Point, reporter: Reporter) -> dict[str, Any]:
        """Sizes and figures; of a method that cannot be so small none."""
        if self._reference is None:
            reporter.note(f"{point.task}: the fine-tuned model answers")
            self._reference = Reference(self._pair.finetuned, self._samples, self._device, scores=self._scores)
        with TemporaryDirectory(prefix=".measuring.", dir=self._out) as folder:
            made = self._made(point, Path(folder))
            if made is None:
                return {"ratio": None}
            return made.figures(self._finetuned.nbytes) | self._reference.figures(made.path)

    def _made(self, point: Point, folder: Path) -> Made | None:
        if point.method.recipe is not None:
            return packed(self._pair, point.method.recipe, point.seed, folder, self._device)
        assert point.asked is not None
        shared = Path(self._shared.name)
        if point.method.label == BUDGET:
            if point.seed not in self._surveys:
                self._surveys[point.seed] = surveyed(self._pair, point.seed, shared, self._device)
            survey = self._surveys[point.seed]
            return chosen_for(self._pair, point.asked, point.seed, survey, folder, self._device)
        if self._rest is None:
            self._rest = rest(self._pair, shared / "rest", self._device)
        return sketched(self._pair, self._rest, point.method.label, point.asked, point.seed or 0, folder)
