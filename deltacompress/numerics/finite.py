"""Whether values are finite, at the speed of reading them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltacompress.errors import CheckpointError, option

# A number of these is finite if its bits without the sign, times two, are less than this.
_INFINITE = {
    torch.float16: (np.uint16, 0xF800),
    torch.bfloat16: (np.uint16, 0xFF00),
    torch.float32: (np.uint32, 0xFF << 24),
    torch.float64: (np.uint64, 0x7FF << 53),
    torch.complex64: (np.uint32, 0xFF << 24),
}
_AT_A_TIME = 1 << 19  # bytes, which stay in the cache


def extremes(values: Tensor) -> Tensor:
    """The smallest and the largest of at least one real value, [2]; NaN where there is one.

    torch.isfinite of every value is slower, and makes three more tensors on the way.
    """
    return torch.stack(torch.aminmax(values))


class RangeOf:
    """The extremes of some values, on their way to the host: a GPU goes on meanwhile."""

    def __init__(self, values: Tensor) -> None:
        found = extremes(values)
        self._host, self._arrived = found, None
        if found.is_cuda:
            self._host = torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def get(self) -> tuple[float, float]:
        """(smallest, largest), as soon as they are known."""
        if self._arrived is not None:
            self._arrived.synchronize()
        low, high = self._host.tolist()
        return low, high


def finite(values: Tensor) -> Tensor:
    """Whether none is NaN or infinite, bool [], where the values are; of at least one real value."""
    return torch.isfinite(extremes(values)).all()


def all_finite(values: Tensor) -> bool:
    """As `finite`; a GPU is waited for."""
    return bool(finite(values))


def is_finite(t: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor Inf; integers and booleans never do."""
    if not (t.is_floating_point() or t.is_complex()) or not t.numel():
        return True
    values = t.float() if t.element_size() == 1 else t  # torch tests no 8-bit float for NaN
    return all_finite(torch.view_as_real(values) if t.is_complex() else values)


def check_finite(name: str, t: Tensor, *, of_base: bool = False) -> None:
    """Refuse NaN and Inf in tensor `name` (integers and booleans pass); of_base: whether it is the base's.

    Raises:
        CheckpointError: names the tensor and counts its NaN and Inf.
    """
    if is_finite(t):
        return
    values = t.float() if t.element_size() == 1 else t
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    way_out = "get the base again" if of_base else "the training run broke: take an earlier checkpoint"
    raise CheckpointError(
        f"{nan} NaN and {inf} Inf among {t.numel()} values",
        where=f"tensor {name}",
        way_out=f"{way_out}, or use {option('recipe')} lossless, which keeps any bits",
    )


class FiniteBytes:
    """Whether values of a dtype are finite, from their little-endian bytes as they come, in pieces of whole values.

    One thread does it, beside other work: what torch does, it does with all.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.finite = True
        self._dtype = dtype

    def at(self, piece: bytes) -> bytes:
        """The next piece, given back as it is."""
        if self.finite and piece:
            self.finite = self._is_finite(piece)
        return piece

    def _is_finite(self, piece: bytes) -> bool:
        if self._dtype not in _INFINITE:
            return is_finite(torch.frombuffer(bytearray(piece), dtype=self._dtype))
        unsigned, infinite = _INFINITE[self._dtype]
        bits = np.frombuffer(piece, unsigned)
        step = _AT_A_TIME // bits.itemsize
        return all(int((bits[k : k + step] << 1).max()) < infinite for k in range(0, len(bits), step))
