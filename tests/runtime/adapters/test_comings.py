"""Adapters that come and go while requests run; as many as DELTACOMPRESS_COMINGS says."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import psutil
from runtime.adapters.family import Family
from runtime_cases import random_ids

from deltacompress.runtime import Runtime

COMINGS = int(os.environ.get("DELTACOMPRESS_COMINGS", "40"))
THREADS, REQUESTS = 4, 32


def test_adapters_come_and_go_while_requests_run(family: Family) -> None:
    """Four threads load and unload: no token is another, nothing of any stays; of many, not even memory."""
    runtime, kinds = Runtime.from_base(family.pair.base), [*family.kinds.items()]
    for name, kind in kinds:
        runtime.load(kind.path, name)
    names = islice(cycle([None, *family.kinds]), REQUESTS)
    requests = [(name, random_ids(3 + number % 5, number)) for number, name in enumerate(names)]
    alone = [one.tokens for one in runtime.complete(requests, 12)]

    def come_and_go(thread: int) -> int:
        own = [kinds[number % len(kinds)] for number in range(thread, COMINGS, THREADS)]
        for number, (_, kind) in enumerate(own):
            name = runtime.load(kind.path, f"{thread} {number}")
            runtime.unload(name)
        return len(own)

    before, memory = runtime.residency(), list[int]()
    for _ in range(2):  # the first fills what allocators keep
        with ThreadPoolExecutor(THREADS) as pool:
            coming = [pool.submit(come_and_go, thread) for thread in range(THREADS)]
            rounds = 0
            while rounds == 0 or not all(one.done() for one in coming):
                assert [one.tokens for one in runtime.complete(requests, 12)] == alone
                rounds += 1
            assert sum(one.result() for one in coming) == COMINGS
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
    after = runtime.residency()
    assert [one.name for one in after.variants] == [name for name, _ in kinds]
    assert (after.device_bytes, after.host_bytes, after.slots_taken) == (
        before.device_bytes,
        before.host_bytes,
        before.slots_taken,
    )
    assert after.loads > before.loads
    if COMINGS >= 500:
        assert abs(memory[1] - memory[0]) <= 0.01 * memory[0], memory
