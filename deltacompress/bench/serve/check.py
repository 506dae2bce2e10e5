"""The simulator against a run: over times that were measured in the same process, it serves the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltacompress.bench import figures
from deltacompress.bench.decode import timed_steps
from deltacompress.bench.serve.calls import Asked
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.steady import Steadiness, first_tokens
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.simulate.run import figures as seen
from deltacompress.bench.simulate.times import Times
from deltacompress.bench.simulate.world import Setting, World
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.policy.state import Rules

_NEVER_GB_S = 1e-9
"""The engine copies no keys and values to the host: a request that gave way is computed again."""


def measured_times(models: Models, limits: EngineLimits, load_ms: float, *, steps: int, prompt_tokens: int) -> Times:
    """Of steps with one and with many rows, of the base and of variants; of prompts of so many tokens.

    load_ms: of a variant, in the run. Where noise makes a part of a step negative, it is taken as 0.
    """
    count = min(models.slots, limits.max_batch)

    def step(names: Sequence[str | None]) -> float:
        return figures.median(timed_steps(models.runtime, models.shape, names, steps)[1])

    one, many = step([None]), step([None] * limits.max_batch)
    row = max(0.0, (many - one) / max(1, limits.max_batch - 1))
    first, all_of_them = step(models.names[:1]), step(models.names[:count])
    variant = max(0.0, (all_of_them - first) / (count - 1) - row) if count > 1 else max(0.0, first - one)
    miss_s, _ = first_tokens(models, models.names[0], Steadiness(known_tokens=prompt_tokens, times=3), limits)
    return Times(
        base_ms=max(1e-6, one - row),
        row_ms=row,
        first_variant_ms=max(0.0, first - one - variant),
        variant_ms=variant,
        prefill_tokens_s=prompt_tokens / miss_s,
        load_ms=load_ms,
        swap_gb_s=_NEVER_GB_S,
        kv_token_bytes=1,
        kv_tokens=limits.max_batch * (models.shape.context + 1) + limits.max_batch,
    )


def simulated(asked: Sequence[Asked], models: Models, limits: EngineLimits, times: Times, slo: Slo) -> dict[str, Any]:
    """Figures of the same requests under the engine's own rules, as `bench simulate` tells them."""
    rules = Rules()
    setting = Setting(times, limits.max_batch, models.slots, limits.step_tokens, 0, rules.grace)
    world = World(setting, [(one.arrival, str(one.variant)) for one in asked], rules, "lru")
    world.run()
    return seen(list(world.courses.values()), slo)
