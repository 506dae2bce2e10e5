"""The reliability runs of the server, reduced, so that every run of the tests sees them work.

`python -m tests.serving.reliability` has them whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from serving.harness import Process, served
from serving.reliability import churn, faults, models, server, slow
from serving.reliability.faults import Outcome, Target
from serving.reliability.wire import Address

from deltacompress.serving.settings import Limits

Start = Callable[..., Process]


def test_a_real_server_under_load(tmp_path: Path) -> None:
    made = models.made(tmp_path, variants=5, questions=6)
    assert len(set(made.answers.values())) > 20
    with server.started(made, tmp_path, "--max-batch", "16", room=2) as found:
        seen = asyncio.run(churn.churn(found, made, requests=250, at_once=64))
        churn.settled(found, made, seen, room=2)
        assert seen.faults == []
        assert min(seen.kinds[kind] for kind in ("whole", "streams", "leaves", "nonsense")) > 5
        assert seen.finished.total() > 150
        assert found.end() == 0


@pytest.mark.parametrize("hit", [faults.drained, faults.killed])
def test_hit_under_load(process: Start, hit: Callable[[Target, int, float], Outcome]) -> None:
    started = process()
    target = Target(started.popen, started.engines[0], Address.of(started.url), faults.echoes())
    found = hit(target, 48, 0.5)
    assert found.faults == [], found.answers


def test_slow_and_dead_connections() -> None:
    with served(limits=Limits(header_s=0.5, body_s=0.5, write_s=0.5)) as live:
        told, wrong = slow.endured(live, each=1)
    assert wrong == [], told
