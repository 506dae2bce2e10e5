"""The same on a GPU: packed deltas and adapters in one batch, decoded through CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from runtime.adapters.family import ADAPTERS, Family
from runtime_cases import assert_close, random_ids

from deltacompress.kernels import available
from deltacompress.runtime import Runtime

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
