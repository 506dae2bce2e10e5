"""The same on a GPU: packed deltas and adapters in one batch, decoded through CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from runtime.adapters.family import ADAPTERS, Family
from runtime_cases import assert_close, give_pages, random_ids

from deltacompress.kernels import available
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import Batch, to_device
from deltacompress.runtime.engine.requests import Told
from deltacompress.runtime.engine.scheduler import Scheduler

pytestmark = pytest.mark.gpu
NAMES = [None, "int2-24", "int4-24", "lossless", *ADAPTERS, "rosa"]
PACKED = 1e-2
"""Share of the largest logit: packed deltas are not rounded."""


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """No tf32: what is compared is fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_all_kinds_in_one_batch(family: Family, backend: str, graphs: bool) -> None:
    if reason := available("cuda")[backend]:
        pytest.skip(reason)
    runtime = Runtime.from_base(family.pair.base, device="cuda", backend=backend, cuda_graphs=graphs)
    for name, kind in family.kinds.items():
        runtime.load(kind.path, name)
    requests = [(name, random_ids(11, seed)) for seed, name in enumerate(NAMES)]
    for (name, ids), found in zip(requests, runtime.logits(requests), strict=True):
        kind = family.base if name is None else family.kinds[name]
        assert_close(found.cpu(), kind.logits(ids), PACKED if "int" in (name or "") else 5e-5)
    for (name, ids), one in zip(requests, runtime.complete(requests, 16), strict=True):
        kind = family.base if name is None else family.kinds[name]
        assert "int" in (name or "") or kind.is_greedy(ids, one.tokens), name


def loaded(family: Family, **options: object) -> Runtime:
    made = Runtime.from_base(family.pair.base, device="cuda", dtype=torch.bfloat16, **options)
    for name, kind in family.kinds.items():
        made.load(kind.path, name)
    return made


@pytest.fixture(params=["triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if reason := available("cuda")[name]:
        pytest.skip(reason)
    return name


def test_graphs_change_nothing(family: Family, backend: str) -> None:
    """Also when adapters have come and gone, and slots hold others than when the first graphs were captured."""
    plain, graphed = (loaded(family, backend=backend, cuda_graphs=graphs) for graphs in (False, True))
    assert "adapters triton" in graphed.describe()
    requests = [(NAMES[i % len(NAMES)], random_ids(3 + i % 5, i)) for i in range(2 * len(NAMES))]
    for _ in range(2):
        assert graphed.complete(requests, 24) == plain.complete(requests, 24)
        for runtime in (plain, graphed):
            for name in ("lora", "boft b32 m2", "shira", "dora"):
                runtime.unload(name)
            for name in ("boft b32 m2", "dora", "lora", "shira"):
                runtime.load(family.kinds[name].path, name)


def test_no_order_and_no_neighbours_change_a_token_in_bf16(family: Family, backend: str) -> None:
    """Nor a bit of its logits, where only the order of the rows differs."""
    runtime, draw = loaded(family, backend=backend), random.Random(0)
    requests = [(name, random_ids(7, seed)) for seed, name in enumerate(NAMES)]
    count, told = len(requests), [one.tokens for one in runtime.complete(requests, 24)]
    logits = runtime.logits(requests)
    for _ in range(2):
        order = draw.sample(range(count), count)
        shuffled = [requests[i] for i in order]
        assert [one.tokens for one in runtime.complete(shuffled, 24)] == [told[i] for i in order]
        assert all(torch.equal(one, logits[i]) for i, one in zip(order, runtime.logits(shuffled), strict=True))
    for k, (name, ids) in enumerate(requests):
        names = [name] * count if k % 2 else draw.choices(NAMES, k=count)
        others = [(one, random_ids(7, 100 + draw.randrange(1000))) for one in names]
        at = draw.randrange(count)
        others[at] = (name, ids)
        assert runtime.complete(others, 24)[at].tokens == told[k], name


def test_kernels_are_no_worse_than_loops_in_bf16(family: Family, backend: str) -> None:
    """Against PEFT in fp32: at most twice the error of the same adapters as PyTorch's products in bf16."""
    served = [loaded(family, backend=one) for one in (backend, "reference")]
    requests = [(name, random_ids(24, seed)) for seed, name in enumerate([*ADAPTERS, "rosa"])]
    for (name, ids), ours, loops in zip(requests, *(one.logits(requests) for one in served), strict=True):
        exact = family.kinds[name].logits(ids).double()
        off, allowed = (float((logits.double().cpu() - exact).pow(2).mean().sqrt()) for logits in (ours, loops))
        assert off <= 2 * allowed, name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_device(family: Family, backend: str) -> None:
    runtime = loaded(family, backend=backend)
    scheduler = Scheduler(runtime.model, runtime.cache, Told(None), max_batch=len(NAMES))
    give_pages(scheduler, len(NAMES))
    slots = sorted(0 if name is None else runtime.variants[name].slot for name in NAMES)
    batch = Batch(slots, runtime.device)
    inputs = to_device([start + i for start in (5, 1, 1) for i in range(len(slots))], runtime.device)
    with torch.inference_mode():
        scheduler.decoder.forward_step(batch, inputs, 2)  # makes what is made at first use
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scheduler.decoder.forward_step(batch, inputs, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
