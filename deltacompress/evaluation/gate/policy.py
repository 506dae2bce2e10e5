"""What a gate can ask: the keys of a policy, checked when it is read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""No measured value can be held against nan, and against inf none fails."""
Positive = Annotated[Finite, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DropLimit(_Strict):
    """max: largest drop against the fine-tuned model, in units of the metric (0.01 = one point of accuracy).

    bound: what is held against it. "probability": the upper confidence bound of the probability that the answers lost,
    which few samples bound, and the score fails only if it is shown to have dropped by more; tasks whose answers have
    no probabilities as "upper". "upper": the upper confidence bound of the score's drop. "point": that drop itself.
    tasks: other limits for some tasks, which must be in the report.
    """

    max: Finite
    bound: Literal["probability", "upper", "point"] = "upper"
    tasks: dict[str, Finite] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _a_share(self) -> DropLimit:
        if self.bound == "probability" and not all(0 < one < 1 for one in (self.max, *self.tasks.values())):
            raise ValueError("a drop of probability is a share between 0 and 1: three points are 0.03")
        return self


class KlLimit(_Strict):
    """max: largest KL(fine-tuned || compressed) in nats per answer token, its upper confidence bound held against it.

    choose: the limit of multiple-choice tasks, whose answers are short and end in a token that no model misses. tasks:
    other limits for some tasks, which must be in the report.
    """

    max: Positive
    choose: Positive | None = None
    tasks: dict[str, Positive] = Field(default_factory=dict)


class Policy(_Strict):
    """What a gate asks; what is left out is not asked.

    require_tasks: must be in the report. min_samples: of every task. min_ratio: bytes of the fine-tuned checkpoint /
    bytes of the artifact. min_top1: share of tokens on which both models agree. min_recovery: score / fine-tuned score.
    min_score: by task, which must be in the report. allow_overlap: whether samples may have been seen in calibration.
    """

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    require_tasks: tuple[str, ...] = ()
    min_samples: Annotated[int, Field(ge=1)] = 1
    drop: DropLimit | None = None
    kl: KlLimit | None = None
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = None
    min_recovery: Positive | None = None
    min_score: dict[str, Finite] = Field(default_factory=dict)
    min_ratio: Positive | None = None
    allow_overlap: bool = False
