"""Thousands of random schedules, each plan held against the rules, each request against the bound.

`DELTACOMPRESS_SCHEDULES=1000000 pytest -n 2 tests/runtime/engine_policy/test_schedules.py` for as many.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from runtime.engine_policy.schedules import Schedule

from deltacompress.runtime.engine.policy.state import Skipping

PARTS = 4
SCHEDULES = int(os.environ.get("DELTACOMPRESS_SCHEDULES", "10000"))


def run(seed: int, skipping: Skipping) -> Counter[str]:
    schedule = Schedule(seed, skipping)
    try:
        schedule.run()
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}, second {schedule.now:.0f}: {error}") from error
    return schedule.seen


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_keeps_the_rules(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, PARTS):
        seen.update(run(seed, "preempt"))
    often = SCHEDULES / PARTS / 100
    for what in (
        *("preempted for a row", "preempted for a slot", "preempted, gave way, swap", "preempted, gave way, recompute"),
        *("preempted, grown, swap", "preempted, grown, recompute", "skipped", "blocked", "evicted", "hopeless"),
    ):
        assert seen[what] > often, what
    assert seen["aborted while swapped"] > often / 10


def test_where_skippers_are_let_end_nobody_gives_way() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000):
        seen.update(run(seed, "drain"))
    assert seen["skipped"] > 100
    assert not any(count for what, count in seen.items() if "gave way" in what)
