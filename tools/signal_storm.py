"""Sends signals at random moments to runs of the command line: `python tools/signal_storm.py --runs 300`.

One to three of SIGINT, SIGTERM and SIGHUP, often within 50 ms, at any moment of a run: while modules are imported,
while it works, while it ends. A run must end with 2 and one line, or with 0 if its work was done; what it leaves must
be whole or nothing. Prints what it counted; exit code 1 if a run did anything else. tests/cli/test_signals.py does a
few.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "registry" / "demo"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PYTHON_STARTS = 0.4
"""Seconds in which a signal may come before Python runs a line of ours, on a busy machine; it then ends by default."""


def commands(work: Path) -> dict[str, list[str]]:
    """A name -> what is run, each into a place of its own below `work`."""
    out, pair = str(work / "out"), [str(DEMO / "base"), str(DEMO / "palindrome")]
    return {
        "compress": ["compress", *pair, "--recipe", "lossless", "--out", out, "--device", "cpu"],
        "calibrated": ["compress", *pair, "--recipe", "int2-24", "--out", out, "--device", "cpu", "--samples", "8",
                       "--calibration", str(DEMO / "data" / "palindrome" / "train.jsonl")],
        "analyze": ["analyze", *pair],
        "zoo add": ["zoo", "add", str(DEMO / "base"), "demo/base", "--zoo", str(work / "zoo")],
        "help": ["compress", "--help"],
    }  # fmt: skip


def run(argv: list[str], draw: random.Random, longest: float) -> tuple[int, str, float]:
    """(exit code, stderr, seconds until the first signal) of one run under fire."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deltacompress", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait = draw.uniform(0.1, longest)
    time.sleep(wait)
    for _ in range(draw.randint(1, 3)):
        process.send_signal(draw.choice(SIGNALS))
        time.sleep(draw.choice((0, 0.005, 0.05, 0.3)))
    _, told = process.communicate(timeout=120)
    return process.returncode, told, wait


def before_ours(code: int, told: str, wait: float) -> bool:
    """Whether the signal came before Python ran a line of ours: it ends by default, or in a traceback of its own."""
    if "Traceback" in told:
        return "deltacompress" not in told
    return code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP) and wait < PYTHON_STARTS


def wrong(code: int, told: str, out: Path) -> str | None:
    """What is wrong with how a run ended."""
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    if "Traceback" in told or "Exception ignored" in told:
        return "a traceback"
    if code == 0:
        return "an error, and exit code 0" if errors else None
    if code != 2 or len(errors) != 1 or "interrupted" not in errors[0]:
        return f"exit code {code}"
    if out.exists() and "published whole" not in errors[0] and not (out / "manifest.json").is_file():
        return "half of an artifact"
    return None


def storm(runs: int, seed: int, longest: float) -> tuple[Counter[str], list[str]]:
    """Counts by command and exit code, and what was wrong."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children would inherit that it is ignored
    draw, counts, failures = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as place:
        empty, work = Path(place, "empty"), Path(place, "work")
        subprocess.run([sys.executable, "-m", "deltacompress", "zoo", "init", str(empty), "-q"], check=True)
        for _ in range(runs):
            shutil.copytree(empty, work / "zoo")
            name, argv = draw.choice(list(commands(work).items()))
            code, told, wait = run(argv, draw, 0.6 if name == "help" else longest)
            if before_ours(code, told, wait):
                counts["(while Python itself started)"] += 1
            else:
                counts[f"{name}: exit code {code}"] += 1
                if problem := wrong(code, told, work / "out"):
                    failures.append(f"{name}, signal after {wait:.2f} s: {problem}: {told!r}")
            shutil.rmtree(work)
    return counts, failures


def main() -> int:
    """Run the storm and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds until the first signal, at most")
    given = parser.parse_args()
    counts, failures = storm(given.runs, given.seed, given.longest)
    for what, count in sorted(counts.items()):
        print(f"{count:5} {what}")
    for failure in failures:
        print(failure)
    print(f"{given.runs} runs, {len(failures)} ended otherwise than they should")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
