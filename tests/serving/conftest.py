"""Servers over the stub engine, for all tests of the room."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving.harness import ADMIN_KEY, API_KEY, SCRIPT, STUB, Live, Process, served

from deltacompress.serving.keys import Key
from deltacompress.serving.settings import Limits


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """One for all who leave it as it was."""
    with served() as found:
        yield found


@pytest.fixture(scope="session")
def guarded() -> Iterator[Live]:
    """One with keys."""
    keys = {"api_keys": (Key(API_KEY.encode(), "one"),), "admin_key": Key(ADMIN_KEY.encode())}
    with served(**keys, limits=Limits(body_bytes=100_000)) as found:
        yield found


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[subprocess.Popen[str]] = []

    def start(base: str = "/models/tiny", drain: float = 20, *, waits: bool = True, **limits: float) -> Process:
        log = tmp_path / f"log-{len(made)}"  # a pipe that nobody empties would hold the server up
        argv = [sys.executable, "-c", SCRIPT, STUB[1], base, str(drain), json.dumps(limits)]
        with log.open("wb") as told:
            popen = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=told, text=True)
        made.append(popen)
        assert popen.stdout is not None
        return Process(popen, popen.stdout.readline().strip() if waits else "", log)

    yield start
    for one in made:
        one.kill()
        one.communicate()
