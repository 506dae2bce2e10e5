"""Whether values are finite, at the speed of reading them."""

from __future__ import annotations

import torch
from torch import Tensor


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


def all_finite(values: Tensor) -> bool:
    """Whether none is NaN or infinite; of at least one real value."""
    return bool(torch.isfinite(extremes(values)).all())
