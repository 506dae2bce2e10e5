"""The rules of the policy, each checked on one plan by looking at everything: slow, plain, apart from its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deltacompress.runtime.engine.policy.state import Plan, Resident, Rules, State
from deltacompress.runtime.engine.policy.ticket import Ticket


def check_plan(state: State, line: Sequence[Ticket], running: Sequence[Ticket], plan: Plan) -> None:
    """line, running: before the plan; of the state only what a plan does not change."""
    lost = [one.ticket for one in plan.preempt]
    stay = [one for one in running if one not in lost]
    here = {one.variant: one for one in state.residents}
    _check_slots(state, here, line, stay, plan)
    _check_starts(state, here, line, stay, plan)
    _check_nobody_idles(state, here, line, stay, lost, plan)
    _check_preemptions(state, here, line, running, plan)
    _check_blocked(state, here, line, running, plan)
    _check_hopeless(state, here, line, plan)


def met(plan: Plan) -> Counter[str]:
    """What a plan has of everything, to be counted."""
    if not (plan.preempt or plan.evict or plan.bring or plan.admit or plan.blocked or plan.hopeless):
        return Counter()
    found = Counter(f"preempted, {'grown' if one.by is None else 'gave way'}, {one.how}" for one in plan.preempt)
    found["preempted for a row"] = sum(one.by in plan.admit for one in plan.preempt)
    found["preempted for a slot"] = sum(one.by is not None and one.by.variant in plan.bring for one in plan.preempt)
    found["blocked"] = plan.blocked is not None
    found["skipped"] = sum(
        plan.blocked is not None and one.place > plan.blocked.place and one.variant is not None for one in plan.admit
    )
    found["hopeless"], found["evicted"], found["brought"] = len(plan.hopeless), len(plan.evict), len(plan.bring)
    return found


def ending(ticket: Ticket, rules: Rules) -> bool:
    if ticket.pending > 0:
        return False
    if ticket.generated < ticket.expected:
        return ticket.expected - ticket.generated <= rules.grace
    return ticket.max_tokens - ticket.generated <= rules.grace


def parent(tickets: Sequence[Ticket], variant: str | None, than: Ticket) -> bool:
    """Whether one of this variant is among them that stands before another."""
    return any(one.variant == variant and one.place < than.place for one in tickets)


def _check_slots(
    state: State, here: dict[str, Resident], line: Sequence[Ticket], stay: Sequence[Ticket], plan: Plan
) -> None:
    after = [one for one in state.residents if one.variant not in plan.evict]
    assert len(after) + len(plan.bring) <= state.limits.slots
    size = sum(one.nbytes for one in after) + sum(state.nbytes[name] for name in plan.bring)
    assert state.limits.nbytes is None or size <= state.limits.nbytes
    for name in plan.evict:
        assert here[name].ready
        assert not here[name].pinned
        assert not any(one.variant == name for one in [*stay, *plan.admit])
        firsts = [min(one.place for one in line if one.variant == brought) for brought in plan.bring]
        assert all(one.place > min(firsts) for one in line if one.variant == name), "evicted though waited for before"
    assert not set(plan.bring) & set(here)
    if plan.bring:
        assert sum(not one.ready for one in after) + len(plan.bring) <= state.limits.loads
    wanted = list(dict.fromkeys(one.variant for one in line if one.variant is not None and one.variant not in here))
    failed = {one.variant for one in plan.hopeless}
    assert list(plan.bring) == [name for name in wanted if name not in failed][: len(plan.bring)], "not by the line"


def _check_starts(
    state: State, here: dict[str, Resident], line: Sequence[Ticket], stay: Sequence[Ticket], plan: Plan
) -> None:
    now = [*stay, *plan.admit]
    assert len({one.id for one in now}) == len(now) <= state.limits.rows
    if state.limits.kv is not None and plan.admit and len(now) > 1:
        assert sum(one.kv for one in now) + state.limits.headroom <= state.limits.kv
    places = [one.place for one in plan.admit]
    assert places == sorted(places)
    for one in plan.admit:
        assert one in line
        assert one.variant is None or (here[one.variant].ready and one.variant not in plan.evict)
        if plan.blocked is not None and one.place > plan.blocked.place:
            assert _may_skip(here, now, one, plan.blocked), "a skipper without a parent"


def _may_skip(here: dict[str, Resident], now: Sequence[Ticket], one: Ticket, blocked: Ticket | None) -> bool:
    assert blocked is not None
    return one.variant is None or here[one.variant].pinned or parent(now, one.variant, blocked)


def _check_nobody_idles(
    state: State,
    here: dict[str, Resident],
    line: Sequence[Ticket],
    stay: Sequence[Ticket],
    lost: Sequence[Ticket],
    plan: Plan,
) -> None:
    """The first that could start but did not: nobody behind it started, and rows or KV are wanting."""
    now = [*stay, *plan.admit]
    for one in line:
        if one in plan.admit or one in plan.hopeless:
            continue
        ready = one.variant is None or (one.variant in here and here[one.variant].ready)
        if not ready or one.variant in plan.evict:
            continue
        behind = plan.blocked is not None and one.place > plan.blocked.place
        if behind and not _may_skip(here, now, one, plan.blocked):
            continue
        assert all(other.place < one.place for other in plan.admit), "passed over, though it could start"
        full = len(now) >= state.limits.rows
        if state.limits.kv is not None and now:
            full = full or sum(other.kv for other in now) + one.kv + state.limits.headroom > state.limits.kv
        assert full or any(other.place < one.place for other in lost), "a row stands empty"
        return


def _check_preemptions(
    state: State, here: dict[str, Resident], line: Sequence[Ticket], running: Sequence[Ticket], plan: Plan
) -> None:
    grown = [one.ticket for one in plan.preempt if one.by is None]
    if grown:
        assert state.limits.kv is not None
        last = sorted(running, key=lambda one: one.place)[-len(grown) :]
        assert set(grown) == set(last), "not the last in line"
        kept = sum(one.kv for one in running if one not in grown)
        assert kept + min(grown, key=lambda one: one.place).kv > state.limits.kv, "more than need be"
        assert kept <= state.limits.kv or len(running) == len(grown) + 1
    elif state.limits.kv is not None:
        assert sum(one.kv for one in running) <= state.limits.kv or len(running) == 1
    for one in plan.preempt:
        cheap = 2 * state.costs.swap_s < state.costs.recompute_s
        assert one.how == "recompute" or cheap
        assert one.how == "swap" or not cheap or state.host_kv is not None, "computed again, though to swap is cheaper"
        if one.by is None:
            continue
        left = [other for other in running if other not in grown]
        assert one.by in line, "nobody waits"
        assert one.by.place < one.ticket.place, "for a younger one"
        assert not ending(one.ticket, state.rules), "about to end"
        assert not parent(left, one.ticket.variant, one.by), "its parent runs"
        got_row = one.by in plan.admit
        got_slot = one.by.variant in plan.bring and one.ticket.variant in plan.evict
        waits = one.by is plan.blocked and any(
            other.variant is not None and other.variant in here and ending(other, state.rules) for other in left
        )
        assert got_row or got_slot or waits, "for nothing"


def _check_blocked(
    state: State, here: dict[str, Resident], line: Sequence[Ticket], running: Sequence[Ticket], plan: Plan
) -> None:
    """Whoever is blocked could not have had room: what may leave at once is too little."""
    blocked = plan.blocked
    if blocked is None:
        return
    assert blocked in line
    assert blocked.variant not in here
    drain = state.rules.skipping == "drain"
    kept = [
        one
        for one in state.residents
        if one.variant not in plan.evict
        and (
            one.pinned
            or not one.ready
            or any(
                other.variant == one.variant and (drain or other.place < blocked.place or ending(other, state.rules))
                for other in running
            )
            or any(other.variant == one.variant and other.place < blocked.place for other in line)
        )
    ]
    assert blocked.variant is not None
    size = state.nbytes[blocked.variant] + sum(one.nbytes for one in kept)
    size += sum(state.nbytes[name] for name in plan.bring)
    fits = len(kept) + len(plan.bring) < state.limits.slots
    fits = fits and (state.limits.nbytes is None or size <= state.limits.nbytes)
    if fits:  # then the cheapest way includes one that is about to end
        assert any(ending(other, state.rules) for other in running), "blocked for nothing"


def _check_hopeless(state: State, here: dict[str, Resident], line: Sequence[Ticket], plan: Plan) -> None:
    pinned = [one for one in state.residents if one.pinned]
    for one in plan.hopeless:
        assert one in line
        assert one.variant is not None
        size = sum(other.nbytes for other in pinned) + state.nbytes[one.variant]
        too_large = state.limits.nbytes is not None and size > state.limits.nbytes
        assert one.variant not in here
        assert too_large or len(pinned) >= state.limits.slots
