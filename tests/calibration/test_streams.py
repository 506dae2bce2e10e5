"""Hidden states on host and device; where they wait is decided by one rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from deltacompress.calibration.forwards.memory import Room, host_room
from deltacompress.calibration.forwards.streams import HiddenStates, host_share
from deltacompress.devices import free_bytes, limited_memory

CPU = torch.device("cpu")
SHARES = [0.0, 0.4, 0.5, 1.0]


def waiting_on_host(share: float, batches: int) -> list[int]:
    """Those that are copied, and not the very tensors that were given."""
    stream, given = HiddenStates(CPU, host_share=share), [torch.ones(1, 2, 2) for _ in range(batches)]
    for one in given:
        stream.append(one)
    return [k for k, one in enumerate(given) if stream._batches[k] is not one]


@pytest.mark.parametrize("share", SHARES)
def test_batches_come_back_in_order_and_can_be_replaced(share: float) -> None:
    stream = HiddenStates(CPU, host_share=share)
    batches = [torch.full((size, 3, 2), float(k)) for k, size in enumerate((4, 4, 4, 4, 1))]
    for batch in batches:
        stream.append(batch.clone())
    assert len(stream) == 5
    for turn in range(3):
        assert all(torch.equal(a, b + turn) for a, b in zip(stream, batches, strict=True))
        for k in range(5):
            stream[k] = stream[k] + 1
    with pytest.raises(IndexError):
        stream[5]


@pytest.mark.parametrize("share", SHARES)
def test_a_batch_that_is_replaced_after_it_was_fetched_ahead_is_the_new_one(share: float) -> None:
    stream = HiddenStates(CPU, host_share=share)
    for k in range(5):
        stream.append(torch.full((2, 3, 2), float(k)))
    for k in range(5):
        before = stream[k]  # whichever comes next is on its way now
        for other in range(5):
            stream[other] = torch.full((2, 3, 2), float(10 * k + other))
        assert before.unique().tolist() == [float(k if k == 0 else 10 * (k - 1) + k)]
        assert [one.unique().tolist() for one in stream] == [[10.0 * k + other] for other in range(5)]


def test_one_that_is_kept_is_not_fetched_until_it_was_asked_for_once() -> None:
    stream = HiddenStates(CPU, host_share=0.5)
    for k in range(4):
        stream.append(torch.full((2, 3, 2), float(k)))
    assert waiting_on_host(0.5, 4) == [1, 3]
    given = [torch.full((2, 3, 2), 10.0 + k) for k in range(4)]
    for k in range(4):
        stream.replace(k, given[k], keep=k in (0, 3))
    assert stream.keeps
    assert stream[2] is given[2]
    assert sorted(stream._coming) == [1]  # and not 3, which comes before it
    assert stream[3] is given[3]
    assert not stream.keeps
    again = stream[3]
    assert again is not given[3]
    assert torch.equal(again, given[3])
    stream.replace(3, given[3], keep=True)
    stream[3] = given[1]
    assert not stream.keeps
    stream.replace(1, given[2], keep=True)
    stream.forget_kept()
    assert [one.unique().tolist() for one in stream] == [[10.0], [12.0], [12.0], [11.0]]


def test_the_next_one_that_waits_on_the_host_is_fetched_ahead() -> None:
    stream = HiddenStates(CPU, host_share=0.4)
    for k in range(5):
        stream.append(torch.full((2, 3, 2), float(k)))
    assert waiting_on_host(0.4, 5) == [2, 4]
    ahead = []
    for k in (0, 1, 2, 3, 4, 0):
        stream[k]
        ahead += list(stream._coming)
    assert ahead == [2, 2, 4, 4, 2, 2]
    stream[0]
    coming = stream._coming[2][0]
    stream[1]
    assert stream[2] is coming  # once, not anew with each batch before it


def test_the_only_one_on_the_host_is_not_fetched_again_while_it_is_at_hand() -> None:
    stream = HiddenStates(CPU, host_share=1.0)
    stream.append(torch.ones(2, 3, 4))
    stream[0]
    assert not stream._coming


def test_on_the_host_a_batch_keeps_its_memory() -> None:
    stream = HiddenStates(CPU, host_share=1.0)
    stream.append(torch.ones(2, 3, 4))
    where = stream._batches[0].data_ptr()
    stream[0] = torch.zeros(2, 3, 4)
    assert stream._batches[0].data_ptr() == where


@pytest.mark.parametrize(
    ("share", "batches", "expected"),
    [
        (0.0, 4, []),
        (0.25, 8, [3, 7]),
        (0.5, 5, [1, 3]),
        (0.75, 8, [1, 2, 3, 5, 6, 7]),
        (1.0, 4, [0, 1, 2, 3]),
        (0.1, 4, []),
    ],
)
def test_which_batches_wait_on_the_host(share: float, batches: int, expected: list[int]) -> None:
    assert waiting_on_host(share, batches) == expected


@pytest.mark.parametrize("share", [0.05, 0.3, 0.447, 2 / 3, 0.9])
def test_they_are_as_many_as_the_share_says_and_evenly_spread(share: float) -> None:
    found = waiting_on_host(share, 64)
    assert len(found) == int(64 * share)
    gaps = [b - a for a, b in pairwise(found)]
    assert max(gaps) - min(gaps) <= 1


def room_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *, free: int, allocated: int = 0) -> Room:
    """Of a GPU with so much free and allocated, keeping 320 bytes for the solver."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (free, 10**9))
    for kind in ("reserved", "allocated"):
        monkeypatch.setattr(f"torch.cuda.memory_{kind}", lambda _device: allocated)
    room = Room(torch.device("cuda"), features=4, hidden=2, tokens=1, note=print)
    assert room.free() == int(0.95 * (free + allocated)) - 4 * 5 * 4 * 4 - allocated
    return room


