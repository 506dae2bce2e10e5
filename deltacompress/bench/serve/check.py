"""The simulator against a run: over times that were measured in the same process, it serves the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from deltacompress.bench.serve.calls import Asked
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.records import Step
from deltacompress.bench.simulate.run import Slo, figures
from deltacompress.bench.simulate.times import Times
from deltacompress.bench.simulate.world import Setting, World
from deltacompress.errors import InputError
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.policy.state import Rules

FEWEST = 50
PARTS = ("rows", "variants", "prompt_tokens", "started", "loads", "held")
"""Of a step, what it takes longer for."""
_LEAST_MS = 1e-6
_NEVER_GB_S = 1e-9
"""The engine copies no keys and values to the host: a request that gave way is computed again."""


def measured_times(models: Models, limits: EngineLimits, steps: Sequence[Step], load_ms: float, where: str) -> Times:
    """From the steps of a run and its loads. where: the option that asks for them.

    Raises:
        InputError: there are too few steps to tell.
    """
    base, row, variant, token, start, hold, held = fitted(steps, where)
    return Times(
        base_ms=max(base, _LEAST_MS),
        row_ms=row,
        first_variant_ms=0.0,
        variant_ms=variant,
        prefill_tokens_s=1e3 / max(token, _LEAST_MS),
        load_ms=load_ms,
        swap_gb_s=_NEVER_GB_S,
        kv_token_bytes=models.kv_token_bytes,
        kv_tokens=limits.max_batch * (models.shape.context + 2),
        start_ms=start,
        hold_ms=hold,
        attend_ms=held * 1e3,
    )


def fitted(steps: Sequence[Step], where: str) -> tuple[float, ...]:
    """Milliseconds of any step, and of one more of each of PARTS in it; none below 0, with the least squares of errors.

    Raises:
        InputError: there are fewer than FEWEST steps.
    """
    if len(steps) < FEWEST:
        raise InputError(
            f"{len(steps)} steps: too few to simulate with",
            where=where,
            way_out=f"ask for more seconds, so that there are {FEWEST}",
        )
    known = torch.tensor([[1, *(getattr(one, name) for name in PARTS)] for one in steps], dtype=torch.float64)
    took = torch.tensor([[one.ms] for one in steps], dtype=torch.float64)
    best, least = [0.0] * (len(PARTS) + 1), float("inf")
    columns = range(len(PARTS) + 1)
    for parts in (list(some) for count in columns for some in combinations(columns, count + 1)):
        found = torch.linalg.lstsq(known[:, parts], took, driver="gelsd").solution
        error = float((known[:, parts] @ found - took).square().sum())
        if bool((found >= 0).all()) and error < least:  # the minimum among those that are not negative is one of these
            whole = dict(zip(parts, found[:, 0].tolist(), strict=True))
            best, least = [whole.get(part, 0.0) for part in columns], error
    return tuple(best)


def simulated(asked: Sequence[Asked], models: Models, limits: EngineLimits, times: Times, slo: Slo) -> dict[str, Any]:
    """Figures of the same requests under the engine's own rules, as `bench simulate` tells them."""
    rules = Rules()
    setting = Setting(times, limits.max_batch, models.slots, limits.step_tokens, 0, rules.grace)
    world = World(setting, [(one.arrival, str(one.variant)) for one in asked], rules, "lru")
    world.run()
    return figures(list(world.courses.values()), slo)
