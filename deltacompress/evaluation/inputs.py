"""Everything that a report depends on, as plain data: what an evaluation must share with another one to be the same.

Weights count by their content, tasks by their samples, settings by their values; where things lie, and how long they
took, does not.
"""

from __future__ import annotations

from typing import Any

from deltacompress.adapters.directory import own_files
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.evaluation.prepare import Prepared
from deltacompress.evaluation.subjects import Subject
from deltacompress.evaluation.tasks.load import LocalTask, Task
from deltacompress.evaluation.tasks.records import data_hash
from deltacompress.files.hashing import hash_file


def inputs_of(prepared: Prepared) -> dict[str, Any]:
    """The input of an evaluation; its keys are what a user is told if one of them is another one."""
    job, gate = prepared.job, prepared.gate
    settings = ("device", "dtype", "batch_size", "limit", "seed", "confidence", "margin", "backend")
    return {
        "base": _model(prepared.base),
        "models": [_subject(one) for one in prepared.subjects],
        "tasks": [_task(one) for one in prepared.tasks],
        "comparison with calibration data": [one.model_dump(mode="json") for one in prepared.overlaps],
        "policy": None if gate is None else gate.policy.model_dump(mode="json"),
        **{name: getattr(job, name) for name in settings},
        "versions": dict(prepared.tools),
    }


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Weights, and the files beside them that decide on tokens and on where an answer ends."""
    return {"weights": checkpoint.fingerprint(), "files": checkpoint.side_file_hashes()}


def _subject(one: Subject) -> dict[str, Any]:
    if one.adapter is not None:  # its own tokenizer is not part of what names it
        files = {path.name: hash_file(path)[0] for path in own_files(one.path)}
        return {"label": one.label, "role": one.role, "model": {"adapter": one.identity, "files": files}}
    what = None if one.stored_as is None else one.stored_as.manifest.digest
    model = one.identity if one.checkpoint is None else _model(one.checkpoint)
    return {"label": one.label, "role": one.role, "model": model, "stored as": what}


def _task(task: Task) -> dict[str, Any]:
    told: dict[str, Any] = {"spec": task.spec.model_dump(mode="json")}
    if isinstance(task, LocalTask):
        told |= {"samples": data_hash(task.samples), "examples": data_hash(task.examples)}
    return told
