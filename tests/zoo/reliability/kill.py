"""kill -9 at every system call of every verb that writes: nothing lost, nothing half visible, the next works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from zoo.reliability.scenarios import SCENARIOS, Bench, Scenario, problem_after
from zoo.reliability.shim import Counter, calls_of, hooked

from deltacompress.zoo import Zoo


def points(bench: Bench, scenario: Scenario) -> list[tuple[int, bool]]:
    """(call, half): before each call, and in the middle of each write."""
    place = bench.fresh(scenario)
    names = calls_of(lambda: scenario.run(Zoo.open(place / "zoo"), place))
    found = [(n, False) for n in range(1, len(names) + 1)]
    return found + [(n, True) for n, name in enumerate(names, 1) if name == "write"]


def run_killed(bench: Bench, scenario: Scenario, call: int, half: bool) -> tuple[str | None, bool]:
    """Kill a child at a point; (what is wrong afterwards, whether the child had acknowledged)."""
    place = bench.fresh(scenario)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _child(lambda: scenario.run(Zoo.open(place / "zoo"), place), call, half, writer)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    acked = os.read(reader, 3) == b"ACK"
    os.close(reader)
    if not os.WIFSIGNALED(status) and not acked:
        return "the verb failed", acked
    try:
        return problem_after(bench, scenario, place, acked), acked
    except Exception as error:  # noqa: BLE001 - whatever the next command raises is the finding
        return f"{type(error).__name__}: {error}", acked


def _child(work: Callable[[], object], call: int, half: bool, writer: int) -> None:
    def die(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        if half and name == "write":  # init races threads, so its n-th call is not the same one each time
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        with hooked(Counter(call, die)):
            work()
            os.write(writer, b"ACK")
        code = 0
    finally:
        os._exit(code)


def sweep(bench: Bench, *, stride: int = 1, names: tuple[str, ...] = ()) -> Iterator[tuple[str, int, list[str]]]:
    """(scenario, points, faults) of each scenario; every `stride`-th point."""
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        chosen = points(bench, scenario)[::stride]
        faults = []
        for call, half in chosen:
            wrong, _ = run_killed(bench, scenario, call, half)
            if wrong:
                faults.append(f"{scenario.name}, call {call}{' (half)' if half else ''}: {wrong}")
        yield scenario.name, len(chosen), faults
