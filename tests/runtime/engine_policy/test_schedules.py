"""Thousands of random schedules, each plan held against the rules, each request against the bound.

`DELTACOMPRESS_SCHEDULES=1000000 pytest tests/runtime/engine_policy/test_schedules.py` for as many.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from runtime.engine_policy.schedules import Schedule

PARTS = 4
SCHEDULES = int(os.environ.get("DELTACOMPRESS_SCHEDULES", "20000"))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_keeps_the_rules(part: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, PARTS):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}, second {schedule.now:.0f}: {error}") from error
        longest = max(met["longest wait"], schedule.seen["longest wait"])
        met.update(schedule.seen)
        met["longest wait"] = longest
    print(sorted(met.items()))
    assert met["preempted for a row"] > SCHEDULES // 200
