"""Trains every method from one base on each task, and lets `eval` measure what came of it on the serving runtime.

    DATA/<task>/train.jsonl, less what is held out -> a model for each method and seed -> one report for each task and
    seed: the full fine-tune as the reference, deltas and adapters beside the base in one batch -> a table

All see the same samples in the same order, so many tokens each. OUT/models keeps what was trained and OUT/reports what
was measured: the same call goes on where it was stopped, and begun several times at once shares the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import mean, median, stdev
from typing import Any

from deltacompress.artifact.outputs import check_outside
from deltacompress.bench.tuning.adapters import require_peft
from deltacompress.bench.tuning.methods import check_data, chosen
from deltacompress.bench.tuning.sharing import alone, together, unless_taken
from deltacompress.bench.tuning.table import to_markdown
from deltacompress.bench.tuning.task import Asked, TaskBench
from deltacompress.bench.tuning.training import Examples, Plan
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.demo.score import read_task
from deltacompress.devices import resolve_device
from deltacompress.errors import InputError, Interrupted, option
from deltacompress.files.output import write_once
from deltacompress.models.tokenizers import load_tokenizer
from deltacompress.reporter import SILENT, Reporter

TABLE, LOCKS = "tuning.md", "locks"
_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Tuning:
    """rows: one for each task, method and seed; means: over the seeds."""

    out: Path
    rows: tuple[dict[str, Any], ...]
    means: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"out": str(self.out), "means": list(self.means), "rows": list(self.rows)}


def run(
    *,
    base: Path,
    data: Path,
    tasks: Sequence[str],
    methods: Sequence[str],
    out: Path,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 300,
    rows: int = 32,
    held_out: int = 200,
    limit: int | None = 1000,
    device: str = "auto",
    reporter: Reporter = SILENT,
) -> Tuning:
    """Train and measure; the table is written into `out`.

    Args:
        data: a folder with <task>/train.jsonl and validation.jsonl. methods: as methods.chosen.
        steps, rows: as training.Plan. held_out: training samples, the last ones, that rates are chosen by.
        limit: the first validation samples. device: where models are trained and run.

    Raises:
        InputError: no such task or method, too few training samples, some of them in validation, too, or no PEFT.
        NumericsError: a method diverges at every rate.
        Interrupted: stopped; the same call goes on.
    """
    wanted, where = chosen(methods), str(resolve_device(device))
    if any(one.kind not in ("full", "delta") for one in wanted):
        require_peft()
    if wrong := [one for one in seeds if not 0 <= one < _SEEDS]:
        raise InputError(f"{wrong[0]} is none", where=option("seeds"), way_out="give whole numbers from 0")
    if not tasks or not seeds or len(set(seeds)) < len(seeds):
        missing = "tasks" if not tasks else "seeds"
        raise InputError("names none, or one twice", where=option(missing), way_out="give one or more, each once")
    check_data(tasks, data)
    check_outside(out, base, data)
    checkpoint = Checkpoint.open(base)
    asked = Asked(checkpoint, data, wanted, out, tuple(seeds), Plan(steps, rows), held_out, limit, where)
    examples = {task: _examples(data / task, checkpoint, held_out, limit) for task in tasks}
    bench = [TaskBench(task, asked, one) for task, one in examples.items()]
    reporter.phase("training and measuring")
    for name, folder in [(f"{one.name}.{key}", left) for one in bench for key, left in one.runs.unfinished().items()]:
        with unless_taken(out / LOCKS, name) as killed:
            if killed:
                rmtree(folder, ignore_errors=True)
    try:
        found = _rows(bench, asked, reporter)
    except (KeyboardInterrupt, Interrupted) as stop:
        raise Interrupted("interrupted", way_out=f"what is finished stays in {out}: run it again") from stop
    return Tuning(out, tuple(found), tuple(means(found)))


def _rows(bench: Sequence[TaskBench], asked: Asked, reporter: Reporter) -> list[dict[str, Any]]:
    """Train, compress, then measure, all together with other calls; then the rows of the table, which is written."""
    locks, seeds = asked.out / LOCKS, asked.seeds
    together(
        locks,
        lambda: [(one, job) for one in bench for job in one.runs.missing(asked.methods, seeds)],
        lambda item: f"{item[0].name}.{item[1].key}",
        lambda item: item[0].runs.train(item[1], reporter),
    )
    together(
        locks,
        lambda: [(one, *which) for one in bench for which in one.uncompressed()],
        lambda item: f"{item[0].name}.{item[1].label}.{item[2]}",
        lambda item: item[0].compress(item[1], item[2], reporter),
    )
    together(
        locks,
        lambda: [(one, seed) for one in bench for seed in seeds if not one.is_measured(seed)],
        lambda item: f"{item[0].name}.{item[1]}",
        lambda item: item[0].measured(item[1], reporter),
    )
    found: list[dict[str, Any]] = []
    with alone(locks):  # times, and nobody beside them
        for one in bench:
            served = one.served(reporter)
            for seed in seeds:
                found += one.rows(seed, served, reporter)
                write_once(asked.out / TABLE, to_markdown(means(found)).encode(), replace=True)
    return found


def _examples(folder: Path, base: Checkpoint, held_out: int, limit: int | None) -> Examples:
    """Raises InputError: too few samples, or some that are trained on are in the first `limit` of validation, too."""
    file, check = folder / "train.jsonl", folder / "validation.jsonl"
    samples = read_task(file)
    seen = {(one.prompt, one.completion) for one in samples}
    if both := sum((one.prompt, one.completion) in seen for one in read_task(check, limit)):
        raise InputError(
            f"{both} of its samples are in {file.name}, too", where=check, way_out="measure on samples of their own"
        )
    if len(samples) <= held_out:
        raise InputError(
            f"{len(samples)} samples, of which {held_out} are to be held out",
            where=file,
            way_out=f"give {option('held_out')} less",
        )
    return Examples.of(samples, load_tokenizer(base.path), held_out)


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds of each task and method. stderr: the mean of theirs, of the samples, which all share; spread:
    standard deviation of accuracy between seeds; p: the median.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    found = []
    for (task, method), own in groups.items():
        every = {
            name: [row[name] for row in own if row[name] is not None]
            for name in ("accuracy", "stderr", "p", "loss", "bytes", "load_ms", "added_ms")
        }
        averages: dict[str, Any] = {name: mean(some) if some else None for name, some in every.items()}
        spread = stdev(every["accuracy"]) if len(own) > 1 else None
        changed = {"p": median(every["p"]) if every["p"] else None, "bytes": round(averages["bytes"])}
        found.append(
            {"task": task, "method": method, "seeds": len(own)}
            | averages
            | changed
            | {"spread": spread}
            | {name: own[0][name] for name in ("rate", "parameters")}
            | {"steps": ", ".join(dict.fromkeys(row["steps"] for row in own if row["steps"])) or None}
        )
    return found
