"""python -m tests.zoo.reliability [PART ...] [--thin N]: run the sweeps and print a figure for each.

Parts: kill errors powerloss interleave mutants processes s3 flips throughput list (all of them if none is named).
Exits 1 if any of them found a fault. --thin N takes every N-th point.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from zoo.reliability import flips, inject, interleave, kill, mutants, powerloss, processes, throughput  # noqa: E402
from zoo.reliability.scenarios import Bench  # noqa: E402
from zoo.s3 import no_server, serving  # noqa: E402

Sweep = Iterable[tuple[str, int, list[str]]]


def _swept(what: str, sweep: Sweep, unit: str) -> bool:
    total, faults = 0, []
    for _, count, found in sweep:
        total += count
        faults += found
    print(f"{what}: {total} {unit}, {len(faults)} faults")
    for fault in faults[:10]:
        print(f"    {fault}")
    return not faults


def _kill(bench: Bench, thin: int) -> bool:
    return _swept("kill -9", kill.sweep(bench, stride=thin), "kill points")


def _errors(bench: Bench, thin: int) -> bool:
    return _swept("injected errors", inject.sweep(bench, stride=thin), "errors")


def _powerloss(bench: Bench, thin: int) -> bool:
    return _swept("power loss", powerloss.sweep(bench, per_point=64, limit=7000 // thin), "different states")


def _interleave(bench: Bench, thin: int) -> bool:
    return all(
        [
            _swept("two verbs at once", interleave.sweep(bench, stride=2 * thin), "schedules"),
            _swept("each stopped once", interleave.sandwiches(bench, first=23 * thin, second=11), "schedules"),
            _swept("commit inside a collection", interleave.relays(bench, stride=thin), "schedules"),
        ]
    )


def _mutants(bench: Bench, thin: int) -> bool:
    found = list(mutants.sweep(bench))
    caught = sum(how is not None for _, how in found)
    print(f"planted faults: {caught} of {len(found)} caught")
    for name, how in found:
        print(f"    {name}: {'NOT CAUGHT' if how is None else how[:120]}")
    return caught == len(found)


def _processes(bench: Bench, thin: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return _raced("local disk", f"{folder}/zoo", Path(folder), thin)


def _s3(bench: Bench, thin: int) -> bool:
    if why := no_server():
        print(f"processes, S3: skipped, {why}")
        return True
    with tempfile.TemporaryDirectory() as folder, serving() as url:
        return _raced("S3", f"{url}/race", Path(folder), thin)


def _raced(where: str, location: str, folder: Path, thin: int) -> bool:
    versions = max(1, 40 // thin)
    wrong = processes.race(location, folder, processes=16, versions=versions)
    print(f"16 processes x {versions} versions with gc and a reader, {where}: {wrong or f'{16 * versions} present'}")
    return wrong is None


def _flips(bench: Bench, thin: int) -> bool:
    flipped, missed = flips.undetected(flips.small_zoo(), stride=thin)
    print(f"bit flips: {flipped - len(missed)} of {flipped} detected")
    return not missed


def _throughput(bench: Bench, thin: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        found = throughput.measure(Path(folder), size=(1 << 30) // thin)
    mb = 1e6
    print(
        f"publish {(1 << 30) // thin} bytes: {found.publish / mb:.0f} MB/s, raw write {found.disk / mb:.0f} MB/s: "
        f"{found.publish / found.disk:.0%}"
    )
    print(
        f"verify: {found.verify / mb:.0f} MB/s, raw hashing {found.hashing / mb:.0f} MB/s: "
        f"{found.verify / found.hashing:.0%}"
    )
    return found.publish >= 0.5 * found.disk and found.verify >= 0.8 * found.hashing


def _list(bench: Bench, thin: int) -> bool:
    count = 10_000 // thin
    with tempfile.TemporaryDirectory() as folder:
        first, second, busy = throughput.list_seconds(Path(folder), entries=count)
    print(f"list of {count} entries: {second:.2f} s ({busy:.2f} s of processor), {first:.2f} s without the index")
    return second < 1


PARTS: dict[str, Callable[[Bench, int], bool]] = {
    "kill": _kill,
    "errors": _errors,
    "powerloss": _powerloss,
    "interleave": _interleave,
    "mutants": _mutants,
    "processes": _processes,
    "s3": _s3,
    "flips": _flips,
    "throughput": _throughput,
    "list": _list,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--thin", type=int, default=1)
    chosen = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in chosen.parts or PARTS:
            begin = time.perf_counter()
            bench = Bench()
            try:
                good &= PARTS[name](bench, chosen.thin)
            finally:
                bench.close()
            print(f"    ({name}: {time.perf_counter() - begin:.0f} s)", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
