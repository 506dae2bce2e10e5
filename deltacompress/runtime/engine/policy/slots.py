"""Which variants come to the device, and who makes room for them: in the order of the line, nobody past who lacks room.

A resident is in the way of a request if it is pinned, still on its way, or in use or waited for by one that stands
before. Of the rest, idle ones leave first. A resident that runs requests which stand behind, and no other, gives way:
those skipped the line, and their parent has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deltacompress.runtime.engine.policy.state import Resident
from deltacompress.runtime.engine.policy.ticket import Ticket
from deltacompress.runtime.engine.policy.working import Working


def bring(working: Working) -> Ticket | None:
    """Settle what is evicted and brought, and who gives way for it; returns the first request that got no slot."""
    state = working.state
    here = {one.variant for one in state.residents}
    pinned = [one for one in state.residents if one.pinned]
    loading = sum(not one.ready for one in state.residents)
    for ticket in state.line.firsts():
        if ticket.variant is None or ticket.variant in here:
            continue
        if loading >= state.limits.loads:
            break
        if working.outgrew(ticket):
            continue
        nbytes = state.nbytes[ticket.variant]
        if not _fits(working, pinned, (), nbytes):
            working.hopeless += state.line.of(ticket.variant)
            continue
        if not _make_room(working, ticket, nbytes):
            return ticket
        working.brought.append(ticket.variant)
        loading += 1
    return None


def _make_room(working: Working, wanted: Ticket, nbytes: int) -> bool:
    """Evict and preempt what must be; False if there is no room yet."""
    residents = [one for one in working.state.residents if one.variant not in working.evicted]
    others = [working.state.nbytes[variant] for variant in working.brought]
    leaving: list[Resident] = []
    if _fits(working, residents, others, nbytes):
        return True
    free = [one for one in residents if _may_leave(working, one, wanted)]
    idle = [one for one in free if one.variant not in working.by_variant]
    idle.sort(key=lambda one: (working.state.line.first(one.variant) is not None, one.rank))
    for one in idle:
        leaving.append(one)
        residents.remove(one)
        if _fits(working, residents, others, nbytes):
            working.evicted |= {one.variant for one in leaving}
            return True
    if working.state.rules.skipping != "preempt":
        return False
    giving = sorted((one for one in free if one.variant in working.by_variant), key=lambda one: _wait_s(working, one))
    for number, one in enumerate(giving, start=1):
        residents.remove(one)
        if _fits(working, residents, others, nbytes):
            return _give_way(working, [*leaving, *giving[:number]], wanted)
    return False


def _fits(working: Working, residents: Collection[Resident], others: Collection[int], nbytes: int) -> bool:
    """Whether a variant of `nbytes` fits beside residents, and others of which the bytes are given."""
    limits = working.state.limits
    if len(residents) + len(others) >= limits.slots:
        return False
    return limits.nbytes is None or sum(one.nbytes for one in residents) + sum(others) + nbytes <= limits.nbytes


def _may_leave(working: Working, resident: Resident, wanted: Ticket) -> bool:
    if resident.pinned or not resident.ready or working.has_elder(resident.variant, wanted.place):
        return False
    first = working.state.line.first(resident.variant)
    return first is None or first.place > wanted.place


def _wait_s(working: Working, resident: Resident) -> float:
    """Seconds until it can leave and that its requests lose."""
    running = working.by_variant[resident.variant]
    ending = [one for one in running if working.is_ending(one)]
    lost = sum(working.preemption_s(one) for one in running if not working.is_ending(one))
    return lost + max((working.left(one) for one in ending), default=0) * working.state.costs.step_s


def _give_way(working: Working, leaving: Sequence[Resident], wanted: Ticket) -> bool:
    """Preempt those that run on `leaving`, but for those about to end: where one is, nothing leaves yet."""
    running = [ticket for one in leaving for ticket in working.by_variant.get(one.variant, ())]
    ending = {ticket.id for ticket in running if working.is_ending(ticket)}
    for ticket in running:
        if ticket.id not in ending:
            working.preempt(ticket, by=wanted)
    if not ending:
        working.evicted |= {one.variant for one in leaving}
    return not ending
