"""The byte budget: least recently used out first, never what is in use, and the numbers in the message."""

from __future__ import annotations

import threading

import pytest
import torch
from runtime_cases import Served, Stream, as_on_a_gpu, assert_close, oracle_logits, random_ids

from deltacompress.errors import BackendError
from deltacompress.runtime import Runtime
from deltacompress.runtime.cache.residents import Residents


def small(trio: dict[str, Served], share: float) -> Runtime:
    """A runtime with a budget of `share` variants, all of which have the same size when decoded."""
    whole = Runtime.from_base(trio["a"].pair.base)
    whole.load(trio["a"].artifact, "a")
    runtime = Runtime.from_base(trio["a"].pair.base, budget_bytes=int(share * whole.variants["a"].nbytes))
    for name, one in trio.items():
        runtime.load(one.artifact, name)
    return runtime


def resident(runtime: Runtime) -> list[str]:
    return [name for name, one in runtime.variants.items() if one.installed]


@pytest.mark.parametrize(
    ("sizes", "budget", "count"),
    [
        ([30], 94, 3),
        ([30, 26], 94, 3),  # whichever they are
        ([30, 26, 0], 94, 3),  # one that is the base takes nothing
        ([40], 84, 2),
        ([33], 100, 3),  # they need nearly all of it
        ([30, 20], 100, None),  # three or five
        ([51], 100, None),  # one
        ([101], 100, None),
        ([0], 100, None),
        ([], 100, None),
    ],
)
def test_a_budget_is_kept_to_whole_variants(sizes: list[int], budget: int, count: int | None) -> None:
    residents = Residents(9, 100)
    assert residents.keep_to_whole(sizes) == (None if count is None else (count, budget))
    assert residents.budget_bytes == residents.coming_bytes == budget


def test_least_recently_used_goes_first(trio: dict[str, Served]) -> None:
    runtime = small(trio, 2.1)
    assert resident(runtime) == ["b", "c"]
    ids = random_ids(5)
    runtime.logits([("b", ids)])
    found = runtime.logits([("a", ids)])[0]  # c is now the one that was not used for longest
    assert resident(runtime) == ["a", "b"]
    assert_close(found, oracle_logits(trio["a"].restored, ids))
    loads = runtime.cache.counters.loads
    runtime.logits([("a", ids), ("b", ids), (None, ids)])
    assert runtime.cache.counters.loads == loads
    assert runtime.cache.bytes_in_use <= runtime.cache.budget_bytes


def test_requests_wait_for_room(trio: dict[str, Served]) -> None:
    """Three variants through room for one: requests take turns, and come out as ever."""
    wide, narrow = small(trio, 3.1), small(trio, 1.1)
    requests = [(name, random_ids(4 + i, i)) for i, name in enumerate(["a", "b", None, "c", "a", "b"])]
    assert narrow.complete(requests, 8) == wide.complete(requests, 8)
    scored = [(name, ids, [5, 6]) for name, ids in requests]
    for one, other in zip(narrow.loglikelihood(scored), wide.loglikelihood(scored), strict=True):
        assert one.greedy == other.greedy
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
    assert len(resident(narrow)) == 1


def test_one_forward_needs_all_of_its_variants(trio: dict[str, Served]) -> None:
    runtime = small(trio, 1.1)
    with pytest.raises(BackendError, match=r"take \d+ bytes, the budget is \d+: no room for b; raise budget_bytes"):
        runtime.logits([("a", [5]), ("b", [5])])
    assert not any(one.users for one in runtime.variants.values())
    runtime.logits([("b", [5])])


def test_a_budget_too_small_for_one(trio: dict[str, Served]) -> None:
    runtime = Runtime.from_base(trio["a"].pair.base, budget_bytes=1000)
    with pytest.raises(BackendError, match=r"\d+ bytes as it is served, more than the whole budget of 1000; raise"):
        runtime.load(trio["a"].artifact)
    assert not runtime.variants


