"""An engine without a model: requests, residents and KV as the policy moves them, on a clock that is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltacompress.bench.simulate.times import Times
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.runtime.engine.policy.desk import Desk
from deltacompress.runtime.engine.policy.eviction import Eviction
from deltacompress.runtime.engine.policy.portions import fits, most_tokens, much
from deltacompress.runtime.engine.policy.state import Costs, Limits, Plan, Resident, Rules
from deltacompress.runtime.engine.policy.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all policies of a run. chunk: tokens of prompts in a step; max_tokens: asked by each;
    0: each asks for as many as it gets.
    """

    times: Times
    rows: int
    slots: int
    chunk: int
    max_tokens: int
    grace: int


@dataclass(slots=True)
class Course:
    """What became of one request; times in seconds since the first could come."""

    arrival: Arrival
    variant: str
    hit: bool = False
    first_token_s: float = 0.0
    end_s: float = 0.0
    preempted: int = field(default=0)


class World:
    """One run of one policy. counts: loads, evictions, preemptions, steps."""

    def __init__(self, setting: Setting, asked: Sequence[tuple[Arrival, str]], rules: Rules, eviction: Eviction):
        times = setting.times
        self.courses = {f"r{number}": Course(arrival, variant) for number, (arrival, variant) in enumerate(asked)}
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._setting, self._rules = setting, rules
        self._desk = Desk(eviction=eviction)
        self._limits = Limits(
            setting.rows, setting.slots, loads=setting.slots, kv=times.kv_tokens, headroom=setting.rows
        )
        self._costs = Costs(times.decode_s(setting.rows, setting.slots), times.swap_s, times.recompute_s)
        self._sizes = dict.fromkeys((variant for _, variant in asked), 1)
        self._residents: dict[str, float] = {}  # when each is there
        self._link_free = 0.0
        self._to_come = list(reversed(self.courses))

    def run(self) -> None:
        """Until every request has ended."""
        while self._to_come or self._desk.running or len(self._desk.line):
            self._submit()
            held_s = self._carry_out(self._plan())
            if self._desk.running:
                self._step(held_s)
            elif held_s:
                self.now += held_s
            else:
                self._wait()

    def _submit(self) -> None:
        while self._to_come and (course := self.courses[self._to_come[-1]]).arrival.at_s <= self.now:
            name, prompt = self._to_come.pop(), course.arrival.prompt_tokens
            course.hit = self._residents.get(course.variant, float("inf")) <= self.now
            self._desk.submit(
                name,
                course.variant,
                now=course.arrival.at_s,
                max_tokens=self._setting.max_tokens or course.arrival.output_tokens,
                kv=prompt + 1,
                prompt=prompt,
            )

    def _plan(self) -> Plan:
        held = sum(one.kv for one in self._desk.running.values())
        if not len(self._desk.line) and held <= self._setting.times.kv_tokens:
            return Plan()
        residents = [
            Resident(name, 1, there <= self.now, rank=self._desk.usage.rank(name))
            for name, there in self._residents.items()
        ]
        return self._desk.plan(residents, self._sizes, self._limits, self._costs, self._rules)

    def _carry_out(self, plan: Plan) -> float:
        """Returns the seconds that the step waits: for KV that is copied, and for loads."""
        copied = 0
        for one in plan.preempt:
            ticket, course = one.ticket, self.courses[one.ticket.id]
            course.preempted += 1
            self.counts["preempted" if one.by is not None else "out_of_kv"] += 1
            if one.how == "swap":
                copied += ticket.kv
            else:
                self.counts["recomputed"] += 1
                ticket.pending = course.arrival.prompt_tokens + ticket.generated
                ticket.kv = ticket.pending + 1
        for name in plan.evict:
            del self._residents[name]
        for name in plan.bring:
            self._link_free = max(self._link_free, self.now) + self._setting.times.load_s
            self._residents[name] = self._link_free
        for ticket in plan.admit:
            copied += ticket.kv if ticket.swapped else 0
            ticket.swapped = False
        self.counts["loads"] += len(plan.bring)
        self.counts["evictions"] += len(plan.evict)
        return copied * self._setting.times.swap_s + len(plan.bring) * self._setting.times.hold_ms / 1e3

    def _step(self, held_s: float) -> None:
        """As the engine's: a prompt that comes to its end brings a token, and its request decodes in the same step.

        On a GPU, where others decode, it does in the next one, which is not simulated.
        """
        running, ended = self._desk.running.values(), list[Ticket]()
        pending = sorted((one for one in running if one.pending), key=lambda one: one.place)
        waiting, alone = sum(one.pending for one in pending), len(pending) == len(running)
        if pending and not alone:
            waiting += self._desk.line.counted(lambda ticket: ticket.pending, much(self._setting.chunk))
        left = most = most_tokens(self._setting.chunk, waiting, alone=alone)
        for ticket in pending:
            taken = min(ticket.pending, most)
            if not fits(taken, left, most):
                break
            ticket.pending -= taken
            left -= taken
            if not ticket.pending:
                ended.append(ticket)
        self.now += held_s + self._setting.times.prompts_s(most - left, len(ended))
        for ticket in ended:
            self._take(ticket)
        decoded = [one for one in running if not one.pending]
        held = sum(one.kv for one in decoded)
        self.now += self._setting.times.decode_s(len(decoded), len({one.variant for one in decoded}), held)
        self.counts["steps"] += 1
        for ticket in decoded:
            self._take(ticket)

    def _take(self, ticket: Ticket) -> None:
        course = self.courses[ticket.id]
        ticket.generated += 1
        ticket.kv += 1
        if ticket.generated == 1:
            course.first_token_s = self.now
        if ticket.generated == course.arrival.output_tokens:
            course.end_s = self.now
            self._desk.end(ticket.id, now=self.now, complete=True)

    def _wait(self) -> None:
        """Nothing runs: until something arrives."""
        coming = [self.courses[self._to_come[-1]].arrival.at_s] if self._to_come else []
        coming += [there for there in self._residents.values() if there > self.now]
        self.now = min(coming)
