"""What an evaluation is asked to do, as one value that can be kept, compared and sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deltacompress.arguments import Amount, Count, Share, Whole


class EvaluationJob(BaseModel):
    """Every choice of an evaluation; `model_dump_json` writes it down, `model_validate_json` reads it.

    artifacts: label -> directory of an artifact, or of a PEFT adapter for the base.
    base: checkpoint directory of their base. over: label of an adapter -> directory of the delta of the fine-tuned
        model that it was trained on.
    tasks: names; see tasks.load_tasks. task_dir, few_shot, limit: as there.
    out: directory of the report; OUT/samples/ gets what each model answered, a JSON line per sample.
    finetuned: the reference of all comparisons; the model that the artifacts were made from.
    others: label -> other checkpoints, run as plain transformers models. stored_as: label of one of them -> the
        artifact that it was restored from, or the baseline that it is: its size is reported. with_base: also measure
        the base.
    seed: of few-shot examples and bootstraps. batch_size: most rows of a forward.
    device, dtype, backend: as Runtime.from_base.
    calibration: the file that the artifacts were calibrated on, to compare its texts with the samples.
    allow_overlap: evaluate even if samples were seen in calibration; it is recorded.
    policy: the gate whose verdict the report begins with; None for none.
    margin: of non-inferiority, in units of the metric. confidence: of every interval.
    force: measure anew what `out` holds already, and replace it once that is done; without it a finished report of the
        same input is read and returned.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    artifacts: Mapping[str, Path]
    base: Path
    tasks: tuple[str, ...]
    out: Path
    finetuned: Path | None = None
    others: Mapping[str, Path] = {}
    stored_as: Mapping[str, Path] = {}
    with_base: bool = False
    over: Mapping[str, Path] = {}
    task_dir: Path | None = None
    few_shot: Whole | None = None
    limit: Count | None = None
    seed: Whole = 0
    batch_size: Count = 64
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "auto"
    calibration: Path | None = None
    allow_overlap: bool = False
    policy: str | Path | None = "default"
    margin: Amount = 0.02
    confidence: Share = 0.95
    force: bool = False
