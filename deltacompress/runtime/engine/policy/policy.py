"""One decision: from what waits, runs and is resident to a plan. A pure function; docs/runtime.md has the rules.

Its cost grows with the requests that run, the residents and those that start, not with those that wait.
"""

from __future__ import annotations

from deltacompress.runtime.engine.policy.rows import admit, shrink
from deltacompress.runtime.engine.policy.slots import bring
from deltacompress.runtime.engine.policy.state import Plan, State
from deltacompress.runtime.engine.policy.working import Working


def decide(state: State) -> Plan:
    """What to do before the coming step."""
    working = Working(state)
    shrink(working)
    blocked = bring(working)
    admitted = admit(working, blocked)
    evicted = tuple(one.variant for one in state.residents if one.variant in working.evicted)
    hopeless, outgrown = tuple(working.hopeless), tuple(working.outgrown)
    return Plan(tuple(working.preempted), evicted, tuple(working.brought), admitted, hopeless, outgrown, blocked)
