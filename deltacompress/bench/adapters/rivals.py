"""What others do for a batch of many rotations: merged models in turn, the published design, dense rotations.

Computed of what the same run measures: the base's own step, and one module's work as often as a model has modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from deltacompress.bench import figures
from deltacompress.bench.adapters.directories import KINDS
from deltacompress.bench.adapters.served import Stand
from deltacompress.bench.decode import pinned_bandwidth, timed_steps

_STEPS, _TIMES = 12, 10
_BLOCK, _FACTORS = 32, 2


def rivals(stand: Stand, count: int, at_once: int) -> list[dict[str, Any]]:
    """Rows of `count` adapters: milliseconds in which each of `at_once` requests gets a token, or a few more of them,
    so that every adapter has as many.

    set_up_ms: what a batch takes before its first step, wherever requests came or went.
    """
    distinct = min(count, at_once)
    each = -(-at_once // distinct)
    served = distinct * each
    base, alone = (_base_ms(stand, rows) for rows in (served, each))
    modules = len(KINDS["boft"].modules) * stand.shape.layers
    made, turned = rebuilt(stand, distinct, each)
    found = [("merged models in turn, all resident", distinct * alone, 0.0)]
    if stand.on_gpu:
        swap = stand.runtime.model.base.checkpoint.nbytes / pinned_bandwidth(stand.device) * 1e3
        found.append(("merged models in turn, from pinned host memory", distinct * (alone + swap), 0.0))
    found.append(("rebuilt per batch", base + modules * turned, modules * made))
    found.append(("dense rotations", base + modules * dense(stand, distinct, each), 0.0))
    return [
        {
            "adapters": count,
            "rows": served,
            "what": what,
            "ms": ms,
            "set_up_ms": set_up,
            "tokens_s": served / ms * 1e3,
        }
        for what, ms, set_up in found
    ]


def rebuilt(stand: Stand, distinct: int, each: int) -> tuple[float, float]:
    """Milliseconds of one module: to make the layout and the blocks of a batch from host memory; and to turn its rows.

    As published: a factor is a product by blocks, after its features were put in order, of every row with its own.
    """
    hidden, dtype, device = stand.shape.hidden, stand.runtime.dtype, stand.device
    blocks = hidden // _BLOCK
    own = [torch.randn(_FACTORS, blocks, _BLOCK, _BLOCK).to(dtype) for _ in range(distinct)]
    own = [one.pin_memory() for one in own] if stand.on_gpu else own
    x = torch.randn(distinct * each, hidden, dtype=dtype, device=device)

    def make() -> tuple[torch.Tensor, list[torch.Tensor]]:
        orders = [_order(hidden, factor) for factor in range(_FACTORS)]
        return torch.stack(own, dim=1).to(device), [one.to(device) for one in orders]

    tensor, orders = make()

    def turn() -> torch.Tensor:
        rows = x
        for factor in range(_FACTORS):
            rows = rows[:, orders[factor]]
            parts = rows.view(distinct, each, blocks, _BLOCK).transpose(1, 2).reshape(-1, each, _BLOCK)
            rows = torch.bmm(parts, tensor[factor].view(-1, _BLOCK, _BLOCK))
            rows = rows.view(distinct, blocks, each, _BLOCK).transpose(1, 2).reshape(distinct * each, hidden)
            rows = rows[:, orders[factor].argsort()]
        return rows

    return _ms(make, stand), _ms(turn, stand)


def _order(features: int, factor: int) -> torch.Tensor:
    """In which a factor takes the features: its blocks hold two halves that lie 2^factor halves apart."""
    return torch.arange(features).view(-1, 2, 2**factor, _BLOCK // 2).transpose(1, 2).flatten()


def dense(stand: Stand, distinct: int, each: int) -> float:
    """Milliseconds of one module: rows by rotations that are whole matrices, in one batched product."""
    hidden, dtype = stand.shape.hidden, stand.runtime.dtype
    x = torch.randn(distinct, each, hidden, dtype=dtype, device=stand.device)
    rotations = torch.randn(distinct, hidden, hidden, dtype=dtype, device=stand.device)
    return _ms(lambda: torch.bmm(x, rotations), stand)


def _base_ms(stand: Stand, rows: int) -> float:
    """Of the base's own step with so many rows, with what the host does for it."""
    return figures.median(timed_steps(stand.runtime, stand.shape.vocabulary, [None] * rows, _STEPS)[1])


@torch.inference_mode()
def _ms(work: Callable[[], Any], stand: Stand) -> float:
    """Milliseconds by the host's clock, the device waited for: several runs at once, as steps follow each other."""

    def wait() -> None:
        if stand.on_gpu:
            torch.cuda.synchronize(stand.device)

    found = []
    for _ in range(4):
        wait()
        began = time.perf_counter()
        for _ in range(_TIMES):
            work()
        wait()
        found.append((time.perf_counter() - began) * 1e3 / _TIMES)
    return figures.median(found[1:])
