"""The reliability runs of the server, reduced, so that every run of the tests sees them work.

`python -m tests.serving.reliability` has them whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from serving.harness import Process, served
from serving.reliability import churn, faults, models, server, slow, soak
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


def test_rounds_of_clients_and_the_memory_after_each(tmp_path: Path) -> None:
    made = models.made(tmp_path, variants=2, questions=3)
    with server.started(made, tmp_path, "--max-batch", "16", room=1) as found:
        samples, seen = soak.soak(found, made, 0.1, at_once=16, each=40)
        churn.settled(found, made, seen, room=1)
        assert seen.faults == []
        assert seen.kinds.total() == 40 * len(samples) > 0
        for sample in samples:
            assert sample.keys() == {"server", "engine"}
            assert all(nbytes > 2**25 for nbytes in sample.values())
        assert found.end() == 0


def test_memory_is_compared_after_a_while_and_at_the_end() -> None:
    """Twelve rounds, of which the first two are not looked at: 100 and 102 then, 151 at last."""
    samples = [{"engine": nbytes} for nbytes in (1, 1, 100, 102, 5, 5, 5, 5, 5, 5, 150, 152)]
    assert soak.drift(samples) == {"engine": pytest.approx(151 / 101 - 1)}
    with pytest.raises(AssertionError, match="too few"):
        soak.drift(samples[:5])


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
