"""Who gets a row: in the order of the line, all whose variant is ready; others are skipped past, on one condition.

While the first of those without a slot lacks room, a younger request may start only on a variant that could not leave
anyway: the base, a pinned one, or one that runs a request which stands before the waiting one (a parent).
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from deltacompress.runtime.engine.policy.ticket import NEVER, Place, Ticket
from deltacompress.runtime.engine.policy.working import Working


def shrink(working: Working) -> None:
    """Preempt from the end of the line while those that run have outgrown the KV; one always stays."""
    most = working.state.limits.kv
    if most is None or working.kv <= most:
        return
    running = [one for group in working.by_variant.values() for one in group]
    for ticket in sorted(running, key=lambda one: one.place, reverse=True)[:-1]:
        if working.kv <= most:
            return
        working.preempt(ticket, by=None)


def admit(working: Working, blocked: Ticket | None) -> tuple[Ticket, ...]:
    """Settle who starts. blocked: the first request in line that has no slot and gets none."""
    state, line = working.state, working.state.line
    safe = {one.variant for one in state.residents if one.pinned} | {None}
    ready = {one.variant for one in state.residents if one.ready} - working.evicted
    heads = [(group[0].place, 0, group) for group in map(line.of, (None, *ready)) if group]
    heapify(heads)
    barrier = min((one.ticket.place for one in working.preempted if one.by is None), default=NEVER)
    admitted: list[Ticket] = []
    while heads:
        place, at, group = heads[0]
        ticket = group[at]
        if place > barrier:
            break  # whoever lost its row for want of rows or KV comes first
        uncovered = (
            blocked is not None
            and state.rules.skipping != "free"
            and place > blocked.place
            and ticket.variant not in safe
            and not working.has_elder(ticket.variant, blocked.place)
        )
        if uncovered:
            heappop(heads)
            continue
        if not working.outgrew(ticket):
            if not _has_room(working, ticket):
                if (last := _give_way(working, ticket)) is None:
                    break
                barrier = min(barrier, last)
            working.start(ticket)
            admitted.append(ticket)
        if at + 1 < len(group):
            heapreplace(heads, (group[at + 1].place, at + 1, group))
        else:
            heappop(heads)
    return tuple(admitted)


def _has_room(working: Working, ticket: Ticket, rows: int = 0, kv: int = 0) -> bool:
    """Whether there is a row and KV for it, if so many rows and units of KV were given back; alone, it has KV."""
    limits, others = working.state.limits, working.rows - rows
    if others >= limits.rows:
        return False
    return not others or limits.kv is None or working.kv - kv + ticket.kv + limits.headroom <= limits.kv


def _give_way(working: Working, wanted: Ticket) -> Place | None:
    """Preempt requests that skipped past `wanted` and have no parent, the last in line first, if that makes room.

    Returns the place of the first in line of those; None where there is no room to be made.
    """
    if working.state.rules.skipping != "preempt":
        return None
    skippers = [
        one
        for group in working.by_variant.values()
        for one in group
        if one.place > wanted.place and not working.has_elder(one.variant, wanted.place) and not working.is_ending(one)
    ]
    skippers.sort(key=lambda one: one.place, reverse=True)
    kv = 0
    for number, one in enumerate(skippers, start=1):
        kv += one.kv
        if _has_room(working, wanted, number, kv):
            for ticket in skippers[:number]:
                working.preempt(ticket, by=wanted)
            return one.place
    return None
