"""One task of `bench tuning`: its models, its reports, and its rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress._version import __version__
from deltacompress.bench.tuning.methods import FULL, Method
from deltacompress.bench.tuning.runs import Made, Runs
from deltacompress.bench.tuning.serving import Served, Times
from deltacompress.bench.tuning.training import Examples, Plan, products
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.evaluation.report.data import REPORT, Report
from deltacompress.evaluation.run import evaluate
from deltacompress.files.canonical_json import canonical_digest
from deltacompress.files.hashing import hash_file
from deltacompress.reporter import Reporter

_ROWS = 512


@dataclass(frozen=True, slots=True)
class Asked:
    """As arguments of run.run; base: opened; methods: those chosen; device: resolved."""

    base: Checkpoint
    data: Path
    methods: tuple[Method, ...]
    out: Path
    seeds: tuple[int, ...]
    plan: Plan
    held_out: int
    limit: int | None
    device: str


class TaskBench:
    """Trains, measures and tells of one task; what is in `out` already is neither trained nor measured again."""

    def __init__(self, name: str, asked: Asked, examples: Examples) -> None:
        self.name, self._asked = name, asked
        self._train = asked.data / name / "train.jsonl"
        self._identity = {
            "base": asked.base.fingerprint(),
            "files": asked.base.side_file_hashes(),
            "data": hash_file(self._train)[0],
            "plan": [asked.plan.steps, asked.plan.rows, asked.held_out],
            "kept": "loss, parameters, steps",
            "products": products(torch.device(asked.device)),
            "device": asked.device,
            "versions": [__version__, torch.__version__],
        }
        models = asked.out / "models" / name
        self.runs = Runs(asked.base, examples, asked.plan, models, asked.device, self._identity)

    def uncompressed(self) -> list[tuple[Method, int]]:
        """Deltas that are still to be made, once all is trained."""
        return self.runs.uncompressed(self._asked.methods, self._asked.seeds)

    def compress(self, method: Method, seed: int, reporter: Reporter) -> None:
        """Make one of them."""
        self.runs.made(method, seed, self._asked.seeds[0], self._train, reporter)

    def is_measured(self, seed: int) -> bool:
        """Whether there is a report of a seed's models."""
        return (self._report(seed) / REPORT).exists()

    def measured(self, seed: int, reporter: Reporter) -> Report:
        """All models of a seed as `eval` measures them, now or before; what is missing is trained."""
        asked, made = self._asked, self._made(seed, reporter)
        others = {label: one.path for label, one in made.items() if label != FULL}
        own: dict[str, Any] = {"tasks": [self.name], "task_dir": asked.data, "limit": asked.limit, "policy": None}
        own |= {"device": asked.device, "out": self._report(seed)}
        if asked.device.startswith("cuda"):
            own["batch_size"] = _ROWS  # a token of a small model takes as long for many rows as for few
        return evaluate(others, base=asked.base.path, finetuned=made[FULL].path, with_base=True, **own)

    def served(self, reporter: Reporter) -> dict[str, Served]:
        """What serving takes, by method: of the first seed's models, which are like those of the others."""
        asked = self._asked
        made = {label: one.path for label, one in self._made(asked.seeds[0], reporter).items() if label != FULL}
        times = Times(asked.base.path, asked.out / "served" / self.name, asked.device, self._identity)
        try:
            found = times.of(list(made.values()), reporter)
        finally:
            times.close()
        return {label: found[path] for label, path in made.items()}

    def rows(self, seed: int, served: Mapping[str, Served], reporter: Reporter) -> list[dict[str, Any]]:
        """The base's row, then one for each method."""
        made = self._made(seed, reporter)
        return rows(self.measured(seed, reporter), self.name, seed, self._asked.methods, made, served)

    def _made(self, seed: int, reporter: Reporter) -> dict[str, Made]:
        first = self._asked.seeds[0]
        return {one.label: self.runs.made(one, seed, first, self._train, reporter) for one in self._asked.methods}

    def _report(self, seed: int) -> Path:
        asked = self._asked
        told = [self._identity, [one.label for one in asked.methods], asked.seeds[0], asked.limit]
        return asked.out / "reports" / f"{self.name}.{seed}.{canonical_digest(told)[:16]}"


def rows(
    report: Report,
    task: str,
    seed: int,
    methods: Sequence[Method],
    made: Mapping[str, Made],
    served: Mapping[str, Served],
) -> list[dict[str, Any]]:
    """The base's row, then one for each method. Accuracy and its standard error in percent; p: of a difference from
    the full fine-tune on the same samples; loss: of the right answers, nats/token; bytes: of all files; load_ms,
    added_ms: see Served, of what is served beside the base; parameters: that were trained; steps: how they ran.
    """
    found = []
    reference = next((one.fidelity.reference_loss for one in report.scores if one.fidelity), None)
    for label in ("base", *(one.label for one in methods)):
        name = "finetuned" if label == FULL else label
        score = report.score(task, name)
        assert score is not None
        loss = score.fidelity.loss if score.fidelity else reference
        own, beside = made.get(label), served.get(label)
        found.append(
            {
                "task": task,
                "method": label,
                "seed": seed,
                "accuracy": 100 * score.value,
                "stderr": 100 * score.stderr,
                "p": score.paired.p_value if score.paired else None,
                "loss": loss,
                "bytes": report.subject(name).bytes,
                "load_ms": beside.load_ms if beside else None,
                "added_ms": beside.added_ms if beside else None,
                "rate": own.rate if own else None,
                "held_out": own.held_out if own else None,
                "parameters": own.parameters if own else None,
                "steps": own.steps if own else None,
            }
        )
    return found
