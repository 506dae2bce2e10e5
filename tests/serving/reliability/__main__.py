"""python -m tests.serving.reliability [PART ...] [--requests N] [--inputs N] [--at-once N] [--connections N]
[--minutes N].

Loads and breaks the server, prints a figure for each part, and exits 1 if any of them found a fault. Parts, all but
soak if none is named: churn (20 generated variants with room for 4, clients that leave or send nonsense), drained and
killed (a SIGTERM, the end of the engine's process, under load), slow (connections that are slow or dead), fuzz (changed
bodies and heads), soak (the clients of churn for half an hour, and what the processes have in memory).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from serving.harness import served  # noqa: E402
from serving.reliability import churn, faults, fuzz, models, slow, soak  # noqa: E402
from serving.reliability.faults import Outcome, Target  # noqa: E402
from serving.reliability.models import BASE, Models  # noqa: E402
from serving.reliability.server import KEY, started  # noqa: E402

from deltacompress.serving.settings import Limits  # noqa: E402

VARIANTS, ROOM, QUESTIONS = 20, 4, 12
A_ROUND = 500


def _told(what: str, wrong: list[str]) -> bool:
    print(f"{what}: {len(wrong)} faults")
    for fault in wrong[:20]:
        print(f"    {fault}")
    return not wrong


def _churn(chosen: argparse.Namespace, folder: Path) -> bool:
    made = models.made(folder, variants=VARIANTS, questions=QUESTIONS)
    with started(made, folder, room=ROOM) as server:
        found = asyncio.run(churn.churn(server, made, chosen.requests, chosen.at_once))
        loads = server.metrics()["deltacompress_variant_loads_total",]
        churn.settled(server, made, found, ROOM)
        found.check((code := server.end()) == 0, f"exit code {code}")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.kinds.items()))
    what = f"churn: {chosen.requests:,} requests ({kinds}), {chosen.at_once} at once, {found.seconds:.0f} s"
    what += f"; {VARIANTS} variants with room for {ROOM} came {loads:,.0f} times; {len(set(made.answers.values()))} of "
    return _told(f"{what}{len(made.answers)} answers differ", found.faults)


def _soak(chosen: argparse.Namespace, folder: Path) -> bool:
    made = models.made(folder, variants=VARIANTS, questions=QUESTIONS)
    with started(made, folder, room=ROOM) as server:
        samples, found = soak.soak(server, made, 60 * chosen.minutes, chosen.at_once, A_ROUND)
        churn.settled(server, made, found, ROOM)
        found.check((code := server.end()) == 0, f"exit code {code}")
    grown = soak.drift(samples)
    for name, share in grown.items():
        found.check(abs(share) <= soak.MOST, f"the {name}'s memory is another by {share:.1%}")
    ends = ", ".join(f"{name} {samples[-1][name] >> 20:,} MiB ({share:+.1%})" for name, share in grown.items())
    what = (
        f"soak: {A_ROUND * len(samples):,} requests in {found.seconds / 60:.0f} min, {chosen.at_once} at once; {ends}"
    )
    return _told(what, found.faults)


def _hit(hit: Callable[[Target, int, float], Outcome], chosen: argparse.Namespace, folder: Path) -> bool:
    made = models.made(folder, variants=6, questions=QUESTIONS)
    with started(made, folder, room=ROOM) as server:
        target = Target(server.popen, server.engine.pid, server.address, _questions(made), KEY)
        found = hit(target, chosen.at_once, 5)
        if server.lines("bug"):
            found.faults.append("a bug is in the log")
    told = ", ".join(f"{count:,} {how}" for how, count in sorted(found.answers.items()))
    return _told(
        f"{hit.__name__}: {told}; /ready 503 after {found.ready_s:.2f} s, exit code {found.code}", found.faults
    )


def _questions(made: Models) -> Callable[[int], tuple[dict[str, Any], str]]:
    """One after the other, for all models."""
    known = [(name, question) for question in made.questions for name in (BASE, *made.variants)]

    def ask(number: int) -> tuple[dict[str, Any], str]:
        name, question = known[number % len(known)]
        body = {"model": name, "prompt": question.prompt, "max_tokens": question.tokens, "temperature": 0}
        return body, made.answers[name, question]

    return ask


def _drained(chosen: argparse.Namespace, folder: Path) -> bool:
    return _hit(faults.drained, chosen, folder)


def _killed(chosen: argparse.Namespace, folder: Path) -> bool:
    return _hit(faults.killed, chosen, folder)


def _slow(chosen: argparse.Namespace, folder: Path) -> bool:
    with served(limits=Limits(header_s=1, body_s=1, write_s=1)) as live:
        told, wrong = slow.endured(live, each=-(-chosen.connections // len(slow.WAYS)), within_s=300)
    what = ", ".join(f"{count:,} {how}" for how, count in sorted(told.items()))
    return _told(f"slow: {what}", wrong)


def _fuzz(chosen: argparse.Namespace, folder: Path) -> bool:
    found = fuzz.fuzzed(chosen.inputs)
    what = ", ".join(f"{count:,} x {status}" for status, count in sorted(found.statuses.items()))
    return _told(f"fuzz: {what}", found.faults)


PARTS: dict[str, Callable[[argparse.Namespace, Path], bool]] = {
    "churn": _churn,
    "drained": _drained,
    "killed": _killed,
    "slow": _slow,
    "fuzz": _fuzz,
    "soak": _soak,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--requests", type=int, default=10_000, help="of churn")
    parser.add_argument("--at-once", type=int, default=256, help="of churn, drained and killed")
    parser.add_argument("--connections", type=int, default=70, help="of slow")
    parser.add_argument("--minutes", type=float, default=30, help="of soak")
    parser.add_argument("--inputs", type=int, default=200_000, help="of fuzz")
    chosen = parser.parse_args()
    good = []
    for name in chosen.parts or [one for one in PARTS if one != "soak"]:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            good.append(PARTS[name](chosen, Path(folder)))
        print(f"    ({name}: {time.perf_counter() - begin:.0f} s)", flush=True)
    print("everything holds" if all(good) else f"{good.count(False)} of {len(good)} parts FAILED")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
