"""What serves adapters on one device; `select` chooses one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from deltacompress.kernels.adapters.lowrank import LowRankTable
from deltacompress.kernels.adapters.rotate import RotationTable
from deltacompress.kernels.adapters.scale import ScaleTable
from deltacompress.kernels.adapters.sparse_rows import SparseRowsTable
from deltacompress.kernels.segments import Segments


class AdapterKernels(ABC):
    """Operations on the rows of a batch, each for all its slots at once.

    Activations are fp32, fp16 or bf16 with contiguous rows, as many as `segments` has or more. Sums are fp32 and
    rounded once, where they are written. Rows of the base, of empty slots and after the last run stay (`rotate` copies
    them). Results depend on the order of nothing. Those of Triton's kernels do not depend on a row's neighbours either,
    but where activations or factors are fp32, or not of one dtype; for runs of more than 64 sparse rows, of
    segments that are not fixed; and as far as the product in `low_rank_linear` does, which is the library's on the GPUs
    that tests ran on.

    Attributes:
        name: "reference" or "triton".
        why: one line, why these run (for the user to read).
    """

    name: str
    why: str

    def __init__(self, device: torch.device | str, why: str) -> None:
        self.device, self.why = torch.device(device), why

    @abstractmethod
    def add_low_rank(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[LowRankTable]) -> None:
        """y[rows of slot s] += scale_s (x A_s^T) B_s^T for linears that read one x, in place.

        x [N, in]; y [N, sum of out_features], the results of `tables` side by side. A slot may have an adapter in some
        of them only.

        Raises:
            InputError: sizes, dtypes or strides that do not fit.
        """

    def low_rank_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments, tables: Sequence[LowRankTable]
    ) -> Tensor | None:
        """x W^T + bias with what `add_low_rank` adds to it, in one launch; None where that is not done.

        x [N, in]; weight [sum of out_features, in], of the linears side by side, bias as long or None. Returns
        [N, sum of out_features], of which all rows are computed. The product is rounded, and then the sum: what
        `add_low_rank` gives, bit for bit, where it is added to such a product. Calls of one object follow each other on
        one stream.

        Raises:
            InputError: sizes that do not fit.
        """
        return None

    @abstractmethod
    def rotate(self, x: Tensor, out: Tensor, segments: Segments, tables: Sequence[RotationTable]) -> None:
        """out[i, rows] = x[rows] R_s for rows of slots with a rotation in table i, x[rows] for all others.

        x [N, features], which all linears read, or [linears, N, features]; out [linears, N, features].

        Raises:
            InputError: sizes, dtypes or strides that do not fit, or x and out are one tensor.
        """

    @abstractmethod
    def add_sparse_rows(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[SparseRowsTable]) -> None:
        """y[rows of slot s] += x S_s^T for linears that read one x, in place; shapes as in add_low_rank.

        Raises:
            InputError: sizes, dtypes or strides that do not fit.
        """

    @abstractmethod
    def scale(self, y: Tensor, segments: Segments, tables: Sequence[ScaleTable]) -> None:
        """y[rows of slot s, n] *= scales_s[n] for linears side by side in y [N, sum of out_features], in place.

        Raises:
            InputError: sizes, dtypes or strides that do not fit.
        """
