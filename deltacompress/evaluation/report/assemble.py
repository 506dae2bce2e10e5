"""From answers to the tables of a report: joins samples of two subjects, and compares them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from deltacompress.errors import InputError
from deltacompress.evaluation.labels import as_file_name
from deltacompress.evaluation.report.records import (
    Agreement,
    AnswersRecord,
    Disagreement,
    FidelityRecord,
    PairedRecord,
    ScoreRecord,
    Settings,
    TaskInfo,
)
from deltacompress.evaluation.scoring.fidelity import FidelityResult
from deltacompress.evaluation.scoring.harness import SampleRow, TaskRun
from deltacompress.evaluation.scoring.statistics import choices_moved, compare_paired, right_answers_lost
from deltacompress.evaluation.subjects import Subject
from deltacompress.evaluation.tasks.load import LocalTask, Task
from deltacompress.evaluation.tasks.records import data_hash
from deltacompress.files.output import output_errors

SHOWN = 12
"""Disagreements that a report shows of each subject and task; all answers are in samples/."""
_LONGEST = 1200

Runs = Mapping[str, Mapping[str, TaskRun]]


def join(first: TaskRun, second: TaskRun, *, task: str) -> list[tuple[SampleRow, SampleRow]]:
    """The rows of two subjects, sample by sample.

    Raises:
        InputError: they did not answer the same samples.
    """
    mine = {(row.doc_id, row.doc_hash): row for row in first.rows}
    theirs = {(row.doc_id, row.doc_hash): row for row in second.rows}
    if mine.keys() != theirs.keys() or not mine:
        raise InputError(
            "two models were asked different samples", where=f"task {task}", way_out="evaluate them together"
        )
    return [(row, theirs[key]) for key, row in mine.items()]


def task_infos(tasks: Sequence[Task], runs: Runs) -> tuple[TaskInfo, ...]:
    """What each task was."""
    first = {name: run for found in reversed(list(runs.values())) for name, run in found.items()}
    return tuple(
        TaskInfo(
            name=task.name,
            description=task.spec.description,
            kind=task.spec.kind,
            metric=first[task.name].metric,
            higher_is_better=True,  # harness.py refuses all others
            samples=len(first[task.name].rows),
            few_shot=task.spec.few_shot,
            source=task.source if isinstance(task, LocalTask) else f"lm-eval: {task.spec.suite}",
            data_sha256=data_hash(task.samples) if isinstance(task, LocalTask) else None,
        )
        for task in tasks
    )


def scores(
    runs: Runs,
    found: Mapping[str, Mapping[str, FidelityResult]],
    subjects: Sequence[Subject],
    settings: Settings,
    *,
    written: Collection[str] = (),
) -> tuple[ScoreRecord, ...]:
    """A record per subject and task, compared with the fine-tuned model where it took part.

    written: names of the tasks whose right answer is one text that the model writes.
    """
    reference = runs[subjects[0].label] if subjects[0].role == "finetuned" else None
    made = []
    for subject in subjects:
        for task, run in runs[subject.label].items():
            paired = probable = None
            near = found.get(subject.label, {}).get(task)
            if reference is not None and subject is not subjects[0]:
                paired = _paired(reference[task], run, settings, task=task)
                probable = _answers(reference[task], run, near if task in written else None, settings, task=task)
            made.append(
                ScoreRecord(
                    task=task,
                    subject=subject.label,
                    value=run.value,
                    stderr=run.stderr,
                    samples=len(run.rows),
                    paired=paired,
                    fidelity=_fidelity(near),
                    answers=probable,
                )
            )
    return tuple(made)


def _paired(reference: TaskRun, run: TaskRun, settings: Settings, *, task: str) -> PairedRecord | None:
    """A comparison; None if there are too few samples to bound anything."""
    rows = join(reference, run, task=task)
    before = np.array([one.value for one, _ in rows])
    after = np.array([one.value for _, one in rows])
    result = compare_paired(before, after, confidence=settings.confidence, seed=settings.seed)
    if math.isinf(result.upper):
        return None
    return PairedRecord(
        drop=result.drop,
        stderr=result.stderr,
        low=result.low,
        high=result.high,
        upper=result.upper,
        p_value=result.p_value,
        method="mcnemar" if result.method == "mcnemar" else "bootstrap",
        gained=result.gained,
        lost=result.lost,
        recovery=run.value / reference.value if reference.value else None,
        same_answers=sum(one.answer == other.answer for one, other in rows),
        noninferior=result.upper <= settings.margin,
    )


def _answers(
    reference: TaskRun, run: TaskRun, near: FidelityResult | None, settings: Settings, *, task: str
) -> AnswersRecord | None:
    """What became of the answers' probabilities; None if no choices were scored, and no one right answer written."""
    level, seed = settings.confidence, settings.seed
    rows = join(reference, run, task=task)
    if all(one.logprobs for one, _ in rows):
        before, after = ([row.logprobs for row in side] for side in zip(*rows, strict=True))
        found = choices_moved(before, after, confidence=level, seed=seed)
    elif near is not None:
        found = right_answers_lost(near.reference_answers, near.answers, confidence=level, seed=seed)
    else:
        found = None
    return None if found is None else AnswersRecord(lost=found.lost, upper=found.upper, right=found.right)


