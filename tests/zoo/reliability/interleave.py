"""Two verbs at once, exactly. `sweep`: one is stopped at each of its system calls, the other runs whole there.

That is the worst a scheduler can do with two parties of which one sleeps once; it covers the collector that wakes up
long after everybody forgot it, and the publisher that does. `sandwiches`: both sleep once, one inside the other.
`relays`: one sleeps twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from zoo.reliability.scenarios import SCENARIOS, Bench, report, state_of
from zoo.reliability.shim import calls_of, hooked

from deltacompress.errors import DeltaCompressError
from deltacompress.zoo import Zoo

Verb = Callable[[Zoo, Path], object]


@dataclass(frozen=True)
class Pair:
    """`outer` is stopped, `inner` runs. start: the scenario whose zoo they run on; expected: versions and aliases that
    must be there if both were acknowledged; moves: of team/m@canary that there must be then."""

    name: str
    outer: Verb
    inner: Verb
    start: str
    expected: tuple[str, ...] = ()
    moves: int = 0


def _gc(zoo: Zoo, at: Path) -> object:
    return zoo.gc(grace=0, empty_trash=True)


def _gc_twice(zoo: Zoo, at: Path) -> object:
    zoo.gc(grace=0)
    return zoo.gc(grace=0, empty_trash=True)


def _gone(name: str) -> Verb:
    """Publish what a removed version held: every blob is there, and the collector is about to take it."""
    return lambda zoo, at: zoo.add_artifact(at / "gone", name)


def _publish_and_gc(zoo: Zoo, at: Path) -> object:
    zoo.add_artifact(at / "gone", "team/y")
    return zoo.gc(grace=0, empty_trash=True)


def _attach_gone(zoo: Zoo, at: Path) -> object:
    """Publish the removed manifest again and attach its old report again."""
    zoo.add_artifact(at / "gone", "team/x")
    return zoo.attach(*report(zoo.resolve("team/x@1").manifest))


_GONE = ("team/gone@1", "team/gone@1 referrer")
PAIRS = (
    Pair("publish | gc", _gone("team/x"), _gc_twice, "publish", ("team/x@1",)),
    Pair("gc | publish", _gc, _gone("team/x"), "publish", ("team/x@1",)),
    Pair("gc | publish, gc", _gc, _publish_and_gc, "publish", ("team/y@1",)),
    Pair("gc | gc", _gc, _gc_twice, "gc", ("team/left@1",)),
    Pair(
        "publish | publish",
        _gone("team/m"),
        lambda z, at: z.add_artifact(at / "c", "team/m"),
        "publish",
        ("team/m@3", "team/m@4"),
    ),
    Pair("publish | publish, gc", _gone("team/x"), _publish_and_gc, "publish", ("team/x@1", "team/y@1")),
    Pair("undelete | gc", lambda z, at: z.undelete("team/gone@1"), _gc_twice, "undelete"),
    Pair("gc | undelete", _gc, lambda z, at: z.undelete("team/gone@1"), "undelete", _GONE),
    Pair("gc | attach", _gc, _attach_gone, "undelete", ("team/x@1", "team/x@1 referrer")),
    Pair("attach | gc", _attach_gone, _gc_twice, "undelete", ("team/x@1", "team/x@1 referrer")),
    Pair(
        "rm, gc | publish",
        lambda z, at: (z.rm("team/m@2"), _gc(z, at)),
        lambda z, at: z.add_artifact(at / "b", "team/x"),
        "rm",
        ("team/x@1",),
    ),
    Pair(
        "tag | tag",
        lambda z, at: z.tag("team/m@1", "canary"),
        lambda z, at: z.tag("team/m@2", "canary"),
        "publish",
        moves=2,
    ),
    Pair(
        "move | move",
        lambda z, at: z.tag("team/m@2", "prod"),
        lambda z, at: z.tag("team/m@2", "prod"),
        "publish",
        ("team/m@prod",),
    ),
    Pair("fsck | gc", lambda z, at: z.fsck(repair=True, copy=Zoo.open(at / "copy")), _gc, "fsck"),
)


def run_pair(bench: Bench, pair: Pair, call: int) -> str | None:
    """Run `inner` before the given call of `outer`; what is wrong in the end."""
    place = bench.fresh(next(one for one in SCENARIOS if one.name == pair.start))
    outcomes: list[str] = []

    def attempt(verb: Verb) -> None:
        try:
            verb(Zoo.open(place / "zoo"), place)
            outcomes.append("ok")
        except DeltaCompressError as error:
            outcomes.append(f"{type(error).__name__}: {error}")

    seen = 0

    def hook(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        nonlocal seen
        seen += 1
        if seen == call:
            attempt(pair.inner)
        return real(*args)

    with hooked(hook):
        attempt(pair.outer)
    return _problem(pair, place, outcomes)


def _problem(pair: Pair, place: Path, outcomes: list[str]) -> str | None:
    """What is wrong after both have ended."""
    try:
        zoo = Zoo.open(place / "zoo")
        problems = zoo.verify().problems
        if problems:
            return f"{outcomes}: {problems[0].message}"
        visible = {name for name, _ in state_of(zoo.store)}
        if outcomes == ["ok", "ok"] and not set(pair.expected) <= visible:
            return f"acknowledged, but not there: {sorted(set(pair.expected) - visible)}"
        if outcomes == ["ok", "ok"] and pair.moves and len(zoo.history("team/m@canary")) != pair.moves:
            return "a move of the alias was acknowledged, but never made"
        zoo.gc(grace=0)
        problems = zoo.verify().problems
        return f"after one more gc: {problems[0].message}" if problems else None
    except DeltaCompressError as error:
        return f"{outcomes}, then {type(error).__name__}: {error}"


def sweep(
    bench: Bench, *, stride: int = 1, names: tuple[str, ...] = (), stop: bool = False
) -> Iterator[tuple[str, int, list[str]]]:
    """(pair, schedules, faults) of each pair; `stop`: at the first fault of a pair."""
    for pair in PAIRS:
        if names and pair.name not in names:
            continue
        place = bench.fresh(next(one for one in SCENARIOS if one.name == pair.start))
        count = len(calls_of(lambda pair=pair, place=place: pair.outer(Zoo.open(place / "zoo"), place)))  # type: ignore[misc]
        faults = []
        calls = range(1, count + 1)[::stride]
        for call in calls:
            wrong = run_pair(bench, pair, call)
            faults += [f"{pair.name}, call {call}: {wrong}"] if wrong else []
            if faults and stop:
                break
        yield pair.name, len(calls), faults


SANDWICHES = (
    Pair("publish / gc", _gone("team/x"), _gc, "publish", ("team/x@1",)),
    Pair("undelete / gc", lambda z, at: z.undelete("team/gone@1"), _gc, "undelete", ("team/gone@1",)),
    Pair("gc / gc", _gc, _gc_twice, "gc", ("team/left@1",)),
)


Stop = Callable[[int, str], bool]
"""Whether to stop before a call: its number among the calls of its verb, and the path that it is about."""


def run_together(bench: Bench, pair: Pair, outer_stops: list[Stop], inner_stops: list[Stop]) -> str | None:
    """`outer` to its first stop, `inner` to its first stop, `outer` to its second, and so on, then the rest of each."""
    place = bench.fresh(next(one for one in SCENARIOS if one.name == pair.start))
    outcomes: list[str] = []
    turn = threading.Condition()
    running, alive = "outer", {"outer", "inner"}
    stops = {"outer": list(outer_stops), "inner": list(inner_stops)}
    seen = {"outer": 0, "inner": 0}

    def hand_over(who: str) -> None:
        nonlocal running
        other = "inner" if who == "outer" else "outer"
        with turn:
            if other in alive:
                running = other
                turn.notify_all()
            while running != who and who in alive:
                turn.wait(60)

    def hook(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        who = threading.current_thread().name
        if who in seen:
            seen[who] += 1
            path = args[-1] if args and isinstance(args[-1], str) else str(args[0]) if args else ""
            if stops[who] and stops[who][0](seen[who], path):
                stops[who].pop(0)
                hand_over(who)
        return real(*args)

    def attempt(who: str, verb: Verb) -> None:
        with turn:
            while running != who:
                turn.wait(60)
        try:
            verb(Zoo.open(place / "zoo"), place)
            outcomes.append("ok")
        except DeltaCompressError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        finally:
            with turn:
                alive.discard(who)
            hand_over(who)

    with hooked(hook):
        threads = [
            threading.Thread(name=who, target=attempt, args=(who, verb))
            for who, verb in (("outer", pair.outer), ("inner", pair.inner))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _problem(pair, place, outcomes) if len(outcomes) == 2 else f"one of them stumbled: {outcomes}"


def at_call(number: int) -> Stop:
    """Stop before the call of that number, or the next one if that is past."""
    return lambda seen, path: seen >= number


def at_path(part: str) -> Stop:
    """Stop before the first call about a path with `part` in it."""
    return lambda seen, path: part in path


def relays(bench: Bench, *, stride: int = 1, stop: bool = False) -> Iterator[tuple[str, int, list[str]]]:
    """A publisher takes its blobs into use right before a collector condemns them, and commits at each of its later
    calls: (pair, schedules, faults)."""
    pair = Pair("gc / publish / gc", _gc, _gone("team/x"), "publish", ("team/x@1",))
    place = bench.fresh(next(one for one in SCENARIOS if one.name == pair.start))
    count = len(calls_of(partial(pair.outer, Zoo.open(place / "zoo"), place)))
    faults: list[str] = []
    schedules = 0
    for call in range(1, count + 1, stride):
        schedules += 1
        wrong = run_together(bench, pair, [at_path("/gc/condemned/"), at_call(call)], [at_path("/txn/outcome/")])
        faults += [f"{pair.name}, call {call}: {wrong}"] if wrong else []
        if faults and stop:
            break
    yield pair.name, schedules, faults


def sandwiches(
    bench: Bench, *, first: int = 23, second: int = 7, stop: bool = False
) -> Iterator[tuple[str, int, list[str]]]:
    """(pair, schedules, faults): every `first`-th call of the outer with every `second`-th of the inner."""
    for pair in SANDWICHES:
        start = next(one for one in SCENARIOS if one.name == pair.start)
        counts = []
        for verb in (pair.outer, pair.inner):
            place = bench.fresh(start)
            counts.append(len(calls_of(partial(verb, Zoo.open(place / "zoo"), place))))
        faults: list[str] = []
        schedules = 0
        for one, two in product(range(1, counts[0] + 1, first), range(1, counts[1] + 1, second)):
            schedules += 1
            wrong = run_together(bench, pair, [at_call(one)], [at_call(two)])
            faults += [f"{pair.name}, calls {one} and {two}: {wrong}"] if wrong else []
            if faults and stop:
                break
        yield pair.name, schedules, faults
