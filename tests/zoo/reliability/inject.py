"""An error at every system call of every verb: a clean message or success, nothing lost, nothing half visible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

from zoo.reliability.scenarios import SCENARIOS, Bench, Scenario, problem_after
from zoo.reliability.shim import Counter, calls_of, hooked

from deltacompress.errors import DeltaCompressError
from deltacompress.zoo import Zoo

SHORT = -1
_SPACE = ("open_", "write", "mkdir", "link", "fsync", "rename", "close")
_PATHS = ("open_", "mkdir", "link", "unlink", "rename", "lstat", "scan")


def points(bench: Bench, scenario: Scenario) -> list[tuple[int, int]]:
    """(call, error number): the errors that each call can have; SHORT for a write that takes only a part."""
    place = bench.fresh(scenario)
    names = calls_of(lambda: scenario.run(Zoo.open(place / "zoo"), place))
    found = []
    for n, name in enumerate(names, 1):
        found += [(n, errno.EIO), (n, errno.EINTR)]
        found += [(n, errno.ENOSPC)] if name in _SPACE else []
        found += [(n, errno.EACCES)] if name in _PATHS else []
        found += [(n, SHORT)] if name == "write" else []
    return found


def run_failing(bench: Bench, scenario: Scenario, call: int, code: int, *, on: bool) -> str | None:
    """Let one call fail; what is wrong afterwards."""

    def fail(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        if code == SHORT and name != "write":
            return real(*args)  # init races threads, so its n-th call is not the same one each time
        if code == SHORT:
            return real(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
        if name == "close":
            real(*args)  # Linux has closed it, whatever close returns
        raise OSError(code, os.strerror(code), args[0] if args and isinstance(args[0], str) else None)

    place = bench.fresh(scenario)
    acked = False
    with hooked(Counter(call, fail)):
        try:
            scenario.run(Zoo.open(place / "zoo"), place)
            acked = True
        except DeltaCompressError as error:
            if "\n" in str(error):
                return f"a message of several lines: {error}"
            if code in (errno.EINTR, SHORT):
                return f"gave up for {'EINTR' if code == errno.EINTR else 'a short write'}: {error}"
        except Exception as error:  # noqa: BLE001 - that it is none of ours is the finding
            return f"{type(error).__name__}: {error}"
    try:
        return problem_after(bench, scenario, place, acked, on=on)
    except Exception as error:  # noqa: BLE001 - whatever the next command raises is the finding
        return f"afterwards {type(error).__name__}: {error}"


def sweep(bench: Bench, *, stride: int = 1, names: tuple[str, ...] = ()) -> Iterator[tuple[str, int, list[str]]]:
    """(scenario, injections, faults) of each scenario; the next commands are tried after every fourth one."""
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        chosen = points(bench, scenario)[::stride]
        faults = []
        for index, (call, code) in enumerate(chosen):
            if wrong := run_failing(bench, scenario, call, code, on=index % 4 == 0):
                label = "short write" if code == SHORT else errno.errorcode[code]
                faults.append(f"{scenario.name}, call {call}, {label}: {wrong}")
        yield scenario.name, len(chosen), faults
