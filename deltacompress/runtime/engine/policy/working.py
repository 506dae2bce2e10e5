"""What a decision has settled so far: who still runs, what is preempted, evicted, brought."""

from __future__ import annotations

from deltacompress.runtime.engine.policy.state import Preemption, State
from deltacompress.runtime.engine.policy.ticket import NEVER, Place, Ticket


class Working:
    """Starts as the state is; plain bookkeeping, the rules are in slots.py and rows.py.

    by_variant: who runs and stays so, by variant. kv: units of KV that these hold.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.by_variant: dict[str | None, list[Ticket]] = {}
        self._eldest: dict[str | None, Place] = {}
        self.kv = self.rows = 0
        self.outgrown: list[Ticket] = []
        for ticket in state.running:
            if not self.outgrew(ticket):
                self.start(ticket)
        self.preempted: list[Preemption] = []
        self.evicted: set[str] = set()
        self.brought: list[str] = []
        self.hopeless: list[Ticket] = []
        self._host_kv = state.host_kv

    def outgrew(self, ticket: Ticket) -> bool:
        """Whether it would not have its KV even alone, so that nobody is to give way for it; it is noted."""
        most = self.state.limits.alone
        if most is None or ticket.kv <= most:
            return False
        self.outgrown.append(ticket)
        return True

    def start(self, ticket: Ticket) -> None:
        """It has a row."""
        variant = ticket.variant
        self.by_variant.setdefault(variant, []).append(ticket)
        if ticket.place < self._eldest.get(variant, NEVER):
            self._eldest[variant] = ticket.place
        self.kv += ticket.kv
        self.rows += 1

    def has_elder(self, variant: str | None, place: Place) -> bool:
        """Whether a request of this variant runs that stands before `place`: a parent of those that skipped it."""
        return self._eldest.get(variant, NEVER) < place

    def left(self, ticket: Ticket) -> int:
        """Tokens that it is likely to have before it: once it is longer than expected, what it may still have."""
        likely = ticket.expected if ticket.generated < ticket.expected else ticket.max_tokens
        return likely - ticket.generated

    def is_ending(self, ticket: Ticket) -> bool:
        """Whether it is about to end, so that to wait is better than to preempt it."""
        return not ticket.pending and self.left(ticket) <= self.state.rules.grace

    def preemption_s(self, ticket: Ticket) -> float:
        """Seconds that it takes to preempt a request and to bring it back."""
        return ticket.kv * min(2 * self.state.costs.swap_s, self.state.costs.recompute_s)

    def preempt(self, ticket: Ticket, by: Ticket | None) -> None:
        """Take its row; its KV goes to the host where that is cheaper, and where there is room for it."""
        costs = self.state.costs
        swap = 2 * costs.swap_s < costs.recompute_s and (self._host_kv is None or ticket.kv <= self._host_kv)
        if swap and self._host_kv is not None:
            self._host_kv -= ticket.kv
        self.preempted.append(Preemption(ticket, "swap" if swap else "recompute", by))
        group = self.by_variant[ticket.variant]
        group.remove(ticket)
        if not group:
            del self.by_variant[ticket.variant]
        if self._eldest[ticket.variant] == ticket.place:
            self._eldest[ticket.variant] = min((one.place for one in group), default=NEVER)
        self.kv -= ticket.kv
        self.rows -= 1
