"""The desk: where an engine or a simulator keeps line, running requests and habits, and carries out plans.

It holds no KV, no variants and no clock: those are the caller's, who does what a plan says and passes the time in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from deltacompress.runtime.engine.generation_config import Latency
from deltacompress.runtime.engine.policy.eviction import Eviction, Usage
from deltacompress.runtime.engine.policy.lengths import Lengths
from deltacompress.runtime.engine.policy.line import Line
from deltacompress.runtime.engine.policy.policy import decide
from deltacompress.runtime.engine.policy.state import Costs, Limits, Plan, Resident, Rules, State
from deltacompress.runtime.engine.policy.ticket import Ticket

BATCH_DELAY_S = 30.0
"""Seconds for which later interactive requests still pass a batch one."""


class Desk:
    """line: who waits; running: who has a row, by id. Neither is to be changed from outside."""

    def __init__(self, *, eviction: Eviction = "lru", batch_delay_s: float = BATCH_DELAY_S) -> None:
        self.line = Line()
        self.running: dict[str, Ticket] = {}
        self.usage, self.lengths = Usage(eviction), Lengths()
        self._waiting: dict[str, Ticket] = {}
        self._batch_delay_s = batch_delay_s
        self._number = 0

    def submit(
        self,
        name: str,
        variant: str | None,
        *,
        now: float,
        max_tokens: int,
        kv: int,
        prompt: int,
        latency: Latency = "interactive",
    ) -> Ticket:
        """A new request gets its place. name: its id, unlike any other's; kv: units to start; prompt: tokens."""
        self._number += 1
        place = (now + (self._batch_delay_s if latency == "batch" else 0.0), self._number)
        ticket = Ticket(name, variant, place, max_tokens, self.lengths.expected(variant, max_tokens), kv, prompt)
        if variant is not None:
            self.usage.used(variant, now)
        self._waiting[name] = ticket
        self.line.add(ticket)
        return ticket

    def plan(
        self,
        residents: Collection[Resident],
        nbytes: Mapping[str, int],
        limits: Limits,
        costs: Costs,
        rules: Rules,
        host_kv: int | None = None,
    ) -> Plan:
        """Decide, and let tickets go to where the plan puts them; what it says of KV and variants is for the caller.

        Preempted tickets are back in line, their `swapped` set; the caller sets `kv` and `pending` of those that are to
        be computed again. Hopeless ones have left.
        """
        state = State(self.line, self.running.values(), residents, nbytes, limits, costs, rules, host_kv)
        plan = decide(state)
        for one in plan.preempt:
            one.ticket.swapped = one.how == "swap"
            self.back(one.ticket.id)
        for ticket in plan.hopeless:
            self.line.remove(self._waiting.pop(ticket.id))
        for ticket in plan.admit:
            self.line.remove(self._waiting.pop(ticket.id))
            self.running[ticket.id] = ticket
        return plan

    def back(self, name: str) -> None:
        """One that runs loses its row, and stands at its place again."""
        ticket = self.running.pop(name)
        self._waiting[name] = ticket
        self.line.add(ticket)

    def end(self, name: str, *, now: float, complete: bool) -> Ticket:
        """A request is over, wherever it was; its ticket tells what it held (a running one KV, `swapped` on the host).

        complete: it came to its own end, so that its length tells of others; False: cancelled, timed out, failed.

        Raises:
            KeyError: no such request is in line or runs.
        """
        ticket = self.running.pop(name, None)
        if ticket is None:
            ticket = self._waiting.pop(name)
            self.line.remove(ticket)
        elif ticket.variant is not None:
            self.usage.used(ticket.variant, now)
        if complete:
            self.lengths.ended(ticket.variant, ticket.generated)
        return ticket