def test_unloading_gives_everything_back(trio: dict[str, Served]) -> None:
    runtime = small(trio, 3.1)
    before = runtime.logits([(None, [5, 6])])[0]
    for name in list(runtime.variants):
        runtime.unload(name)
    assert runtime.cache.bytes_in_use == 0
    assert runtime.logits([(None, [5, 6])])[0].equal(before)
    runtime.load(trio["b"].artifact, "again")
    assert runtime.variants["again"].slot == 1


def test_what_arrived_for_nobody_can_leave(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small(trio, 3.1)
    runtime = Runtime.from_base(trio["a"].pair.base, budget_bytes=int(1.1 * whole.variants["a"].nbytes))
    as_on_a_gpu(monkeypatch, runtime)
    runtime.load(trio["a"].artifact, "a")
    runtime.load(trio["b"].artifact, "b")
    ids = random_ids(4)
    assert_close(runtime.logits([("b", ids)])[0], oracle_logits(trio["b"].restored, ids))
    assert resident(runtime) == ["b"]


@pytest.mark.parametrize("host_share", [None, 1.1, 0.0])
def test_loads_beside_running_requests(
    trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch, host_share: float | None
) -> None:
    wide, narrow = small(trio, 3.1), small(trio, 2.1)
    size = wide.variants["a"].nbytes
    cache = narrow.cache
    as_on_a_gpu(monkeypatch, narrow)
    trimming = cache._trim_host
    deciders: set[str] = set()
    monkeypatch.setattr(
        cache.arrivals, "_arrived", lambda keep=None: (deciders.add(threading.current_thread().name), trimming(keep))
    )
    cache.host_bytes = None if host_share is None else int(host_share * size)
    requests = [(name, random_ids(4 + i, i)) for i, name in enumerate(["a", "b", "c", None, "a", "c", "b"])]
    for _ in range(2):
        assert narrow.complete(requests, 10) == wide.complete(requests, 10)
        assert cache.bytes_in_use <= cache.budget_bytes
    assert cache.counters.loads > 4
    assert deciders == {threading.current_thread().name}
    held = [one for one in cache.variants.values() if one.sources is not None]
    assert len(held) == {None: 3, 1.1: 1, 0.0: 1}[host_share]  # the last one that came is always kept
    narrow.unload("a")
    narrow.load(trio["b"].artifact, "d")
    assert_close(narrow.logits([("d", [5, 6])])[0], wide.logits([("b", [5, 6])])[0], 1e-6)
    assert not any(one.users for one in cache.variants.values())


def test_memory_goes_back_after_its_last_use(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stream, which may be given the memory at once, waits before anything is let go."""
    runtime, done = small(trio, 3.1), []
    waiting = Stream()
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: "computing")
    monkeypatch.setattr(waiting, "wait_stream", done.append, raising=False)
    monkeypatch.setattr(runtime.cache.arrivals, "stream", waiting)
    monkeypatch.setattr(runtime.model, "uninstall", done.append)
    slot = runtime.variants["a"].slot
    runtime.unload("a")
    assert done == ["computing", slot]


def test_a_full_memory_is_told(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = small(trio, 2.1)

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("deltacompress.runtime.engine.forwards.run", no_memory)
    told = r"cpu is out of memory \(one forward over 1 sequences; base \d+ bytes, resident, in bytes: b \d+, c \d+\)"
    with pytest.raises(BackendError, match=told):
        runtime.logits([("b", [5])])
    monkeypatch.setattr("deltacompress.runtime.engine.scheduler.Scheduler.step", no_memory)
    with pytest.raises(BackendError, match=r"1 requests, max_batch 64; base"):
        runtime.complete([("b", [5])])
    assert not any(one.users for one in runtime.variants.values())


def test_what_goes_wrong_on_the_way_is_told(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = small(trio, 1.1)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("deltacompress.runtime.operands.operand.Operand.placed", no_memory)
    with pytest.raises(BackendError, match=r"out of memory while a variant is loaded \(resident, in bytes: .*"):
        runtime.logits([("a", [5])])
    monkeypatch.undo()
    assert_close(runtime.logits([("a", [5])])[0], oracle_logits(trio["a"].restored, [5]))
