"""A plan from one rank to another, as plain data: what becomes of each tensor.

Each rank opens the checkpoints itself, and looks at the files whenever it reads; the first rank reads all that the
others do. So a file that changes meanwhile is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltacompress.checkpoints.pairing import Pairing, TensorPair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import ExactSettings
from deltacompress.compression.planning import Plan, TensorPlan


def sent(plan: Plan) -> dict[str, list[Any]]:
    """What `received` makes the plan of again; but for what codecs fitted, which the first rank alone needs."""
    return {name: [one.kind, one.treatment, one.transposed, *_pair(one.pair)] for name, one in plan.tensors.items()}


def _pair(pair: TensorPair) -> tuple[Any, ...]:
    return pair.base_name, pair.status, pair.base_rows, pair.alias_of


def received(tensors: Mapping[str, Sequence[Any]], base: Checkpoint, finetuned: Checkpoint, recipe: Recipe) -> Plan:
    """The plan that was sent."""
    plans = {}
    for name, (kind, treatment, transposed, *pair) in tensors.items():
        settings = recipe.rule_for(name, kind) if treatment == "code" else ExactSettings()
        found = TensorPair(finetuned.tensors[name], *pair)
        plans[name] = TensorPlan(found, kind, treatment, settings, transposed=transposed)
    return Plan(Pairing(base, finetuned, tuple(one.pair for one in plans.values()), ()), recipe, plans)
