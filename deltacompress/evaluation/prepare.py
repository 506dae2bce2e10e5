"""Before any model answers: tasks read, subjects opened and held against each other, everything refused that can be."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from deltacompress._version import __version__
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.devices import resolve_device
from deltacompress.errors import InputError, option
from deltacompress.evaluation.gate.rules import Gate, reference_of
from deltacompress.evaluation.job import EvaluationJob
from deltacompress.evaluation.report.records import OverlapRecord
from deltacompress.evaluation.scoring.lm_eval_version import require_lm_eval
from deltacompress.evaluation.subjects import Subject, open_subjects
from deltacompress.evaluation.tasks import overlap
from deltacompress.evaluation.tasks.encoding import Encoder
from deltacompress.evaluation.tasks.load import Task, load_tasks
from deltacompress.models.config import notes, other_way_out
from deltacompress.models.load import WAY_OUT
from deltacompress.reporter import Reporter
from deltacompress.runtime.variants.layout import read_layout
from deltacompress.runtime.variants.precision import resolve_dtype


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose input is there and fits together.

    job: with the device and dtype that it comes to here. gate: None where it can give no verdict. tools: versions.
    """

    job: EvaluationJob
    gate: Gate | None
    tasks: list[Task]
    base: Checkpoint
    subjects: list[Subject]
    encoder: Encoder
    overlaps: tuple[OverlapRecord, ...]
    tools: dict[str, str]


def prepare(job: EvaluationJob, reporter: Reporter) -> Prepared:
    """Open and check everything that a job names; raises as run.run_job."""
    lm_eval_version = require_lm_eval()
    device = resolve_device(job.device)
    kind = resolve_dtype(job.dtype, device)
    job = job.model_copy(update={"device": str(device), "dtype": str(kind).removeprefix("torch.")})
    gate = None if job.policy is None else Gate.load(job.policy)
    tasks = load_tasks(list(job.tasks), task_dir=job.task_dir, few_shot=job.few_shot, limit=job.limit)
    base, subjects, encoder = open_subjects(
        dict(job.artifacts),
        base=job.base,
        finetuned=job.finetuned,
        others=dict(job.others),
        stored_as=dict(job.stored_as),
        with_base=job.with_base,
        over=dict(job.over),
    )
    with other_way_out(WAY_OUT):
        for subject in subjects:
            for note in () if subject.checkpoint is None else notes(subject.checkpoint.config, subject.checkpoint.path):
                reporter.note(note)
    if any(one.delta or one.adapter for one in subjects):
        read_layout(base.path, base.tensors)  # what cannot be served cannot be measured: told before anything answers
    if subjects[0].role == "finetuned":
        for one in subjects:
            if one.adapter is not None:
                reporter.note(f"{one.label}: an adapter names no fine-tuned model, so {subjects[0].path} is believed")
    overlaps = _overlaps(tasks, subjects, job.calibration, encoder, job.allow_overlap)
    if gate is not None and (why := _no_verdict(gate, subjects)):
        reporter.note(f"gate {gate.policy.name} gives no verdict: {why}")
        gate = None
    if gate is not None:
        gate.check_tasks([task.name for task in tasks])
    return Prepared(job, gate, tasks, base, subjects, encoder, overlaps, _tools(lm_eval_version))


def _no_verdict(gate: Gate, subjects: Sequence[Subject]) -> str | None:
    """Why a gate cannot judge these subjects, if it cannot."""
    roles = {one.role for one in subjects}
    if not roles & {"delta", "adapter"}:
        return "no artifact is evaluated"
    if gate.compares and subjects[0].role != "finetuned":
        return f"it compares with the fine-tuned model; {reference_of(roles)}"
    return None


def _overlaps(
    tasks: Sequence[Task], subjects: Sequence[Subject], given: Path | None, encoder: Encoder, force: bool
) -> tuple[OverlapRecord, ...]:
    records = []
    for subject in subjects:
        stored = subject.delta or subject.over
        if stored is None:
            continue
        checked = [(task.name, overlap.check(task, stored.manifest.calibration, given, encoder)) for task in tasks]
        overlap.refuse(checked, force=force)
        for task, one in checked:
            records.append(
                OverlapRecord(
                    task=task,
                    subject=subject.label,
                    verdict=one.verdict,
                    overlapping=one.overlapping,
                    told=one.told,
                    forced=one.verdict == "overlaps",
                )
            )
    if given is not None and not records:
        raise InputError(
            "no artifact is evaluated that could have been calibrated on it", where=f"{option('calibration')} {given}"
        )
    return tuple(records)


def _tools(lm_eval_version: str) -> dict[str, str]:
    return {
        "deltacompress": __version__,
        "lm-eval": lm_eval_version,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
