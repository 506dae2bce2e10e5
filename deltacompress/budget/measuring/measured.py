"""What a walk holds, and what it finds: what rungs of groups take and lose, and what errors do to the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deltacompress.budget.measuring.ladder import Step
from deltacompress.budget.measuring.probes import HeldStreams, Probe
from deltacompress.budget.rungs import Rung
from deltacompress.calibration.forwards.memory import Room
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.compression.planning import Plan
from deltacompress.lossless import Coder
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import Reporter
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

    tokens: as HeldStreams.tokens. delta_share: norm of the linears' deltas over that of their fine-tuned weights.
    """

    groups: list[Measured]
    whole: dict[str, Probe]
    tokens: tuple[int, int]
    delta_share: float


@dataclass(frozen=True)
class Walk:
    """What all layers share. held: what probes run on.

    whole: the model with all groups so far as one rung restores them, by its name.
    """

    plan: Plan
    skeleton: Skeleton
    coder: Coder
    reporter: Reporter
    held: HeldStreams
    precision: Precision
    room: Room
    stream: HiddenStates
    calls: dict[int, list[LayerCall]]
    rungs: Sequence[Rung]
    whole: dict[str, Probe]
    found: list[Measured] = field(default_factory=list)
    norms: list[float] = field(default_factory=lambda: [0.0, 0.0])
