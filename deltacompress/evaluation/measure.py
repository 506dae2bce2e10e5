"""Subjects answer the tasks: the fine-tuned model first, then base, deltas and adapters in shared batches, then the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltacompress.errors import InputError
from deltacompress.evaluation.job import EvaluationJob
from deltacompress.evaluation.prepare import Prepared
from deltacompress.evaluation.scoring import fidelity
from deltacompress.evaluation.scoring.checkpoints import PlainServing
from deltacompress.evaluation.scoring.decoupled import DecoupledServing
from deltacompress.evaluation.scoring.fidelity import FidelityResult
from deltacompress.evaluation.scoring.harness import TaskRun, run_tasks
from deltacompress.evaluation.scoring.panel import Panel
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.store import AnswerStore, AnswerStores
from deltacompress.evaluation.subjects import Subject
from deltacompress.evaluation.tasks.load import LocalTask, Task
from deltacompress.reporter import Reporter


@dataclass(slots=True)
class Measured:
    """What the subjects answered. runs, fidelity: label -> task -> result; seconds: label -> spent computing; runtime:
    how base and deltas ran.
    """

    runs: dict[str, dict[str, TaskRun]] = field(default_factory=dict)
    fidelity: dict[str, dict[str, FidelityResult]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    runtime: str = "plain checkpoints"


def measure(prepared: Prepared, stores: AnswerStores, reporter: Reporter) -> Measured:
    """Let every subject answer every task; answers that `stores` hold are not computed again.

    Raises:
        InputError: a task that the fine-tuned model cannot answer, or no subject.
    """
    measured = Measured()
    reference: Scorer | None = None
    drafts: AnswerStore | None = None
    for group in _groups(prepared.subjects):
        scorer, told = _scorer(group, prepared.job, reporter)
        measured.runtime = told or measured.runtime
        panel = _panel(group, scorer, told, prepared, stores, drafts, reporter)
        for subject in group:
            mine = panel.answerable(subject.label, prepared.tasks, prepared.encoder)
            if subject.role == "finetuned" and len(mine) < len(prepared.tasks):
                raise _unanswered(next(task for task in prepared.tasks if task not in mine), "the fine-tuned model")
            measured.runs[subject.label] = run_tasks(
                panel, subject.label, prepared.encoder, mine, limit=prepared.job.limit, seed=prepared.job.seed
            )
        if group[0].role == "finetuned":
            reference, drafts = scorer, panel.stores[group[0].label]
        elif reference is not None:
            _fidelity(panel, reference, prepared, measured, reporter)
        measured.seconds |= dict.fromkeys(panel.variants, panel.seconds)
    for task in prepared.tasks:
        if not any(task.name in found for found in measured.runs.values()):
            raise _unanswered(task, "every model")
    return measured


def _unanswered(task: Task, who: str) -> InputError:
    """Its notes say of which token."""
    return InputError(
        f"holds a token that the vocabulary of {who} has not",
        where=f"task {task.name}",
        way_out="leave that task out, or give the tokenizer that the model was trained with",
    )


def _groups(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Subjects that share a scorer: the base, all deltas and adapters; every other one is alone."""
    decoupled = [one for one in subjects if one.role in ("base", "delta", "adapter")]
    alone = [[one] for one in subjects if one.role == "checkpoint"]
    return [[one] for one in subjects if one.role == "finetuned"] + ([decoupled] if decoupled else []) + alone


def _scorer(group: Sequence[Subject], job: EvaluationJob, reporter: Reporter) -> tuple[Scorer, str | None]:
    """A scorer for a group, and how it runs if it is the decoupled runtime."""
    options: dict[str, Any] = {"device": job.device, "dtype": job.dtype}
    if group[0].role in ("finetuned", "checkpoint"):
        checkpoint = group[0].checkpoint
        assert checkpoint is not None
        plain = PlainServing.open(checkpoint, **options)  # the very files that were hashed
        return Scorer(plain, batch_size=job.batch_size), None
    decoupled = DecoupledServing.open(job.base, backend=job.backend, **options)
    for subject in group:
        if subject.is_variant:
            over = None if subject.over is None else subject.over.path
            for note in decoupled.load(subject.path, subject.label, over):
                reporter.note(note)
    return Scorer(decoupled, batch_size=job.batch_size), decoupled.describe()


def _panel(
    group: Sequence[Subject],
    scorer: Scorer,
    told: str | None,
    prepared: Prepared,
    stores: AnswerStores,
    drafts: AnswerStore | None,
    reporter: Reporter,
) -> Panel:
    """A scorer with the subjects that it answers for, and what an interrupted run kept of their answers."""
    job, eos = prepared.job, prepared.encoder.eos
    panel = Panel(scorer, {}, {}, reporter, eos, drafts)
    for subject in group:
        plain = None if subject.is_variant or subject.role == "base" else "plain"
        variant = panel.variants[subject.label] = subject.label if subject.is_variant else None
        ends = sorted({eos, *scorer.ends(variant)})
        options = {"device": job.device, "dtype": job.dtype, "batch_size": job.batch_size}
        weights: Any = subject.identity
        if subject.adapter is not None:  # a delta names its base itself
            weights = [prepared.base.fingerprint(), weights]
        identity = {"weights": weights, "runs": plain or told, "ends": ends, **options, **prepared.tools}
        panel.stores[subject.label] = stores.open(identity)
    if resumed := sum(store.resumed for store in panel.stores.values()):
        reporter.note(f"{', '.join(panel.variants)}: {resumed} answers of an interrupted run are used again")
    return panel


def _fidelity(panel: Panel, reference: Scorer, prepared: Prepared, measured: Measured, reporter: Reporter) -> None:
    """Compare a panel's subjects with the fine-tuned model on the right answers of every task."""
    encoder, finetuned, job = prepared.encoder, prepared.subjects[0], prepared.job
    for task in prepared.tasks:
        encode = encoder.pair if isinstance(task, LocalTask) else encoder.harness_pair
        pairs = []
        for row in measured.runs[finetuned.label][task.name].rows:
            context, answer = encode(row.prompt, row.target)
            pairs.append((tuple(context), tuple(answer)))
        rows = [(*context, *answer) for context, answer in pairs]
        asked = panel.only(
            [one for one in panel.variants if task.name in measured.runs[one] and not panel.lacks(one, rows)]
        )
        results = fidelity.measure(
            asked, reference, finetuned.identity, pairs, confidence=job.confidence, seed=job.seed, reporter=reporter
        )
        for label, result in results.items():
            measured.fidelity.setdefault(label, {})[task.name] = result
        panel.seconds += asked.seconds
