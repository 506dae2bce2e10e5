"""Runs of an adapter's file: tensors that lie side by side, which are read, scaled and looked at together.

LoRA of a 7B is hundreds of small matrices that are served as they are stored, B times a factor. To read each by itself
is mostly Python, which threads only wait for; of a run one call reads and one call looks at all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.adapters.records import Change
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.header import TensorSpan

_MOST = 4 << 20
"""Bytes of a run of several tensors: as many as page-locked memory comes in (operands/operand.py)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors of one dtype without a gap between them."""

    spans: tuple[TensorSpan, ...]

    @property
    def begin(self) -> int:
        """Where it begins in the file."""
        return self.spans[0].begin

    @property
    def nbytes(self) -> int:
        return sum(span.info.nbytes for span in self.spans)

    def served(self, content: Tensor, factors: Mapping[str, float]) -> dict[str, Tensor]:
        """Its tensors by name, times their factors, in place; none where one of their values is not finite.

        content: its bytes, uint8.
        """
        flat = content.view(DTYPES[self.spans[0].info.dtype])
        pieces = flat.split([span.info.numel for span in self.spans])
        found = {span.info.name: piece.view(span.info.shape) for span, piece in zip(self.spans, pieces, strict=True)}
        for name, one in found.items():
            if factors[name] != 1.0:
                one.mul_(factors[name])  # computed in float32, whatever its dtype
        return found if all(math.isfinite(bound) for bound in map(float, flat.aminmax())) else {}


def factors_of(changes: Iterable[Change], tensors: Mapping[str, TensorSpan], dtype: torch.dtype) -> dict[str, float]:
    """Name -> factor of the tensors that are served in the file's dtype, and as they are there but for a factor."""
    found: dict[str, float] = {}
    for change in changes:
        one = change.low_rank
        if one is None or one.magnitude is not None:
            continue
        if all(DTYPES[tensors[name].info.dtype] == dtype for name in (one.A, one.B)):
            found |= {one.A: 1.0, one.B: one.scale}
    return found


def runs_of(spans: Iterable[TensorSpan]) -> list[Run]:
    """These tensors as runs, in the order of the file."""
    found: list[list[TensorSpan]] = []
    end = nbytes = 0
    for span in sorted(spans, key=lambda one: one.begin):
        size = span.info.nbytes
        if found and span.begin == end and span.info.dtype == found[-1][0].info.dtype and nbytes + size <= _MOST:
            found[-1].append(span)
            nbytes += size
        else:
            found.append([span])
            nbytes = size
        end = span.begin + size
    return [Run(tuple(one)) for one in found]


def each(work: Callable[[Run], dict[str, Tensor]], runs: list[Run], threads: Executor | None) -> dict[str, Tensor]:
    """What `work` gives for all of them together; threads: that share it, None: this one does it."""
    found: dict[str, Tensor] = {}
    for one in map(work, runs) if threads is None else threads.map(work, runs):
        found |= one
    return found
