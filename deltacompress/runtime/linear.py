"""DecoupledLinear: one base product for the whole batch, and each variant's delta product on top of it.

Rows that nothing of a variant touches cost what they cost in the plain model. A variant's weight comes in one of three
forms (operands.py): packed codes, for which one grouped kernel call serves all variants of the layer; a decoded delta;
or a whole weight that takes the base's place for the variant's rows, which then need no base product.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from deltacompress.kernels import Backend, Table
from deltacompress.runtime.batch import MAX_VARIANTS, Batch, Current, Segment
from deltacompress.runtime.groups import LinearGroup
from deltacompress.runtime.operands import Added, Packed, Replaced
from deltacompress.runtime.vectors import VectorBank

Weight = Replaced | Added | Packed


class _Run(NamedTuple):
    """Neighbouring rows that one product serves: those of one whole weight, or any others."""

    replaced: Replaced | None
    segments: list[Segment]

    @property
    def rows(self) -> slice:
        return slice(self.segments[0].first, self.segments[-1].last)


class DecoupledLinear(nn.Linear):
    """Takes the place of an nn.Linear and keeps its parameters under their names; without a batch it is that linear.

    biases: what the variants bring, by slot; None for a linear without bias. is_head: it may see selected rows only.
    """

    def __init__(self, linear: nn.Linear, current: Current, kernels: Backend | None, *, is_head: bool) -> None:
        """kernels: what serves packed deltas; None where they are decoded."""
        nn.Module.__init__(self)  # not nn.Linear's: that would make a weight of its own
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        bias: Tensor | None = linear.bias
        self.biases: VectorBank | None = None if bias is None else VectorBank(bias)
        self._weights: dict[int, Weight] = {}
        self._current, self.is_head = current, is_head
        self.group: LinearGroup | None = None  # of linears that read the same tensor
        self._kernels = kernels
        self._table: Table | None = None
        if kernels is not None:
            self._table = kernels.table(MAX_VARIANTS, self.out_features, self.in_features)

    @property
    def has_bias(self) -> bool:
        """Whether the base's has one."""
        return self.biases is not None

    @property
    def table(self) -> Table:
        """The packed deltas of its variants."""
        assert self._table is not None
        return self._table

    def own_weight(self, slot: int) -> Weight | None:
        """What `slot` brings for this linear."""
        return self._weights.get(slot)

    def set_weight(self, slot: int, weight: Weight | None) -> None:
        """Give `slot` its own weight, or none any more."""
        if isinstance(self._weights.get(slot), Packed):
            assert self._table is not None
            self._table.clear(slot - 1)
        if weight is None:
            self._weights.pop(slot, None)
            return
        self._weights[slot] = weight
        if isinstance(weight, Packed):
            assert self._table is not None
            self._table.set(slot - 1, weight.spec, weight.tensors["buffer"])

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; a head that keeps some rows only: [requests, tokens, in] -> [1, kept rows, out].

        Where vocabularies differ, out is the largest one of the batch, and what lies beyond a row's own is unspecified.
        """
        batch = self._current.batch
        if batch is None:
            return super().forward(x)
        if self.group is not None and (found := self.group.take(self, x, batch)) is not None:
            return found
        if self.is_head and batch.keep is not None:
            x = x.reshape(-1, x.shape[-1]).index_select(0, batch.keep).unsqueeze(0)
        own_bias = self.biases is not None and self.biases.touched(batch)
        if not own_bias and not any(slot in self._weights for slot in batch.active()):
            return super().forward(x)
        flat = x.reshape(-1, x.shape[-1])
        segments = batch.segments(flat.shape[0], head=self.is_head)
        y = self._products(flat, segments, batch)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _products(self, x: Tensor, segments: tuple[Segment, ...], batch: Batch) -> Tensor:
        if any(isinstance(self._weights.get(piece.slot), Packed) for piece in segments):
            return self._with_kernels(x, segments, batch)
        runs = self._runs(segments)
        if len(runs) == 1:
            return self._run(x, runs[0])
        y = x.new_empty(x.shape[0], max(self._width(piece.slot) for piece in segments))
        for run in runs:
            found = self._run(x[run.rows], run)
            y[run.rows, : found.shape[1]] = found
        return y

    def _with_kernels(self, x: Tensor, segments: tuple[Segment, ...], batch: Batch) -> Tensor:
        """One base product and one kernel call for all rows; rows of whole weights are overwritten."""
        assert self._kernels is not None
        assert self._table is not None
        y = self._base_product(x, segments)
        on_device = batch.on_device(x.shape[0], head=self.is_head)
        self._kernels.sbmm(x, y[:, : self.out_features], on_device, self._table)
        self._add_rest(y, x, segments)
        for piece in segments:
            if isinstance(weight := self._weights.get(piece.slot), Replaced):
                y[piece.rows, : weight.out] = self._replaced(x[piece.rows], weight, piece.slot)
        return y

    def _runs(self, segments: tuple[Segment, ...]) -> list[_Run]:
        runs: list[_Run] = []
        for piece in segments:
            weight = self._weights.get(piece.slot)
            replaced = weight if isinstance(weight, Replaced) else None
            if runs and replaced is None and runs[-1].replaced is None:
                runs[-1].segments.append(piece)
            else:
                runs.append(_Run(replaced, [piece]))
        return runs

    def _run(self, x: Tensor, run: _Run) -> Tensor:
        """Product of x, the rows of one run."""
        start = run.segments[0].first
        local = tuple(Segment(piece.slot, piece.first - start, piece.last - start) for piece in run.segments)
        if run.replaced is not None:
            return self._replaced(x, run.replaced, local[0].slot)
        y = self._base_product(x, local)
        self._add_rest(y, x, local)
        return y

    def _replaced(self, x: Tensor, weight: Replaced, slot: int) -> Tensor:
        bias = None if self.biases is None else self.biases.vector(slot)
        return functional.linear(x, weight.tensors["weight"], bias)

    def _base_product(self, x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        """The base's product, as wide as the widest variant of these segments; biases included where all rows share."""
        y = functional.linear(x, self.weight, None if self._own_biases(segments) else self.bias)
        width = max(self._width(piece.slot) for piece in segments)
        return functional.pad(y, (0, width - self.out_features)) if width > self.out_features else y

    def _add_rest(self, y: Tensor, x: Tensor, segments: tuple[Segment, ...]) -> None:
        """What neither the base product nor a kernel does: decoded deltas, rows of added tokens, biases."""
        for piece in segments:
            weight = self._weights.get(piece.slot)
            if isinstance(weight, Added):
                _add_product(y, x, piece, weight.tensors["delta"], 0)
            if weight is not None and (added := weight.tensors.get("added")) is not None:
                _add_product(y, x, piece, added, weight.out - added.shape[0])
        if self.biases is None or not self._own_biases(segments):
            return
        for piece in segments:
            bias = self.biases.vector(piece.slot)
            y[piece.rows, : bias.shape[0]] += bias

    def _own_biases(self, segments: tuple[Segment, ...]) -> bool:
        return self.biases is not None and any(piece.slot in self.biases.own for piece in segments)

    def _width(self, slot: int) -> int:
        """Columns that its product has."""
        weight = self._weights.get(slot)
        if isinstance(weight, Replaced):
            return weight.out
        return self.out_features if weight is None else max(weight.out, self.out_features)


def _add_product(y: Tensor, x: Tensor, piece: Segment, weight: Tensor, column: int) -> None:
    """y[rows, column:] += x[rows] @ weight^T."""
    y[piece.rows, column : column + weight.shape[0]].addmm_(x[piece.rows], weight.T)
