"""The order of copies and computing, without a GPU: CUDA streams and torch's allocator, played through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from deltacompress.calibration.forwards.streams import HiddenStates


class Stream:
    """A queue of work: what is there runs in order, unless it waits. late: only once there is nothing else to do."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def put(self, work: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, work))
        self.gpu.run(self.gpu.late)

    def record_event(self) -> list[bool]:
        done: list[bool] = []
        self.put(lambda: done.append(True))
        return done

    def wait_event(self, done: list[bool]) -> None:
        self.put(lambda: None, lambda: bool(done))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Block:
    """Memory for one value; a GPU's belongs to a stream, which uses it again as soon as it is let go."""

    def __init__(self, owner: Stream | None, value: float | None = None) -> None:
        self.owner, self.value = owner, value
        self.tensors = 0


class Batch:
    """A tensor, as far as streams look at it."""

    def __init__(self, gpu: Gpu, block: Block) -> None:
        self.gpu, self.block = gpu, block
        block.tensors += 1

    def __del__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Its memory is used again once no other tensor lies there."""
        mine, self.block = self.block, Block(None)
        mine.tensors -= 1
        if mine.owner is not None and not mine.tensors:
            self.gpu.freed.append(mine)

    def detach(self) -> Batch:
        return Batch(self.gpu, self.block)

    def plus(self, more: float) -> Batch:
        mine, new = self.block, self.gpu.allocated()
        self.gpu.current.put(lambda: setattr(new, "value", None if mine.value is None else mine.value + more))
        return Batch(self.gpu, new)

    def copy_(self, other: Batch, *, non_blocking: bool) -> None:
        assert non_blocking
        mine, its = self.block, other.block
        self.gpu.current.put(lambda: setattr(mine, "value", its.value))


class Gpu:
    """Runs what is queued at once, but for one stream that is always late."""

    def __init__(self) -> None:
        self.late: Stream | None = None
        self.streams: list[Stream] = []
        self.freed: list[Block] = []
        self.current = self.computing = self.stream()

    def stream(self, _device: object = None) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def run(self, but: Stream | None = None) -> None:
        latest_last = sorted(self.streams, key=lambda one: one is self.late)
        while moved := [one for one in latest_last if one is not but and one.queue and one.queue[0][0]()]:
            moved[0].queue.pop(0)[1]()

    def allocated(self) -> Block:
        free = (block for block in self.freed if block.owner is self.current)
        block = next(free, None)
        if block is None:
            return Block(self.current)
        self.freed.remove(block)
        self.current.put(lambda: setattr(block, "value", None))  # so that nobody finds there what was there before
        return block

    def empty_like(self, _batch: Batch, *, device: torch.device | str, pin_memory: bool = False) -> Batch:
        assert pin_memory == (device == "cpu")
        return Batch(self, Block(None) if pin_memory else self.allocated())

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr("torch.cuda.Stream", gpu.stream)
    monkeypatch.setattr("torch.cuda.stream", gpu.on)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _device: gpu.current)
    monkeypatch.setattr("torch.empty_like", gpu.empty_like)
    return gpu


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_whichever_stream_is_late_each_batch_is_what_was_put_there(gpu: Gpu, share: float, late: int) -> None:
    stream: Any = HiddenStates(torch.device("cuda"), host_share=share)
    gpu.late = gpu.streams[late]  # the one that computes, fetches, stores
    for k in range(7):
        stream.append(Batch(gpu, Block(gpu.computing, float(k))))
    seen = []
    for turn in range(3):
        stream[6]  # as a layer begins: with the last one
        for k in range(7):
            hidden = stream[k]
            seen.append((turn, k, hidden.plus(0)))
            stream[k] = hidden.plus(100)
            del hidden
    gpu.run()
    assert [one.block.value for _, _, one in seen] == [100.0 * turn + k for turn, k, _ in seen]
    assert not any(one.queue for one in gpu.streams)
    after = [one.plus(0) for one in stream]
    gpu.run()
    assert [one.block.value for one in after] == [300.0 + k for k in range(7)]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_whoever_is_handed_what_was_kept_may_let_its_memory_go(gpu: Gpu, late: int) -> None:
    stream: Any = HiddenStates(torch.device("cuda"), host_share=1.0)
    gpu.late = gpu.streams[late]
    for k in range(5):
        stream.append(Batch(gpu, Block(gpu.computing, float(k))))
    for turn in range(3):
        for k in range(5):
            stream.replace(k, stream[k].plus(10), keep=True)
            kept = stream[k]
            kept.let_go()
            Batch(gpu, gpu.allocated()).plus(turn)  # lies there if it may
    gpu.run()
    after = [one.plus(0) for one in stream]
    gpu.run()
    assert [one.block.value for one in after] == [30.0 + k for k in range(5)]


def test_copies_under_way_hold_up_nothing_else(gpu: Gpu) -> None:
    stream: Any = HiddenStates(torch.device("cuda"), host_share=0.5)
    for k in range(6):
        stream.append(Batch(gpu, Block(gpu.computing, float(k))))
    gpu.late = stream._storing
    stream[1] = Batch(gpu, Block(gpu.computing, 50.0))
    here, there = stream[2].plus(0), stream[3].plus(0)
    assert not gpu.computing.queue  # nobody waits for the store of another
    assert gpu.late.queue
    assert (here.block.value, there.block.value) == (2.0, 3.0)
    gpu.run()
    gpu.late = stream._fetching
    here = stream[4].plus(0), stream[5].plus(0), stream[0].plus(0)  # 5 is there already
    assert gpu.late.queue  # and 1 is not
    assert not gpu.computing.queue
    assert [one.block.value for one in here] == [4.0, 5.0, 0.0]
    last = stream[1].plus(0)
    assert gpu.computing.queue
    gpu.run()
    assert last.block.value == 50.0


@pytest.mark.parametrize("late", ["_fetching", "_storing"])
def test_memory_of_a_stream_that_is_dropped_waits_for_its_copies(gpu: Gpu, late: str) -> None:
    """One batch is on its way to the device, and others to the host, when nobody wants them any more."""
    stream: Any = HiddenStates(torch.device("cuda"), host_share=1.0)
    for _ in range(4):
        stream.append(Batch(gpu, Block(gpu.computing, 0.0)))
    gpu.run()
    gpu.late = getattr(stream, late)
    for k in range(3):
        stream[k] = stream[k].plus(1)
    assert gpu.late.queue
    del stream
    taken = [block for block in gpu.freed if block.owner is gpu.computing]
    for block in taken:
        gpu.computing.put(partial(setattr, block, "value", 50.0))
    gpu.run()
    assert taken
    assert [block.value for block in taken] == [50.0] * len(taken)
