"""Runs command lines in children of one process that has imported everything, and tells what each of them took.

`python forked.py` reads JSON lists of arguments from stdin, a line each, and answers with a line of JSON: exit code
(None: killed after `TIMEOUT`), seconds, bytes of memory beyond those that the child began with, and its stderr.
A child costs milliseconds, where a process of its own would import torch for seconds.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

TIMEOUT = 60.0
ROOM = 2 << 30
"""Bytes of address space that a child may take on top: a guard for the machine, no bound to be tested."""


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    code: int | None
    seconds: float
    memory: int
    stderr: str


def usable() -> bool:
    """Whether this system tells what a process took."""
    return os.access("/proc/self/clear_refs", os.W_OK)


class Forked:
    """The process; a context manager."""

    def __enter__(self) -> Forked:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, *argv: str | Path) -> Outcome:
        """Run `deltacompress ARGV` in a child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(one) for one in argv]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _child(argv: list[str], stderr: int, report: int) -> None:
    from deltacompress.cli.main import main

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    code = main(argv)
    sys.stderr.flush()
    peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    os.write(report, json.dumps([code, peak * 1024 - before]).encode())


def _serve() -> None:
    for module in ("compression.driver", "evaluation", "interop", "runtime.face", "zoo.entries.linking", "cli.main"):
        import_module(f"deltacompress.{module}")
    for line in sys.stdin:
        argv = json.loads(line)
        with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as report:
            begun = time.monotonic()
            child = os.fork()
            if not child:
                try:
                    _child(argv, stderr.fileno(), report.fileno())
                finally:
                    os._exit(0)
            killed = False
            while not os.waitpid(child, os.WNOHANG)[0]:
                if not killed and time.monotonic() - begun > TIMEOUT:
                    os.kill(child, 9)
                    killed = True
                time.sleep(0.002)
            seconds = time.monotonic() - begun
            stderr.seek(0)
            report.seek(0)
            raw = report.read()
            code, memory = json.loads(raw) if raw else (None, 0)
            told = stderr.read().decode(errors="replace")
        print(json.dumps({"code": code, "seconds": seconds, "memory": memory, "stderr": told}), flush=True)


if __name__ == "__main__":
    _serve()
