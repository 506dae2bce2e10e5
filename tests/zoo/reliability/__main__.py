"""python -m tests.zoo.reliability [PART ...] [--thin N] [--jobs N]: run the sweeps and print a figure for each.

Parts: throughput list kill errors powerloss interleave mutants processes s3 flips bases fuzz (all if none is named).
The two that measure time run first and alone, the others beside each other, each in a process of its own. Exits 1 if
any of them found a fault. --thin N takes every N-th point.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from zoo.reliability import (  # noqa: E402
    bases,
    flips,
    inject,
    interleave,
    kill,
    mutants,
    powerloss,
    processes,
    throughput,
)
from zoo.reliability.scenarios import Bench  # noqa: E402
from zoo.s3 import no_server, serving  # noqa: E402

Sweep = Iterable[tuple[str, int, list[str]]]


def _told(what: str, total: int, unit: str, faults: list[str]) -> bool:
    print(f"{what}: {total:,} {unit}, {len(faults)} faults")
    for fault in faults[:10]:
        print(f"    {fault}")
    return not faults


def _swept(what: str, sweep: Sweep, unit: str) -> bool:
    total, faults = 0, []
    for _, count, found in sweep:
        total += count
        faults += found
    return _told(what, total, unit, faults)


def _kill(thin: int) -> bool:
    with Bench() as bench:
        return _swept("kill -9", kill.sweep(bench, stride=thin), "kill points")


def _errors(thin: int) -> bool:
    with Bench() as bench:
        return _swept("injected errors", inject.sweep(bench, stride=3 * thin), "errors")


def _powerloss(thin: int) -> bool:
    with Bench() as bench:
        return _swept("power loss", powerloss.sweep(bench, per_point=64, limit=5000 // thin), "different states")


def _interleave(thin: int) -> bool:
    with Bench() as bench:
        return all(
            [
                _swept("two verbs at once", interleave.sweep(bench, stride=2 * thin), "schedules"),
                _swept("each stopped once", interleave.sandwiches(bench, first=23 * thin, second=11), "schedules"),
                _swept("commit inside a collection", interleave.relays(bench, stride=thin), "schedules"),
            ]
        )


def _mutants(thin: int) -> bool:
    with Bench() as bench:
        found = list(mutants.sweep(bench))
    caught = sum(how is not None for _, how in found)
    print(f"planted faults: {caught} of {len(found)} caught")
    for name, how in found:
        print(f"    {name}: {'NOT CAUGHT' if how is None else how[:120]}")
    return caught == len(found)


def _processes(thin: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return _raced("local disk", f"{folder}/zoo", Path(folder), thin)


def _s3(thin: int) -> bool:
    if why := no_server():
        print(f"processes, S3: NOT RUN, {why}")
        return False
    with tempfile.TemporaryDirectory() as folder, serving() as url:
        return _raced("S3", f"{url}/race", Path(folder), thin)


def _raced(where: str, location: str, folder: Path, thin: int) -> bool:
    versions = max(1, 40 // thin)
    wrong = processes.race(location, folder, processes=16, versions=versions)
    present = f"{16 * versions} of {16 * versions} present, no gap, no duplicate"
    print(f"16 processes x {versions} versions with gc and a reader, {where}: {wrong or present}")
    return wrong is None


def _flips(thin: int) -> bool:
    flipped, missed = flips.undetected(flips.small_zoo(), stride=thin)
    print(f"bit flips: {flipped - len(missed):,} of {flipped:,} detected")
    return not missed


def _bases(thin: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        count, cases, faults = bases.matrix(Path(folder))
    return _told(f"right base and no other, {count} x {count}, whole and resharded", cases, "cases", faults)


def _fuzz(thin: int) -> bool:
    command = [sys.executable, "-m", "tests.zoo.fuzz", "--inputs", str(1_000_000 // thin)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith(("inputs", "FAULT"))]
    print("fuzzing: " + "\n    ".join(told or [done.stderr]))
    return done.returncode == 0


def _throughput(thin: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        found = throughput.measure(Path(folder), size=(1 << 30) // thin)
    mb = 1e6
    print(
        f"publish {(1 << 30) // thin:,} bytes: {found.publish / mb:.0f} MB/s, raw write {found.disk / mb:.0f} MB/s: "
        f"{found.publish / found.disk:.0%}"
    )
    print(
        f"verify: {found.verify / mb:.0f} MB/s, raw hashing {found.hashing / mb:.0f} MB/s: "
        f"{found.verify / found.hashing:.0%}"
    )
    return found.publish >= 0.5 * found.disk and found.verify >= 0.8 * found.hashing


def _list(thin: int) -> bool:
    count = 10_000 // thin
    with tempfile.TemporaryDirectory() as folder:
        first, second, busy = throughput.list_seconds(Path(folder), entries=count)
    print(f"list of {count:,} entries: {second:.2f} s ({busy:.2f} s of processor), {first:.2f} s without the index")
    return second < 1


ALONE: dict[str, Callable[[int], bool]] = {"throughput": _throughput, "list": _list}
"""Parts that measure time."""
BESIDE: dict[str, Callable[[int], bool]] = {
    "mutants": _mutants,
    "fuzz": _fuzz,
    "interleave": _interleave,
    "powerloss": _powerloss,
    "kill": _kill,
    "errors": _errors,
    "flips": _flips,
    "s3": _s3,
    "processes": _processes,
    "bases": _bases,
}
"""The others, those that take long first, so that no processor is left with one."""
PARTS = ALONE | BESIDE


def run_here(part: str, thin: int) -> bool:
    """Run one part in this process; its figures go to stdout."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        good = PARTS[part](thin)
    busy = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"    ({part}: {time.perf_counter() - begin:.0f} s, {busy:.0f} s of processor)", flush=True)
    return good


def run_apart(part: str, thin: int) -> bool:
    """Run one part in a process of its own; its figures are printed when it has ended."""
    command = [sys.executable, "-m", "tests.zoo.reliability", part, "--thin", str(thin)]
    done = subprocess.run(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True)
    told = done.stdout if done.returncode in (0, 1) else f"{done.stdout}{part}: ended with {done.returncode}\n"
    print(told, end="", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many parts at a time")
    chosen = parser.parse_args()
    if len(chosen.parts) == 1:
        return 0 if run_here(chosen.parts[0], chosen.thin) else 1
    begin = time.perf_counter()
    wanted = [part for part in PARTS if not chosen.parts or part in chosen.parts]
    good = [run_apart(part, chosen.thin) for part in wanted if part in ALONE]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        running = [pool.submit(run_apart, part, chosen.thin) for part in wanted if part in BESIDE]
        good += [one.result() for one in as_completed(running)]
    told = "everything holds" if all(good) else f"{good.count(False)} of {len(good)} parts FAILED"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    print(f"{told} ({time.perf_counter() - begin:.0f} s, {chosen.jobs} at a time; {busy:.0f} s of processor)")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
