"""The simulator against a run: over times that were measured in the same process, it serves the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deltacompress.bench.serve.calls import Asked
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.records import Step
from deltacompress.bench.serve.steady import Steadiness, first_tokens
from deltacompress.bench.simulate.run import Slo, figures
from deltacompress.bench.simulate.times import Times
from deltacompress.bench.simulate.world import Setting, World
from deltacompress.errors import InputError, switch
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.policy.state import Rules

FEWEST = 50
_NEVER_GB_S = 1e-9
"""The engine copies no keys and values to the host: a request that gave way is computed again."""


def measured_times(
    models: Models, limits: EngineLimits, steps: Sequence[Step], load_ms: float, *, prompt_tokens: int
) -> Times:
    """From the steps of a run, its loads, and prompts of so many tokens by themselves, computed after it.

    Raises:
        InputError: there are too few steps to tell.
    """
    base, row, variant = fitted(steps)
    miss_s, _ = first_tokens(models, models.names[0], Steadiness(known_tokens=prompt_tokens, times=3), limits)
    return Times(
        base_ms=base,
        row_ms=row,
        first_variant_ms=0.0,
        variant_ms=variant,
        prefill_tokens_s=prompt_tokens / miss_s,
        load_ms=load_ms,
        swap_gb_s=_NEVER_GB_S,
        kv_token_bytes=1,
        kv_tokens=limits.max_batch * (models.shape.context + 2),
    )


def fitted(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Milliseconds (of any step, of a row more, of a variant more), none below 0, with the least squares of errors.

    Raises:
        InputError: there are fewer than FEWEST steps.
    """
    if len(steps) < FEWEST:
        raise InputError(
            f"{len(steps)} steps did nothing but decode: too few to simulate with",
            where=switch("simulate_check"),
            way_out=f"ask for more seconds, so that there are {FEWEST}",
        )
    known = torch.tensor([[1.0, one.rows, one.variants] for one in steps], dtype=torch.float64)
    took = torch.tensor([[one.ms] for one in steps], dtype=torch.float64)
    best, least = (0.0, 0.0, 0.0), float("inf")
    for parts in ([0, 1, 2], [0, 1], [0, 2], [0]):  # the minimum among those that are not negative is one of these
        found = torch.linalg.lstsq(known[:, parts], took, driver="gelsd").solution
        error = float((known[:, parts] @ found - took).square().sum())
        if bool((found >= 0).all()) and error < least:
            whole = dict(zip(parts, found[:, 0].tolist(), strict=True))
            best, least = (whole.get(0, 0.0), whole.get(1, 0.0), whole.get(2, 0.0)), error
    return best


def simulated(asked: Sequence[Asked], models: Models, limits: EngineLimits, times: Times, slo: Slo) -> dict[str, Any]:
    """Figures of the same requests under the engine's own rules, as `bench simulate` tells them."""
    rules = Rules()
    setting = Setting(times, limits.max_batch, models.slots, limits.step_tokens, 0, rules.grace)
    world = World(setting, [(one.arrival, str(one.variant)) for one in asked], rules, "lru")
    world.run()
    return figures(list(world.courses.values()), slo)
