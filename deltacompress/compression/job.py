"""What a compression is asked to do, as one value that can be kept, compared and sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, SkipValidation

from deltacompress.codecs.recipe import CalibrationSpec, Recipe


class CompressionJob(BaseModel):
    """Every choice of a compression; `compress` says what each means. `model_dump_json` and `model_validate_json`.

    base, finetuned: directories or ids of the hub. calibration: a file or data set id, or the records themselves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    finetuned: str
    recipe: Recipe
    out: Path
    calibration: str | tuple[Annotated[Any, SkipValidation], ...] | None = None
    samples: int | None = None
    seq_len: int | None = None
    seed: int | None = None
    lossless: str = "zstd"
    device: str = "auto"
    resume: bool = False
    force: bool = False

    @property
    def calibration_spec(self) -> CalibrationSpec:
        """How much calibration data: the recipe's wish, and what overrides it."""
        return self.recipe.calibration.overridden(samples=self.samples, seq_len=self.seq_len, seed=self.seed)
