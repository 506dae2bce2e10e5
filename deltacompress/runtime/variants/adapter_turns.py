"""Rotations of an adapter's modules, several at once on the GPU that serves them.

A CPU takes milliseconds to invert the blocks of one module, and threads that do it wait for each other's memory: of
BOFT on q, k, v and o of a 7B it is most of what loading takes. A GPU does those of some modules in one: of modules
alike blocks lie one after the other and know nothing of each other, so what comes out is what each alone gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from deltacompress.adapters.records import Change
from deltacompress.checkpoints.header import TensorSpan
from deltacompress.numerics.adapters.butterfly import Rotation, rotations
from deltacompress.runtime.variants.variant import Memory

_AT_ONCE = 4 << 20
"""Bytes of parameters: what is made of them on the way, in float64, takes many times as much of the GPU."""


def turns_of(
    changes: Iterable[Change],
    tensors: Mapping[str, TensorSpan],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    memory: Memory,
    threads: Executor,
    device: torch.device,
) -> dict[str, list[Rotation]]:
    """What `butterfly.rotations` gives of each module's parameters, by their name: of `dtype`, in `memory`.

    read: a tensor of the file, by any thread. Work of the device's current stream, which is waited for at the end.
    Of what it has no room for, nothing: who asks for that makes it on the CPU.
    """
    spans = [tensors[change.rotation.R] for change in changes if change.rotation is not None]
    found: dict[str, list[Rotation]] = {}
    try:
        for some in _alike(spans):
            names = [span.info.name for span in some]
            together = torch.cat([one.to(device, non_blocking=True) for one in threads.map(read, names)], dim=1)
            made = [replace(turn, blocks=_on_host(turn.blocks.to(dtype), memory)) for turn in rotations(together)]
            apart = [turn.blocks.chunk(len(names)) for turn in made]
            for k, name in enumerate(names):
                found[name] = [replace(turn, blocks=own[k]) for turn, own in zip(made, apart, strict=True)]
    except RuntimeError as error:
        # libraries that torch calls tell it otherwise: CUBLAS_STATUS_ALLOC_FAILED when a handle is made, say
        if not isinstance(error, torch.OutOfMemoryError) and "_ALLOC_FAILED" not in str(error):
            raise
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return found


def _alike(spans: Iterable[TensorSpan]) -> Iterator[list[TensorSpan]]:
    """Those of one shape, as many as are made at once, in the order of the file among themselves."""
    by_shape = sorted(spans, key=lambda span: (span.info.shape, span.begin))
    for _, group in groupby(by_shape, key=lambda span: span.info.shape):
        own = list(group)
        count = max(1, _AT_ONCE // own[0].info.nbytes)
        yield from (own[k : k + count] for k in range(0, len(own), count))


def _on_host(blocks: Tensor, memory: Memory) -> Tensor:
    """A copy in `memory`, on its way there."""
    return memory(blocks.nbytes).view(blocks.dtype).view(blocks.shape).copy_(blocks, non_blocking=True)
