"""The desk and what it keeps: the line, lengths, ranks and rates."""

from __future__ import annotations

import math
from random import Random

import pytest

from deltacompress.runtime.engine.policy.desk import Desk
from deltacompress.runtime.engine.policy.eviction import Usage
from deltacompress.runtime.engine.policy.lengths import Lengths
from deltacompress.runtime.engine.policy.line import Line
from deltacompress.runtime.engine.policy.state import Costs, Limits, Plan, Resident, Rules
from deltacompress.runtime.engine.policy.ticket import Ticket

COSTS = Costs(1.0, 0.1, 1.0)


def ticket(number: int, variant: str | None = None) -> Ticket:
    return Ticket(f"r{number}", variant, (float(number), number), 9, 9, 1, 1)


class TestLine:
    def test_it_is_what_a_sorted_list_is(self) -> None:
        random, line, plain = Random(0), Line(), list[Ticket]()
        for number in random.sample(range(400), 400):
            one = ticket(number, random.choice([None, "a", "b", "c"]))
            line.add(one)
            plain.append(one)
            if random.random() < 0.6:
                gone = plain.pop(random.randrange(len(plain)))
                line.remove(gone)
            plain.sort(key=lambda one: one.place)
            assert [*line] == plain
            assert len(line) == len(plain)
            firsts = {one.variant: one for one in reversed(plain)}
            assert [*line.firsts()] == sorted(firsts.values(), key=lambda one: one.place)
            for variant in (None, "a", "b", "c"):
                assert [*line.of(variant)] == [one for one in plain if one.variant == variant]
                assert line.first(variant) is firsts.get(variant)

    def test_who_is_not_in_line_cannot_leave_it(self) -> None:
        line = Line()
        line.add(ticket(1, "a"))
        for one in (ticket(1, "a"), ticket(2, "a")):
            with pytest.raises(KeyError, match=one.id):
                line.remove(one)


class TestDesk:
    def plan(self, desk: Desk, limits: Limits, *names: str) -> Plan:
        residents = [Resident(name, 1) for name in names]
        return desk.plan(residents, {"a": 1, "b": 1}, limits, COSTS, Rules(grace=0))

    def test_a_preempted_request_returns_to_its_place(self) -> None:
        """Three run on a; b0 came first and waits; they come back in the order in which they came."""
        desk = Desk()
        desk.submit("b0", "b", now=0.0, max_tokens=9, kv=1, prompt=1)
        for name in ("a1", "a2", "a3"):
            desk.submit(name, "a", now=0.0, max_tokens=9, kv=1, prompt=1)
        limits = Limits(4, 1)
        first = desk.line.first("b")
        assert first is not None
        desk.line.remove(first)  # as if it had not come yet
        assert [one.id for one in self.plan(desk, limits, "a").admit] == ["a1", "a2", "a3"]
        desk.line.add(first)
        desk.submit("a4", "a", now=0.0, max_tokens=9, kv=1, prompt=1)
        plan = self.plan(desk, limits, "a")
        assert {one.ticket.id for one in plan.preempt} == {"a1", "a2", "a3"}
        assert [one.id for one in desk.line] == ["b0", "a1", "a2", "a3", "a4"]
        assert all(one.swapped for one in desk.line.of("a")[:3])
        assert desk.running == {}

    def test_who_is_swapped_is_not_forgotten_when_it_is_cancelled(self) -> None:
        desk = Desk()
        for name in ("r0", "r1"):
            desk.submit(name, None, now=0.0, max_tokens=9, kv=5, prompt=1)
        self.plan(desk, Limits(2, 1, kv=10))
        desk.running["r0"].kv = 6
        plan = self.plan(desk, Limits(2, 1, kv=10))
        assert [one.ticket.id for one in plan.preempt] == ["r1"]
        assert desk.end("r1", now=1.0, complete=False).swapped
        assert len(desk.line) == 0
        with pytest.raises(KeyError):
            desk.end("r1", now=1.0, complete=False)

    def test_batch_stands_behind_what_comes_within_its_delay(self) -> None:
        desk = Desk(batch_delay_s=10.0)
        desk.submit("batch", None, now=0.0, max_tokens=9, kv=1, prompt=1, latency="batch")
        desk.submit("soon", None, now=9.0, max_tokens=9, kv=1, prompt=1)
        desk.submit("late", None, now=11.0, max_tokens=9, kv=1, prompt=1)
        assert [one.id for one in desk.line] == ["soon", "batch", "late"]

    def test_only_complete_answers_tell_of_others(self) -> None:
        desk = Desk()
        for number, complete in enumerate([True, False]):
            desk.submit(f"r{number}", "a", now=0.0, max_tokens=90, kv=1, prompt=1).generated = 20 + 40 * number
            desk.end(f"r{number}", now=1.0, complete=complete)
        assert desk.submit("r2", "a", now=2.0, max_tokens=90, kv=1, prompt=1).expected == 20

    def test_hopeless_ones_leave(self) -> None:
        desk = Desk()
        desk.submit("r0", "a", now=0.0, max_tokens=9, kv=1, prompt=1)
        assert [one.id for one in self.plan(desk, Limits(2, 1, nbytes=0)).hopeless] == ["r0"]
        assert len(desk.line) == 0


def test_lengths() -> None:
    lengths = Lengths()
    assert lengths.expected("a", 64) == 64
    for tokens in (10, 11, 10):
        lengths.ended("a", tokens)
    assert lengths.expected("a", 64) == 11  # 10 1/3, rounded up
    assert lengths.expected("a", 5) == 5
    assert lengths.expected("b", 64) == 64
    lengths.ended("c", 0)
    assert lengths.expected("c", 64) == 1


class TestUsage:
    def test_lru(self) -> None:
        usage = Usage("lru")
        for now, name in enumerate(["a", "b", "a", "c"]):
            usage.used(name, float(now))
        assert sorted(["c", "a", "b", "d"], key=usage.rank) == ["d", "b", "a", "c"]

    def test_req_count_is_a_decayed_count(self) -> None:
        """Against the sum itself: each request counts 2^(-age / half life)."""
        usage, random, half = Usage("req_count", 10.0), Random(1), 10.0
        times: dict[str, list[float]] = {name: [] for name in "abcd"}
        for now in range(500):
            name = random.choices("abcd", [8, 4, 2, 1])[0]
            times[name].append(now)
            usage.used(name, float(now))
            counts = {name: sum(2 ** ((then - now) / half) for then in times[name]) for name in "abcd"}
            assert sorted("abcd", key=usage.rank) == sorted("abcd", key=lambda name: counts[name])
            for name in "abcd":
                if counts[name]:
                    assert usage.rank(name) == pytest.approx(math.log2(counts[name]) + now / half, abs=1e-6)

    def test_it_counts_over_months(self) -> None:
        usage = Usage("req_count")
        usage.used("a", 0.0)
        usage.used("a", 1e8)
        assert usage.rank("a") == pytest.approx(1e8 / 60)

    def test_never_used(self) -> None:
        usage = Usage("lru")
        usage.used("b", 1.0)
        assert usage.rank("a") == -math.inf
