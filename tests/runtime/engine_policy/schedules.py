"""Random schedules: a world in which a step is a second, driven by the policy, and looked at after each plan.

The world is small (rows, slots and requests of a handful), so that its corners are met often.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from runtime.engine_policy.rules import check_plan, met

from deltacompress.runtime.engine.policy.desk import Desk
from deltacompress.runtime.engine.policy.state import Costs, Limits, Plan, Resident, Rules, Skipping, State
from deltacompress.runtime.engine.policy.ticket import Ticket

CHUNK = 3  # tokens of a prompt in a step
MOST_TOKENS = MOST_PROMPT = 6
BATCH_DELAY_S = 5.0


class Schedule:
    """One world and all that happens in it."""

    def __init__(self, seed: int, skipping: Skipping = "preempt") -> None:
        self.random = random = Random(seed)
        count = random.randint(2, 6)
        self.nbytes = {f"v{number}": random.randint(1, 4) for number in range(count)}
        self.load_s = {name: random.randint(1, 3) for name in self.nbytes}
        self.residents: dict[str, list[int]] = {}  # seconds until it is there
        slots = random.randint(1, 3)
        self.pinned = {"v0"} if slots > 1 and random.random() < 0.3 else set()
        self.residents |= {name: [0] for name in self.pinned}
        most = sum(self.nbytes[name] for name in self.pinned) + random.randint(3, 8)
        kv = random.randint(5, 40) if random.random() < 0.7 else None
        self.limits = Limits(
            random.randint(1, 4),
            slots,
            most if random.random() < 0.5 else None,
            random.randint(1, 2),
            kv,
            random.randint(0, 2),
        )
        self.costs = Costs(1.0, random.choice([0.1, 1.0]), 1.0)
        self.rules = Rules(skipping, random.randint(0, 3))
        self.host_kv = random.choice([None, 0, 10])
        self.desk = Desk(eviction=random.choice(["lru", "req_count"]), batch_delay_s=BATCH_DELAY_S)
        self.now = 0.0
        self.lengths: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.alive: dict[str, Ticket] = {}
        self.ends: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.first: Ticket | None = None  # of all alive, and for how many steps it has waited as such
        self.first_waits = 0

    def run(self) -> None:
        """To the end of every request."""
        random, to_come = self.random, self.random.randint(3, 8)
        work = 0
        while to_come or self.alive:
            while to_come and random.random() < 0.65:
                to_come -= 1
                work += self._submit()
            if self.alive and random.random() < 0.03:
                self._abort(random.choice(list(self.alive)))
            self._step()
            assert self.now < 100 + 20 * work, "it goes on for ever"
        assert all(self.ends[name] == 1 for name in self.lengths)
        assert len(self.desk.line) == 0
        assert self.desk.running == {}

    # --- what happens -------------------------------------------------------------------------------------------------

    def _submit(self) -> int:
        random = self.random
        name, most = f"r{len(self.lengths)}", random.randint(1, MOST_TOKENS)
        chance = random.random()
        variant = None if chance < 0.15 else "v0" if chance < 0.6 else random.choice(list(self.nbytes))
        self.lengths[name], self.prompts[name] = random.randint(1, most), random.randint(1, MOST_PROMPT)
        self.alive[name] = self.desk.submit(
            name,
            variant,
            now=self.now,
            max_tokens=most,
            kv=self.prompts[name] + 1,
            prompt=self.prompts[name],
            latency="batch" if random.random() < 0.15 else "interactive",
        )
        return self.lengths[name] + self.prompts[name]

    def _abort(self, name: str) -> None:
        ticket = self.desk.end(name, now=self.now, complete=False)
        assert ticket is self.alive[name]
        self._over(name)
        self.seen["aborted"] += 1
        self.seen["aborted while swapped"] += ticket.swapped

    def _over(self, name: str) -> None:
        self.ends[name] += 1
        del self.alive[name]

    def _step(self) -> None:
        state = self._state()
        before = list(state.line)
        running = list(state.running)
        plan = self.desk.plan(state.residents, self.nbytes, self.limits, self.costs, self.rules, host_kv=state.host_kv)
        check_plan(state, before, running, plan)
        self.seen.update(met(plan))
        self._carry_out(plan)
        self._compute()
        self.now += 1
        self._check_first()

    def _state(self) -> State:
        residents = [
            Resident(name, self.nbytes[name], left[0] <= 0, name in self.pinned, self.desk.usage.rank(name))
            for name, left in self.residents.items()
        ]
        running = list(self.desk.running.values())
        return State(
            self.desk.line, running, residents, self.nbytes, self.limits, self.costs, self.rules, self._host_left()
        )

    def _host_left(self) -> int | None:
        if self.host_kv is None:
            return None
        return self.host_kv - sum(one.kv for one in self.alive.values() if one.swapped)

    def _carry_out(self, plan: Plan) -> None:
        for one in plan.preempt:
            if one.how == "recompute":
                one.ticket.pending = self.prompts[one.ticket.id] + one.ticket.generated
                one.ticket.kv = one.ticket.pending + 1
        if self.host_kv is not None:
            assert sum(one.kv for one in self.alive.values() if one.swapped) <= self.host_kv
        for name in plan.evict:
            del self.residents[name]
        for name in plan.bring:
            self.residents[name] = [self.load_s[name]]
        for ticket in plan.admit:
            ticket.swapped = False
        for ticket in plan.hopeless:
            self._over(ticket.id)

    def _compute(self) -> None:
        for left in self.residents.values():
            left[0] -= 1
        for ticket in list(self.desk.running.values()):
            if ticket.pending:
                ticket.pending = max(0, ticket.pending - CHUNK)
                continue
            ticket.generated += 1
            ticket.kv += 1
            if ticket.generated == self.lengths[ticket.id]:
                self.desk.end(ticket.id, now=self.now, complete=True)
                self._over(ticket.id)

    def _check_first(self) -> None:
        """The bound: once all before it have ended, it starts within 2 grace steps, two loads and a step."""
        first = min(self.alive.values(), key=lambda one: one.place, default=None)
        if first is None or first is not self.first or first.id in self.desk.running:
            if first is not None and first is self.first and self.first_waits < 0:
                assert first.id in self.desk.running, "the first of all lost its row"
            self.first, self.first_waits = first, 0
            if first is not None and first.id in self.desk.running:
                self.first_waits = -1
            return
        assert self.first_waits >= 0, "the first of all lost its row"
        self.first_waits += 1
        self.seen["longest wait"] = max(self.seen["longest wait"], self.first_waits)
        bound = 2 * self.rules.grace + 2 * max(self.load_s.values()) + 1
        if self.rules.skipping == "drain":  # skippers end by themselves
            bound += 2 * MOST_TOKENS + 2 * MOST_PROMPT
        assert self.first_waits <= bound, "starved"
