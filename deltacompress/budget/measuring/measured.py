"""What a walk finds: of each group what its rungs take and lose, and what errors do to the answers."""

from __future__ import annotations

from dataclasses import dataclass

from deltacompress.budget.measuring.ladder import Step
from deltacompress.budget.measuring.probes import Probe
from deltacompress.types import TensorKind


@dataclass(frozen=True)
class Measured:
    """A group of tensors that are coded alike, and what each rung takes and loses.

    probe: with it as the reference. widest: of an embedding, with it in its widest steps, by the rung's name. experts:
    they are linears of experts.
    """

    names: tuple[str, ...]
    kind: TensorKind
    steps: list[Step]
    reference: str
    probe: Probe
    widest: tuple[str, Probe] | None = None
    experts: bool = False

    @property
    def probes(self) -> list[Probe]:
        """All of its."""
        return [self.probe] if self.widest is None else [self.probe, self.widest[1]]


@dataclass(frozen=True)
class Walked:
    """Every group, and the model with all of them as one rung restores them, by its name.

    tokens: as HeldStreams.tokens, of groups and of the whole. delta_share: norm of the linears' deltas over that of
    their fine-tuned weights.
    """

    groups: list[Measured]
    whole: dict[str, Probe]
    tokens: tuple[tuple[int, int], tuple[int, int]]
    delta_share: float
