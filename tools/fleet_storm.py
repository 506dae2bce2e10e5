"""Kills fleets at random moments: `python tools/fleet_storm.py --kills 20`; with `--workers 2`, worker processes too.

A fleet of four jobs on the pairs that ship here, two of them published in a zoo, is killed by SIGKILL again and again:
the driver or, with several workers, one of them. Each time it is run again with --resume. In the end every artifact
must have the bytes of a fleet that nobody disturbed, whatever was published must never have been made again, every name
must have one version, and nothing else may be left. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "registry" / "demo"
PYTHON = [sys.executable, "-m", "deltacompress"]


def write_jobs(place: Path) -> list[Path]:
    """The jobs file of a fleet below `place`; where its artifacts go."""
    outs = [place / "out" / name for name in ("storm/one", "storm/two", "three", "four")]
    jobs = [
        {"model": str(DEMO / task), "calibration": str(DEMO / "data" / task / "train.jsonl"), "seed": seed}
        for seed in (0, 1)
        for task in ("palindrome", "majority")
    ]
    for job, out in zip(jobs, outs, strict=True):
        job |= {"name": f"storm/{out.name}"} if out.parent.name == "storm" else {"out": str(out)}
    whole = {"base": str(DEMO / "base"), "out": str(place / "out"), "zoo": str(place / "zoo"), "finetunes": jobs}
    whole["defaults"] = {"recipe": "int2-24", "samples": 16, "device": "cpu"}
    (place / "fleet.yaml").write_text(json.dumps(whole))  # which is YAML too
    subprocess.run([*PYTHON, "zoo", "init", str(place / "zoo"), "-q"], check=True)
    return outs


def files_of(directory: Path) -> dict[str, bytes]:
    """What lies in a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def workers_of(driver: int) -> list[int]:
    """Its child processes."""
    threads = Path(f"/proc/{driver}/task").glob("*/children")  # of each thread its own
    return [int(one) for path in threads for one in path.read_text().split()]


def alive(process: int) -> bool:
    """Whether it is there, and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Storm:
    """One fleet under fire."""

    def __init__(self, place: Path, workers: int, draw: random.Random) -> None:
        self.place, self.draw = place, draw
        self.outs = write_jobs(place)
        self.argv = [*PYTHON, "compress", "--jobs", str(place / "fleet.yaml"), "--workers", str(workers), "--resume"]
        self.published: dict[Path, int] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    def start(self) -> subprocess.Popen[str]:
        """A run of the fleet."""
        return subprocess.Popen([*self.argv, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def look(self) -> None:
        """What is published stays as it is: the same file, not one that was made again."""
        for out in self.outs:
            manifest = out / "manifest.json"
            if manifest.is_file():
                inode = manifest.stat().st_ino
                if self.published.setdefault(out, inode) != inode:
                    self.problems.append(f"{out.name} was published twice")

    def kill(self, wait: float) -> bool:
        """Run, and kill somebody after `wait` seconds; whether that came in time."""
        driver = self.start()
        time.sleep(wait)
        if driver.poll() is not None:
            self.counts["(ended before)"] += 1
            driver.communicate()
            return False
        workers = workers_of(driver.pid)
        whom = self.draw.choice(workers) if workers and self.draw.random() < 0.5 else driver.pid
        os.kill(whom, signal.SIGKILL)
        self.counts["driver" if whom == driver.pid else "worker"] += 1
        _, told = driver.communicate(timeout=300)
        if "Traceback" in told:
            self.problems.append(told)
        until = time.monotonic() + 10
        while any(map(alive, workers)) and time.monotonic() < until:
            time.sleep(0.05)
        if left := [one for one in workers if alive(one)]:
            self.problems.append(f"workers {left} outlived their driver")
        self.look()
        return True

    def finish(self) -> dict[str, object]:
        """The last run, which nobody disturbs."""
        done = subprocess.run([*self.argv, "--json"], capture_output=True, text=True, check=False)
        if done.returncode:
            self.problems.append(f"exit code {done.returncode}: {done.stderr}")
            return {}
        self.look()
        found: dict[str, object] = json.loads(done.stdout)
        return found

    def compare(self, calm: list[dict[str, bytes]]) -> None:
        """The bytes of a fleet that nobody disturbed, and nothing else."""
        for out, wanted in zip(self.outs, calm, strict=True):
            if files_of(out) != wanted:
                self.problems.append(f"{out.name} has other bytes")
        left = {path.name for path in (self.place / "out").rglob("*") if path.name.endswith(".partial")}
        if left:
            self.problems.append(f"left behind: {left}")
        told = subprocess.run(
            [*PYTHON, "zoo", "list", "--zoo", str(self.place / "zoo"), "--all-versions", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = json.loads(told.stdout)
        names = Counter(row["name"] for row in (rows["entries"] if isinstance(rows, dict) else rows))
        if set(names.values()) != {1} or len(names) != 2:
            self.problems.append(f"versions in the zoo: {dict(names)}")


def main() -> int:
    """Kill, resume, compare, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "calm").mkdir()
        calm = Storm(Path(place) / "calm", given.workers, draw)
        begun = time.monotonic()
        calm.finish()
        longest = time.monotonic() - begun
        wanted = [files_of(out) for out in calm.outs]
        problems, counts, rounds, left = list(calm.problems), Counter[str](), 0, given.kills
        while left > 0:
            (Path(place) / str(rounds)).mkdir()
            storm = Storm(Path(place) / str(rounds), given.workers, draw)
            for _ in range(min(left, 4)):  # all of one fleet, and then another one from the start
                left -= storm.kill(draw.uniform(0.2, 0.7) * longest)
            storm.finish()
            storm.compare(wanted)
            problems += storm.problems
            counts += storm.counts
            rounds += 1
    print(f"{rounds} fleets of 4 jobs, {given.workers} workers, {longest:.0f} s undisturbed; killed: {dict(counts)}")
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
