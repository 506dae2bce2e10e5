"""The API's end of the engine, told by hand what its other end might say, in any order."""

from __future__ import annotations

import asyncio
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deltacompress.errors import ChecksumError, InputError
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.serving.channel import Place, Pulse
from deltacompress.serving.client import Client
from deltacompress.serving.group import Group, RefusedError
from deltacompress.serving.messages import (
    Accepted,
    Batch,
    Beat,
    Began,
    Failure,
    Over,
    Refused,
    Report,
    State,
    Submit,
    Token,
)
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.settings import Settings

WRONG = Failure("InputError", "too long", None, None)


def calls(*names: str) -> list[Submit]:
    return [Submit(name, None, "x", 3, Sampling(), (), None) for name in names]


def told(*reports: Report, names: tuple[str, ...] = ("a",)) -> tuple[Any, Client]:
    """What comes of calls: (prompt's tokens, texts, finishes), or why one was refused."""

    async def run() -> tuple[Any, Client]:
        client = Client(Settings(Path("/models/tiny")), Metrics())
        task = asyncio.create_task(client.submit(calls(*names), "tiny"))
        await asyncio.sleep(0)
        for report in reports:
            client._take(report)
        try:
            async with asyncio.timeout(5):
                return await heard(await task), client
        except RefusedError as error:
            return error.refused.reason, client

    return asyncio.run(run())


async def heard(group: Group) -> tuple[list[int], str, list[str]]:
    text, finishes = "", []
    async for happenings in group.happenings():
        text += "".join(one.text for _, one in happenings if isinstance(one, Token))
        finishes += [one.finish for _, one in happenings if isinstance(one, Over)]
    return group.prompt_tokens, text, finishes


EVENTS = Batch((Began("a", 0.1), Token("a", 5, "x"), Token("a", 6, "y"), Over("a", "length", 2)))


def test_a_call_may_end_before_it_is_said_to_be_taken() -> None:
    """Two threads tell of it."""
    for reports in ((Accepted("a", 7), EVENTS), (EVENTS, Accepted("a", 7))):
        found, client = told(*reports)
        assert found == ([7], "xy", ["length"])
        assert client.busy == 0
        assert b'requests_total{model="tiny",outcome="length"} 1.0' in client.metrics.text()


def test_a_call_may_be_cancelled_before_it_is_said_to_be_refused() -> None:
    over = Batch((Over("a", "cancelled", 0),))
    for reports in ((Refused("a", "context", WRONG), over), (over, Refused("a", "context", WRONG))):
        found, client = told(*reports)
        assert found == "context"
        assert client.busy == 0
        assert b'requests_total{model="tiny",outcome="refused"} 1.0' in client.metrics.text()
        assert b"cancelled" not in client.metrics.text()


def test_one_call_that_is_refused_ends_the_others() -> None:
    reports = (Accepted("a", 7), Refused("b", "full", WRONG), Batch((Over("a", "cancelled", 0),)))
    found, client = told(*reports, names=("a", "b"))
    assert found == "full"
    assert client.busy == 0


def test_what_nobody_asked_for_is_dropped() -> None:
    stranger = Batch((Token("z", 1, "?"), Over("z", "eos", 1)))
    found, _ = told(stranger, Accepted("z", 1), Accepted("a", 7), stranger, EVENTS, EVENTS)
    assert found == ([7], "xy", ["length"])


@pytest.mark.parametrize("report", [Beat(3), State(0, 0, ()), EVENTS])
def test_an_engine_that_says_anything_lives(report: Report) -> None:
    pulse = Pulse(silent_s=10, step_s=100)
    for step in range(100):
        pulse.heard(Beat(step))
        pulse.heard(report)
        assert [pulse.tick() for _ in range(20)] == [None] * 20
    assert pulse.tick() == "has not answered for 10 seconds"
    assert pulse.tick_s == 0.5


def test_a_step_that_does_not_end_is_seen_however_much_is_told() -> None:
    """Of the same number; one after another may take as long together as they like."""
    pulse = Pulse(silent_s=10, step_s=100)

    def looked(step: int, times: int) -> list[str | None]:
        found = []
        for _ in range(times):
            pulse.heard(Beat(step))
            pulse.heard(State(0, 1, ()))
            found.append(pulse.tick())
        return found

    for step in (7, 8, 9):
        assert looked(step, 200) == [None] * 200
    assert looked(9, 1) == ["has not ended a step for 100 seconds"]
    assert looked(10, 200) == [None] * 200


def test_sockets_lie_where_nobody_else_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o700
    place.close()
    assert not place.path.exists()
    for where, words in ((tmp_path / ("x" * 100), "too long"), (Path("/no/such/place"), "No such file")):
        monkeypatch.setattr(tempfile, "tempdir", str(where))
        with pytest.raises(InputError, match=words):
            Place()


@pytest.mark.parametrize("error", [ChecksumError("differs", where="x", way_out="y"), InputError("odd \udcff path")])
def test_errors_cross(error: ChecksumError | InputError) -> None:
    found = Failure.of(error).error()
    assert type(found) is type(error)
    assert (found.where, found.way_out, found.exit_code) == (error.where, error.way_out, error.exit_code)
    assert found.what == error.what.replace("\udcff", "\\udcff")
