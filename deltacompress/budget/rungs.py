"""The rungs: ways to code the linears of one input, or an embedding, among which is chosen. One line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deltacompress.codecs.recipe import RULES, Recipe
from deltacompress.codecs.settings import Settings
from deltacompress.types import TensorKind


@dataclass(frozen=True, eq=False)
class Rung:
    """name: what tables call it. fields: of its rule in a recipe. drawn: whether a drawn pattern is among them.

    left: coded bytes with `fisher` over those without, as more codes are zero: of the linears of the pairs in
    registry/demo, by zstd (docs/algorithm.md).
    """

    name: str
    fields: Mapping[str, Any]
    drawn: bool = False
    left: float = 1.0

    def settings(self, **others: Any) -> Settings:
        """Its rule, checked as a recipe's are; others: fields that are set besides."""
        rule: Any = RULES[self.fields["codec"]]
        settings: Settings = rule.model_validate(dict(self.fields) | others)
        return settings

    def rule(self, kind: TensorKind, *, experts: bool = False) -> dict[str, Any]:
        """The fields of its rule for tensors of a kind: `fisher` besides, for linears that are solved.

        Measured without, as it takes a pass back through the model: it lessens what all rungs lose, but for drawn ones,
        which lose more with it (docs/quality.md). experts: they are linears of experts, which have no such information.
        """
        fisher = kind == "linear" and not experts and self.fields["codec"] == "obs" and not self.drawn
        return dict(self.fields) | ({"fisher": True} if fisher else {})


def _rung(name: str, *, drawn: bool = False, left: float = 1.0, **fields: Any) -> Rung:
    return Rung(name, MappingProxyType(fields), drawn, left)


_DAMPING = 0.3
"""Of all rungs in steps: they share one factor. At such steps more of it loses less (docs/quality.md)."""
_DRAWN_DAMPING = 3.0
"""Of signs, each of which misses its weight by several times what steps do."""


def _steps(name: str, bits: int, step: float, **others: Any) -> Rung:
    return _rung(name, codec="obs", bits=bits, grid="symmetric", step=step, damp_fraction=_DAMPING, **others)


def _drawn(kept: int, group: int) -> Rung:
    fields: dict[str, Any] = {
        "bits": 1,
        "grid": "midrise",
        "sparsity": f"drawn:{kept}:{group}",
        "damp_fraction": _DRAWN_DAMPING,
    }
    return _rung(f"signs, {kept} of {group} drawn", drawn=True, codec="obs", **fields)


CALIBRATED = (
    _drawn(1, 8),
    _drawn(3, 16),
    _drawn(1, 4),
    _drawn(5, 16),
    _drawn(3, 8),
    _drawn(1, 2),
    _steps("2 bits, steps of 6.3", 2, 6.3, asymmetric=0.5, left=0.894),
    _steps("2 bits, steps of 5.0", 2, 5.0, asymmetric=0.5, left=0.919),
    _steps("2 bits, steps of 4.0", 2, 4.0, asymmetric=0.5, left=0.95),
    _steps("2 bits, steps of 3.4", 2, 3.4, asymmetric=0.5, left=0.974),
    _steps("2 bits, steps of 2.8", 2, 2.8, left=0.992),
    _steps("2 bits, steps of 2.1", 2, 2.1),
    _steps("2 bits, steps of 1.9", 2, 1.9),
    _steps("3 bits, steps of 1.4", 3, 1.4),
    _steps("3 bits, steps of 0.9", 3, 0.9),
    _steps("4 bits, steps of 0.5", 4, 0.5),
    _steps("4 bits, steps of 0.4", 4, 0.4),
)
"""Of linears and the head, which have inputs. With steps so wide that most codes are zero, targets that make up for all
of the error before them are mostly made of what cannot be made up for. They leave all small weights out, the same of
all answers; signs of weights drawn by lot miss by more, but each by itself."""
COUNTED = tuple(
    _rung(f"{bits} bits, counted, steps of {step}", codec="counted", bits=bits, step=step)
    for bits, step in ((4, 4.2), (4, 3.4), (4, 2.7), (4, 2.1), (4, 1.6), (4, 1.2), (8, 0.8), (8, 0.5), (8, 0.25))
)
"""Of the embedding. Leaving its delta out is no rung: what is lost so, is lost of all tokens alike, and costs far more
than its squared error tells."""
ROUNDED = (
    _rung("2 bits, rounded", codec="rtn", bits=2),
    _rung("3 bits, rounded", codec="rtn", bits=3),
    _rung("4 bits, rounded", codec="rtn", bits=4),
    _rung("8 bits, rounded", codec="rtn", bits=8),
)
"""Of the embedding, too, as shipped recipes have it, and of linears that nothing can be solved for."""
OF_SHIPPED = (
    _rung("2 bits, 2:4", codec="obs", bits=2, sparsity="2:4"),
    _rung("4 bits, 2:4", codec="obs", bits=4, sparsity="2:4", gain="least"),
    _rung("2 bits", codec="obs", bits=2),
    _rung("4 bits", codec="obs", bits=4, gain="least"),
)
"""Of shipped recipes, and never the best: measured where those are to be compared, at the damping of all others."""
RUNGS = {rung.name: rung for rung in (*CALIBRATED, *COUNTED, *ROUNDED, *OF_SHIPPED)}
REFERENCE, ROUNDED_REFERENCE = RUNGS["2 bits, steps of 2.1"], RUNGS["2 bits, rounded"]
COUNTED_REFERENCE, COUNTED_WIDEST = RUNGS["4 bits, counted, steps of 2.1"], RUNGS["4 bits, counted, steps of 4.2"]
"""Those whose errors are put into the model, a group at a time, to see what they do to its answers."""
DRAWN = RUNGS["signs, 3 of 8 drawn"]
COARSE, WIDEST = RUNGS["2 bits, steps of 3.4"], RUNGS["2 bits, steps of 6.3"]
"""Whose errors are put into all groups at once, as the reference's are: KL grows faster than errors do. DRAWN's
are, too."""


def template() -> Recipe:
    """What is measured: every tensor that has rungs by its reference, all others exact."""
    coded = {"linear": REFERENCE, "head": REFERENCE, "embedding": COUNTED_REFERENCE}
    rules = [{"kind": kind, **rung.fields} for kind, rung in coded.items()]
    return Recipe.parse({"name": "budget", "rules": [*rules, {"codec": "exact"}]})
