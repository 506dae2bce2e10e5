"""Hidden states on host and device; where they wait is decided by one rule."""

from __future__ import annotations

import pytest
import torch

from deltacompress.calibration.forwards.streams import DEVICE_SHARE, HiddenStates, should_wait_on_host
from deltacompress.devices import free_bytes, limited_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("on_host", [False, True])
def test_batches_come_back_in_order_and_can_be_replaced(on_host: bool) -> None:
    stream = HiddenStates(CPU, on_host=on_host)
    batches = [torch.full((size, 3, 2), float(size)) for size in (4, 4, 1)]
    for batch in batches:
        stream.append(batch.clone())
    assert len(stream) == 3
    assert all(torch.equal(a, b) for a, b in zip(stream, batches, strict=True))
    stream[1] = stream[1] * 2
    assert torch.equal(stream[1], batches[1] * 2)
    assert torch.equal(stream[0], batches[0])


def test_on_the_host_a_batch_keeps_its_memory() -> None:
    stream = HiddenStates(CPU, on_host=True)
    stream.append(torch.ones(2, 3, 4))
    where = stream[0].data_ptr()
    stream[0] = torch.zeros(2, 3, 4)
    assert stream[0].data_ptr() == where


def test_never_on_a_cpu() -> None:
    assert not should_wait_on_host(CPU, 2**60)


def test_the_rule_counts_cached_memory_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (600, 1000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: 300)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _device: 100)
    device = torch.device("cuda")
    assert not should_wait_on_host(device, int(DEVICE_SHARE * 800))
    assert should_wait_on_host(device, int(DEVICE_SHARE * 800) + 1)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *_: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    for limit, left in ((500, 400), (950, 800)):  # 100 are taken already, and no more can be had than is free
        with limited_memory(device, limit):
            assert free_bytes(device) == left
    assert free_bytes(device) == 800


@pytest.mark.gpu
def test_on_a_gpu_batches_wait_in_pinned_memory() -> None:
    device = torch.device("cuda")
    stream = HiddenStates(device, on_host=True)
    for k in range(4):
        stream.append(torch.full((2, 64, 64), float(k), device=device))
    assert all(batch.is_pinned() for batch in stream._batches)
    for _ in range(3):
        for k in range(4):
            stream[k] = stream[k] * 2
    assert all(batch.is_cuda and batch.unique().tolist() == [8.0 * k] for k, batch in enumerate(stream))
    alone = HiddenStates(device, on_host=True)
    alone.append(torch.ones(2, 64, 64, device=device))
    for _ in range(8):
        before = alone[0]
        alone[0] = before * 2
    assert alone[0].unique().tolist() == [256.0]


@pytest.mark.gpu
def test_a_limit_holds_and_ends() -> None:
    device = torch.device("cuda")
    with limited_memory(device, 256 << 20):
        assert free_bytes(device) <= 256 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 << 20, dtype=torch.uint8, device=device)
    assert torch.empty(512 << 20, dtype=torch.uint8, device=device).is_cuda
    assert not should_wait_on_host(device, 1)
    assert should_wait_on_host(device, 2**60)
