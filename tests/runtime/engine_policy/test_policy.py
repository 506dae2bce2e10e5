"""The rules of the policy by cases: who starts, who gives way, who leaves, what comes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import deltacompress.runtime.engine.policy
from deltacompress.runtime.engine.policy.line import Line
from deltacompress.runtime.engine.policy.policy import decide
from deltacompress.runtime.engine.policy.state import Costs, Limits, Plan, Resident, Rules, State
from deltacompress.runtime.engine.policy.ticket import Ticket

COSTS = Costs(step_s=0.016, swap_s=0.001, recompute_s=0.004)
RULES = Rules(grace=2)


def ticket(number: int, variant: str | None, *, done: int = 0, expected: int = 100, kv: int = 10) -> Ticket:
    """Number `number` in line; 100 tokens at most, of which `done` are there."""
    return Ticket(f"{variant}{number}", variant, (float(number), number), 100, expected, kv, 0, generated=done)


def plan(
    waiting: Sequence[Ticket],
    running: Sequence[Ticket] = (),
    residents: Sequence[Resident] = (),
    limits: Limits = Limits(rows=4, slots=2),  # noqa: B008
    rules: Rules = RULES,
    costs: Costs = COSTS,
    host_kv: int | None = None,
) -> Plan:
    line = Line()
    for one in waiting:
        line.add(one)
    sizes = dict.fromkeys("abcdef", 1)
    return decide(State(line, running, residents, sizes, limits, costs, rules, host_kv))


def here(variant: str, *, rank: float = 0.0, ready: bool = True, pinned: bool = False, nbytes: int = 1) -> Resident:
    return Resident(variant, nbytes, ready, pinned, rank)


def lost(found: Plan) -> list[str]:
    return [one.ticket.id for one in found.preempt]


def started(found: Plan) -> list[str]:
    return [one.id for one in found.admit]


class TestStarting:
    def test_first_come_first_served(self) -> None:
        found = plan([ticket(2, "a"), ticket(1, None), ticket(3, "a")], residents=[here("a")], limits=Limits(2, 2))
        assert started(found) == ["None1", "a2"]

    def test_who_waits_for_its_variant_is_passed_and_its_variant_comes(self) -> None:
        found = plan([ticket(1, "b"), ticket(2, "a"), ticket(3, None)], residents=[here("a")])
        assert started(found) == ["a2", "None3"]
        assert found.bring == ("b",)

    def test_the_base_takes_no_slot(self) -> None:
        held = [ticket(1, "a"), ticket(2, "b")]
        found = plan([ticket(3, "c"), ticket(4, None)], held, [here("a", pinned=True), here("b")])
        assert started(found) == ["None4"]
        assert found.blocked is not None
        assert found.blocked.id == "c3"

    def test_what_arrives_cannot_be_used_yet(self) -> None:
        found = plan([ticket(1, "a")], residents=[here("a", ready=False)])
        assert (found.admit, found.bring) == ((), ())

    def test_no_smaller_one_passes_for_want_of_kv(self) -> None:
        limits = Limits(4, 2, kv=30)
        found = plan([ticket(2, None, kv=25), ticket(3, None, kv=1)], [ticket(1, None, kv=10)], limits=limits)
        assert found.admit == ()

    def test_headroom_is_for_those_that_run(self) -> None:
        limits = Limits(4, 2, kv=30, headroom=5)
        assert started(plan([ticket(1, None, kv=30)], limits=limits)) == ["None1"]
        assert started(plan([ticket(2, None, kv=16)], [ticket(1, None)], limits=limits)) == []
        assert started(plan([ticket(2, None, kv=15)], [ticket(1, None)], limits=limits)) == ["None2"]

    def test_one_by_itself_has_kv_whatever_it_takes(self) -> None:
        """Whether it can be had is not for the policy to say; nobody starts beside it, or passes it."""
        limits, large = Limits(4, 2, kv=30, headroom=5), ticket(2, None, kv=31)
        assert started(plan([large, ticket(3, None, kv=1)], limits=limits)) == ["None2"]
        assert started(plan([large, ticket(3, None, kv=1)], [ticket(1, None, kv=1)], limits=limits)) == []
        assert started(plan([ticket(3, None, kv=1)], [large], limits=limits)) == []

    def test_who_can_not_have_its_kv_even_alone_is_named_and_in_nobodys_way(self) -> None:
        limits = Limits(4, 2, kv=30, headroom=5, alone=30)
        first, outgrown, behind = ticket(1, "a", kv=8), ticket(2, "a", kv=31), ticket(5, None, kv=9)
        large, cold = ticket(3, None, kv=31), ticket(4, "c", kv=31)
        residents = [here("a"), here("b")]
        found = plan([large, cold, behind], [first, outgrown], residents, limits)
        assert {*found.outgrown} == {outgrown, large, cold}
        assert (found.admit, found.preempt, found.evict, found.bring) == ((behind,), (), (), ())

    def test_hopeless_ones_hold_up_nobody(self) -> None:
        limits = Limits(4, 2, nbytes=4)
        waiting = [ticket(1, "b"), ticket(3, "b"), ticket(4, "c"), ticket(5, None)]
        line = Line()
        for one in waiting:
            line.add(one)
        state = State(line, [], [here("a", pinned=True, nbytes=2)], {"b": 3, "c": 2}, limits, COSTS, RULES)
        found = decide(state)
        assert {one.id for one in found.hopeless} == {"b1", "b3"}
        assert found.bring == ("c",)
        assert started(found) == ["None5"]


class TestSkipping:
    """Two slots, a and b; a1 opened the first one."""

    def test_a_skipper_starts_while_its_parent_runs(self) -> None:
        running = [ticket(1, "a"), ticket(2, "b")]
        found = plan([ticket(3, "c"), ticket(4, "a")], running, [here("a"), here("b")])
        assert started(found) == ["a4"]
        assert found.preempt == ()

    def test_when_the_parent_has_ended_skippers_give_way(self) -> None:
        """b2 stands before c3, a4 does not."""
        running = [ticket(2, "b"), ticket(4, "a"), ticket(5, "a")]
        found = plan([ticket(3, "c"), ticket(6, "a")], running, [here("a"), here("b")])
        assert sorted(lost(found)) == ["a4", "a5"]
        assert all(one.by is not None and one.by.id == "c3" for one in found.preempt)
        assert (found.evict, found.bring, found.admit) == (("a",), ("c",), ())

    def test_nobody_gives_way_where_nobody_older_waits(self) -> None:
        running = [ticket(4, "a"), ticket(5, "b")]
        assert plan([ticket(6, "c")], running, [here("a"), here("b")]).preempt == ()
        assert plan([], running, [here("a"), here("b")]).preempt == ()

    def test_nobody_gives_way_where_there_is_room(self) -> None:
        found = plan([ticket(1, "c")], [ticket(4, "a")], [here("a")])
        assert (found.preempt, found.bring) == ((), ("c",))

    def test_who_is_about_to_end_is_waited_for(self) -> None:
        ending = ticket(4, "a", done=98)
        running = [ticket(1, "b"), ending, ticket(5, "a", done=97)]
        found = plan([ticket(3, "c"), ticket(6, "a")], running, [here("a"), here("b")])
        assert lost(found) == ["a5"]  # it goes at once: the slot is c3's as soon as a4 has ended
        assert (found.evict, found.bring, found.admit) == ((), (), ())

    def test_the_prediction_protects_once(self) -> None:
        """Expected 50: about to end from 48 to 49, and not when it has turned out to be longer."""
        for done, gives_way in ((47, True), (48, False), (49, False), (50, True)):
            running = [ticket(1, "b"), ticket(4, "a", done=done, expected=50)]
            found = plan([ticket(3, "c")], running, [here("a"), here("b")])
            assert bool(found.preempt) == gives_way, done

    def test_a_prompt_in_chunks_is_not_about_to_end(self) -> None:
        chunked = ticket(4, "a", done=99)
        chunked.pending = 500
        assert lost(plan([ticket(3, "c")], [ticket(1, "b"), chunked], [here("a"), here("b")])) == ["a4"]

    def test_the_cheapest_gives_way(self) -> None:
        running = [ticket(4, "a", kv=30), ticket(5, "b", kv=5), ticket(6, "b", kv=5)]
        found = plan([ticket(3, "c")], running, [here("a"), here("b")])
        assert sorted(lost(found)) == ["b5", "b6"]

    def test_what_gives_way_alone_is_not_enough_is_left_alone(self) -> None:
        """d has 3 bytes: a alone leaves no room for it beside b, whose request came before."""
        line = Line()
        line.add(ticket(3, "d"))
        residents = [here("a"), here("b")]
        running = [ticket(1, "b"), ticket(4, "a")]
        found = decide(State(line, running, residents, {"d": 3}, Limits(4, 2, nbytes=3), COSTS, RULES))
        assert found.preempt == ()
        assert found.blocked is not None

    def test_a_row_is_given_to_the_older(self) -> None:
        running = [ticket(1, "a"), ticket(5, "b"), ticket(6, "b"), ticket(7, None)]
        found = plan([ticket(3, "b"), ticket(4, "b"), ticket(8, "a")], running, [here("a"), here("b")])
        assert lost(found) == ["None7"]  # of those that have no parent the last in line; b3 is one for b5 and b6
        assert started(found) == ["b3"]

    def test_pinned_ones_may_always_be_used(self) -> None:
        running = [ticket(1, "b")]
        found = plan([ticket(3, "c"), ticket(4, "a")], running, [here("a", pinned=True), here("b")])
        assert started(found) == ["a4"]

    def test_drain(self) -> None:
        running = [ticket(2, "b"), ticket(4, "a")]
        found = plan([ticket(3, "c"), ticket(6, "a")], running, [here("a"), here("b")], rules=Rules("drain"))
        assert (found.preempt, found.admit) == ((), ())

    def test_free_is_what_starves(self) -> None:
        running = [ticket(2, "b"), ticket(4, "a")]
        found = plan([ticket(3, "c"), ticket(6, "a")], running, [here("a"), here("b")], rules=Rules("free"))
        assert (lost(found), started(found)) == ([], ["a6"])


class TestLeaving:
    def test_the_lowest_rank_first_and_who_is_waited_for_last(self) -> None:
        residents = [here("a", rank=3.0), here("b", rank=1.0), here("c", rank=0.0)]
        limits = Limits(rows=1, slots=3)
        assert plan([ticket(1, "d")], residents=residents, limits=limits).evict == ("c",)
        running = [ticket(0, None)]
        assert plan([ticket(1, "d"), ticket(2, "c")], running, residents, limits).evict == ("b",)

    def test_who_stands_before_keeps_its_variant(self) -> None:
        """The row is taken, so a1 and b2 wait; d3 does not get what they wait for."""
        residents = [here("a"), here("b")]
        found = plan([ticket(1, "a"), ticket(2, "b"), ticket(3, "d")], [ticket(0, None)], residents, Limits(1, 2))
        assert (found.evict, found.bring) == ((), ())

    def test_pinned_used_and_arriving_ones_stay(self) -> None:
        residents = [here("a", pinned=True), here("b", ready=False), here("c")]
        found = plan([ticket(2, "d")], [ticket(1, "c")], residents, Limits(4, 3, loads=2))
        assert (found.evict, found.bring) == ((), ())

    def test_as_many_as_bytes_ask_for(self) -> None:
        residents = [here("a", rank=2.0), here("b", rank=1.0), here("c", rank=3.0)]
        line = Line()
        line.add(ticket(1, "d"))
        found = decide(State(line, [], residents, {"d": 2}, Limits(4, 9, nbytes=3), COSTS, RULES))
        assert found.evict == ("a", "b")


class TestComing:
    def test_in_the_order_of_the_line_as_many_as_may_be_on_their_way(self) -> None:
        waiting = [ticket(3, "c"), ticket(1, "a"), ticket(2, "b"), ticket(4, "a")]
        assert plan(waiting, limits=Limits(4, 9, loads=2)).bring == ("a", "b")
        assert plan(waiting, residents=[here("a", ready=False)], limits=Limits(4, 9, loads=2)).bring == ("b",)

    def test_ahead_of_their_turn(self) -> None:
        found = plan([ticket(5, "b")], [ticket(1, "a")], [here("a")], Limits(1, 2))
        assert found.bring == ("b",)

    def test_nothing_smaller_takes_the_room_of_who_stands_before(self) -> None:
        line = Line()
        line.add(ticket(3, "d"))
        line.add(ticket(4, "c"))
        limits = Limits(4, 9, nbytes=3, loads=9)
        found = decide(State(line, [ticket(1, "a")], [here("a")], {"d": 3, "c": 1}, limits, COSTS, RULES))
        assert found.bring == ()


class TestCosts:
    running = (ticket(1, "b"), ticket(4, "a"))
    residents = (here("a"), here("b"))

    def how(self, costs: Costs, host_kv: int | None = None) -> str:
        found = plan([ticket(3, "c")], self.running, self.residents, costs=costs, host_kv=host_kv)
        return found.preempt[0].how

    def test_there_and_back_against_once_more(self) -> None:
        assert self.how(replace(COSTS, swap_s=0.0019)) == "swap"
        assert self.how(replace(COSTS, swap_s=0.0021)) == "recompute"

    def test_the_host_may_be_full(self) -> None:
        assert self.how(COSTS, host_kv=10) == "swap"
        assert self.how(COSTS, host_kv=9) == "recompute"

    def test_who_outgrows_the_kv_goes_from_the_end_of_the_line(self) -> None:
        running = [ticket(3, None), ticket(1, None), ticket(2, None)]
        found = plan([ticket(4, None, kv=1)], running, limits=Limits(4, 2, kv=21))
        assert lost(found) == ["None3"]
        assert found.preempt[0].by is None
        assert found.admit == ()  # None4 would pass None3


def test_the_policy_is_pure() -> None:
    """Nothing but itself, and what has neither clock nor chance."""
    allowed = {"__future__", "bisect", "collections.abc", "dataclasses", "heapq", "math", "typing"}
    folder = Path(deltacompress.runtime.engine.policy.__file__).parent
    found = {
        node.module
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert {one for one in found if not one.startswith("deltacompress.runtime.engine.policy.")} - allowed == {
        "deltacompress.runtime.engine.generation_config",  # the names of the classes; no torch either
    }
    assert not any(
        isinstance(node, ast.Import) for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))
    )


@pytest.mark.parametrize("waiting", [300, 30_000])
def test_a_decision_looks_at_a_bounded_part_of_the_line(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits at the far end is not looked at: its place is not even there."""
    line = Line()
    for number in range(waiting):
        line.add(ticket(number, f"v{number % 100}"))
    looked: list[object] = []
    monkeypatch.setattr(Line, "__iter__", lambda self: looked.append(self) or iter(()))
    residents = [here(f"v{number}") for number in range(16)]
    sizes = {f"v{number}": 1 for number in range(100)}
    found = decide(State(line, [], residents, sizes, Limits(64, 16), COSTS, RULES))
    assert len(found.admit) == 64 if waiting > 300 else len(found.admit) == 48
    assert looked == []