def _fidelity(one: FidelityResult | None) -> FidelityRecord | None:
    """A record; None if nothing was measured, or on too few samples to bound anything."""
    if one is None or math.isinf(one.kl_high):
        return None
    return FidelityRecord(
        tokens=one.tokens,
        kl=one.kl,
        kl_low=one.kl_low,
        kl_high=one.kl_high,
        top1=one.top1,
        perplexity_ratio=one.perplexity_ratio,
        loss=one.loss,
        reference_loss=one.reference_loss,
    )


def agreement(runs: Runs) -> tuple[Agreement, ...]:
    """How often any two subjects give the same answer."""
    made = []
    for first, second in combinations(runs, 2):
        for task in [task for task in runs[first] if task in runs[second]]:
            rows = join(runs[first][task], runs[second][task], task=task)
            same = sum(one.answer == other.answer for one, other in rows)
            made.append(Agreement(task=task, first=first, second=second, same=same, samples=len(rows)))
    return tuple(made)


def disagreements(runs: Runs, subjects: Sequence[Subject]) -> tuple[Disagreement, ...]:
    """Samples that a delta or adapter answers unlike the fine-tuned model: lost ones first, then won ones, the rest."""
    if subjects[0].role != "finetuned":
        return ()
    made = []
    for subject in subjects:
        if subject.role not in ("delta", "adapter"):
            continue
        for task, run in runs[subject.label].items():
            rows = join(runs[subjects[0].label][task], run, task=task)
            unlike = [(one, other) for one, other in rows if one.answer != other.answer]
            unlike.sort(key=lambda pair: pair[1].value - pair[0].value or 2)
            for one, other in unlike[:SHOWN]:
                made.append(
                    Disagreement(
                        task=task,
                        subject=subject.label,
                        doc_id=one.doc_id,
                        doc_hash=one.doc_hash,
                        prompt=_short(one.prompt),
                        target=_short(one.target),
                        reference_answer=_short(one.answer),
                        answer=_short(other.answer),
                        reference_right=one.value >= 1,
                        right=other.value >= 1,
                    )
                )
    return tuple(made)


def _short(text: str) -> str:
    """The end of a long text: what was asked stands there."""
    return text if len(text) <= _LONGEST else "… " + text[-_LONGEST:]


def write_samples(folder: Path, runs: Runs) -> None:
    """samples/<task>.<subject>.jsonl: a line per sample."""
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for label, tasks in runs.items():
            for task, run in tasks.items():
                lines = [
                    {
                        "doc_id": row.doc_id,
                        "doc_hash": row.doc_hash,
                        "prompt": row.prompt,
                        "target": row.target,
                        "answer": row.answer,
                        run.metric: row.value,
                        "logprobs": list(row.logprobs),
                    }
                    for row in run.rows
                ]
                path = folder / f"{task}.{as_file_name(label)}.jsonl"
                path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