def test_never_on_a_cpu() -> None:
    assert host_share(Room(CPU, features=4, hidden=2, tokens=1, note=print), 2**60, 2**60) == 0


def test_the_share_is_what_a_layer_and_waiting_forwards_leave_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,000 bytes beside the layer, forwards that wait take half as much again as the streams."""
    room = room_on_a_gpu(monkeypatch, free=10_000)
    assert room.free() == 9_180
    assert host_share(room, 400, 1_180) == 0
    assert host_share(room, 3_200, 1_180) == 0
    assert host_share(room, 4_000, 1_180) == 0.5
    assert host_share(room, 4_000, 1_180 + 1_000) == 0.75
    assert host_share(room, 8_000, 1_180) == host_share(room, 4_000, 20_000) == 1


def test_no_more_waits_on_the_host_than_half_of_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.calibration.forwards.memory.free_host_bytes", lambda: 5_000)
    room = room_on_a_gpu(monkeypatch, free=10_000)
    assert host_share(room, 8_000, 1_180) == 2_500 / 8_000
    assert host_share(room, 8_000, 1_180, processes=2) == 1_250 / 8_000


def test_with_less_memory_no_smaller_share_waits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [host_share(room_on_a_gpu(monkeypatch, free=free), 4_000, 500) for free in range(500, 14_000, 100)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (1, 0)
    taken = [host_share(room_on_a_gpu(monkeypatch, free=9_000, allocated=one), 4_000, 500) for one in (0, 1_000, 3_000)]
    assert taken == sorted(taken)


@pytest.mark.parametrize(
    ("gigabytes", "hidden", "widest", "layer", "share"),
    [
        (140, 4096, 11008, 202, 0),
        (60, 4096, 11008, 202, 0),
        (48, 4096, 11008, 202, 0.16),
        (26, 4096, 11008, 202, 1),
        (80, 5120, 13824, 317, 0),
        (140, 8192, 28672, 856, 0),
        (80, 8192, 28672, 856, 0.97),
    ],
)
def test_the_shapes_of_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, hidden: int, widest: int, layer: int, share: float
) -> None:
    """Two streams of 256 x 2048 tokens; a layer of so many million parameters, and the teacher's."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (gigabytes * 10**9, gigabytes * 10**9))
    for kind in ("reserved", "allocated"):
        monkeypatch.setattr(f"torch.cuda.memory_{kind}", lambda _device: 0)
    monkeypatch.setattr("deltacompress.calibration.forwards.memory.free_host_bytes", lambda: 128 * 10**9)
    room = Room(torch.device("cuda"), features=widest, hidden=hidden, tokens=16384, note=print)
    assert host_share(room, 2 * 4 * 256 * 2048 * hidden, 2 * 4 * layer * 10**6) == pytest.approx(share, abs=0.01)


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (600, 1000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: 300)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _device: 100)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *_: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    device = torch.device("cuda")
    for limit, left in ((500, 400), (950, 800)):  # 100 are taken already, and no more can be had than is free
        with limited_memory(device, limit):
            assert free_bytes(device) == left
    assert free_bytes(device) == 800


def on_the_gpu(share: float, batches: int, edge: int = 1024) -> HiddenStates:
    """Batch k holds k + 1 everywhere."""
    torch.cuda._sleep(1)  # kernels are loaded when they first run, which waits for all others
    stream = HiddenStates(torch.device("cuda"), host_share=share)
    for k in range(batches):
        stream.append(torch.full((2, edge, edge), k / 2, device="cuda") * 2 + 1)
    torch.cuda.synchronize()
    return stream


