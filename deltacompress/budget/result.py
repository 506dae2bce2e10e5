"""What was asked, predicted and reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltacompress.budget.measuring.judge import Judged
from deltacompress.budget.request import Request
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.job import CompressResult


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one choice. bytes: of the whole artifact; kl: in nats/token."""

    bytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """A compression that was asked by size or quality.

    recipe: what was chosen, usable by itself. first: the prediction before anything was compressed; predicted: of the
    recipe, as known before its own compression. attempts: compressions that were made. Seconds, wall: of the measuring;
    of the trial and its judging (0: there was none); of everything. A run that is resumed has its own.
    """

    request: Request
    recipe: Recipe
    first: Prediction
    predicted: Prediction
    judged: Judged
    compressed: CompressResult
    attempts: int
    survey_seconds: float
    trial_seconds: float
    total_seconds: float

    @property
    def bytes(self) -> int:
        """Of the artifact."""
        return int(self.compressed.summary["artifact_bytes"])

    def rows(self) -> list[dict[str, Any]]:
        """A line each for what was asked, predicted (of the recipe that was chosen at last, too) and reached."""
        finetuned = self.compressed.summary["finetuned_bytes"]
        size = self.request.bytes(finetuned)

        def row(what: str, nbytes: int | None, kl: float | None) -> dict[str, Any]:
            ratio = None if nbytes is None else finetuned / nbytes
            return {"budget": what, "bytes": nbytes, "ratio": ratio, "kl": kl}

        again = [] if self.predicted == self.first else [self.predicted]
        return [
            row("asked", size, self.request.kl),
            row("predicted", self.first.bytes, self.first.kl),
            *(row("predicted again", one.bytes, one.kl) for one in again),
            row("reached", self.bytes, self.judged.kl),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `compress --json` prints it: that of the compression, and what is above."""
        more = {
            "budget": self.rows(),
            "kl_standard_error": self.judged.error,
            "kl_upper_bound": self.judged.bound,
            "judged_tokens": self.judged.tokens,
            "predicted_before_last": self.predicted.kl,
            "compressions": self.attempts,
            "survey_seconds": self.survey_seconds,
            "trial_seconds": self.trial_seconds,
            "total_seconds": self.total_seconds,
        }
        return self.compressed.to_json() | more
