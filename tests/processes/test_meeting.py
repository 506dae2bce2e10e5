"""How processes meet: within a time, one group at a time, and none that nobody leaves."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deltacompress.errors import BackendError
from deltacompress.processes import meeting
from deltacompress.processes.meeting import Place, RanksParted, meet

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """No group, and a place that is free."""
    yield
    assert not dist.is_initialized()
    gc.collect()
    assert Place.taken() is None


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A group is made once this is set, and until then hangs as NCCL's first connection does."""
    event = threading.Event()
    make = meeting._make_group

    def hangs(size: int, rank: int, device: torch.device, where: Path) -> None:
        event.wait(30)
        make(1, rank, torch.device("cpu"), where)

    monkeypatch.setattr(meeting, "_make_group", hangs)
    yield event
    event.set()
    until(lambda: Place.taken() is None)


def until(true: Callable[[], bool]) -> None:
    """It is, soon."""
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.timeout(60)
def test_a_gpu_waits_for_a_time(connects: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_MEETING", timedelta(seconds=1))
    place = Place.take("tp", "give 1")
    with pytest.raises(RanksParted, match="have not met within 1 seconds"):
        meet(2, 0, GPU, tmp_path / "meeting")
    place.leave()
    with pytest.raises(BackendError, match=r"^tp: this process meets, .* already; give 1, or do it in a process"):
        Place.take("tp", "give 1")  # what hangs would come between
    connects.set()  # and makes a group that nobody wants any more
    until(lambda: Place.taken() is None)
    assert not dist.is_initialized()
    Place.take("tp", "give 1").leave()


@pytest.mark.timeout(60)
def test_a_gpu_hears_of_the_others(connects: threading.Event, tmp_path: Path) -> None:
    """And of Ctrl-C, in the same way."""
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    place = Place.take("tp", "give 1")
    with pytest.raises(KeyboardInterrupt):
        meet(2, 0, GPU, tmp_path / "meeting", check)
    place.leave()
    assert not connects.is_set()


@pytest.mark.timeout(60)
def test_a_gpu_meets(connects: threading.Event, tmp_path: Path) -> None:
    connects.set()
    place = Place.take("tp", "give 1")
    meet(1, 0, GPU, tmp_path / "meeting")
    assert dist.is_initialized()
    place.leave()
    place.leave()


def test_what_goes_wrong_with_a_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RanksParted("no way there")

    monkeypatch.setattr(meeting, "_make_group", fails)
    with pytest.raises(RanksParted, match="no way there"):
        meet(2, 1, GPU, tmp_path / "meeting")


def test_a_place_that_was_left_meets_nobody() -> None:
    place = Place.take("tp", "give 1")
    with place.meets():
        place.leave()  # on another thread, as it were
        assert Place.taken() is place
    assert Place.taken() is None
    with pytest.raises(RanksParted, match="left already"):
        place.meets().__enter__()


def test_a_place_is_its_owner_s(tmp_path: Path) -> None:
    """Who has left leaves no group of another's."""
    first = Place.take("tp", "give 1")
    first.leave()
    second = Place.take("tp", "give 1")
    meet(1, 0, torch.device("cpu"), tmp_path / "meeting")
    first.leave()
    assert dist.is_initialized()
    second.leave()
    dropped = Place.take("tp", "give 1")
    del dropped
    Place.take("tp", "give 1").leave()


def test_a_group_of_another_library_stays(tmp_path: Path) -> None:
    place = Place.take("tp", "give 1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RanksParted, match="twice"):
        meet(1, 0, torch.device("cpu"), tmp_path / "meeting")
    place.leave()
    assert dist.is_initialized()
    dist.destroy_process_group()