@pytest.mark.gpu
@pytest.mark.parametrize("share", SHARES)
def test_on_a_gpu_batches_wait_in_pinned_memory(share: float) -> None:
    stream = on_the_gpu(share, 5, edge=64)
    on_host = waiting_on_host(share, 5)
    assert [k for k, batch in enumerate(stream._batches) if batch.is_pinned()] == on_host
    assert [k for k, batch in enumerate(stream._batches) if not batch.is_cuda] == on_host
    for _ in range(3):
        for k in range(5):
            stream[k] = stream[k] * 2
    assert all(batch.is_cuda and batch.unique().tolist() == [8.0 * (k + 1)] for k, batch in enumerate(stream))
    alone = on_the_gpu(share, 1, edge=64)
    for _ in range(8):
        before = alone[0]
        alone[0] = before * 2
    assert alone[0].unique().tolist() == [256.0]


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["computing", "fetching", "storing"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_whatever_is_late_each_batch_is_what_was_put_there(share: float, late: str) -> None:
    """Copies wait for what they copy and computing for copies, and no memory is used again before all are done."""
    stream = on_the_gpu(share, 6)
    streams = {"fetching": stream._fetching, "storing": stream._storing, "computing": torch.cuda.current_stream()}
    for _ in range(3):
        for k in range(6):
            hidden = stream[k]
            with torch.cuda.stream(streams[late]):
                torch.cuda._sleep(20_000_000)
            stream[k] = hidden * 2 + 1
            del hidden
    expected = [8.0 * (k + 1) + 7 for k in range(6)]
    found = [stream[k].clone() for k in range(6)]
    assert [one.unique().tolist() for one in found] == [[one] for one in expected]


@pytest.mark.gpu
def test_replaced_while_the_old_one_is_on_its_way() -> None:
    stream = on_the_gpu(1.0, 3)
    with torch.cuda.stream(stream._fetching):
        torch.cuda._sleep(200_000_000)
    stream[0]  # fetches 0, then 1 ahead, all late
    stream[1] = torch.full((2, 1024, 1024), 50.0, device="cuda")
    assert stream[1].unique().tolist() == [50.0]
    assert stream[0].unique().tolist() == [1.0]


@contextmanager
def held(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is put on this stream in the block, and after what is on it already, waits until the block ends."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert stream is not None
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    code, *_ = driver.cuStreamWaitValue32(stream.cuda_stream, gate.data_ptr(), 1, 0)
    assert code == driver.CUresult.CUDA_SUCCESS
    try:
        yield
    finally:
        gate.fill_(1)
        stream.synchronize()  # the gate is memory of this block


@pytest.mark.gpu
def test_a_copy_under_way_holds_up_no_other_batch() -> None:
    """Neither a store the fetch of another batch, nor a fetch a batch that is on the device."""
    stream = on_the_gpu(1.0, 3)
    with held(stream._storing):
        stream[0] = torch.full((2, 1024, 1024), 50.0, device="cuda")
        computed = stream[1] * 2
        torch.cuda.current_stream().synchronize()
        assert not stream._stored[0].query()
    assert computed.unique().tolist() == [4.0]  # not before: a kernel that is loaded there waits for the block's end
    assert stream[0].unique().tolist() == [50.0]
    stream = on_the_gpu(0.5, 4)
    assert waiting_on_host(0.5, 4) == [1, 3]
    with held(stream._fetching):
        computed = stream[0] * 2
        stream[0] = stream[0] * 2  # of another, 3 would come ahead in the place of 1, whose memory has to wait
        torch.cuda.current_stream().synchronize()
        [(_, arrived)] = stream._coming.values()
        assert arrived is not None
        assert not arrived.query()
    assert computed.unique().tolist() == [2.0]
    assert [one.unique().tolist() for one in stream] == [[2.0], [2.0], [3.0], [4.0]]


@pytest.mark.gpu
def test_a_limit_holds_and_ends() -> None:
    device = torch.device("cuda")
    with limited_memory(device, 256 << 20):
        assert free_bytes(device) <= 256 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 << 20, dtype=torch.uint8, device=device)
        assert host_share(Room(device, features=1, hidden=0, tokens=1, note=print), 256 << 20, 0) >= 0.5
    assert torch.empty(512 << 20, dtype=torch.uint8, device=device).is_cuda
    room = Room(device, features=1, hidden=0, tokens=1, note=print)
    assert host_share(room, 1, 0) == 0
    assert host_share(room, 2**60, 0) == pytest.approx(host_room() / 2**60, rel=0.1)


def test_some_sequences_are_of_the_last_batch_or_of_the_first_where_that_has_more() -> None:
    stream = HiddenStates(CPU)
    for size in (4, 4, 3):
        stream.append(torch.full((size, 2, 2), float(size + len(stream))))
    assert torch.equal(stream.some(2), stream[2][:2])
    stream.append(torch.zeros(1, 2, 2))
    assert torch.equal(stream.some(2), stream[0][:2])
    assert len(stream.some(9)) == 4
