"""What an evaluation is asked to do, as one value that can be kept, compared and sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deltacompress.arguments import Amount, Count, Share, Whole


class EvaluationJob(BaseModel):
    """Every choice of an evaluation; `evaluate` says what each means. `model_dump_json` and `model_validate_json`.

    artifacts, others: label -> directory; stored_as: label of one of `others` -> what it was restored from.
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
