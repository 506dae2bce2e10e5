"""DecoupledLinear: one base product for the whole batch, and each variant's delta product on top of it.

Rows that nothing of a variant touches cost what they cost in the plain model. A variant's weight comes in one of three
forms (operands.py): packed codes, for which one grouped kernel call serves all variants of the layer; a decoded delta;
or a whole weight that takes the base's place for the variant's rows, which then need no base product.

Linears that read the same tensor (query, key and value; gate and up) form a group: their weights are laid side by side
in one tensor, of which each linear's parameter becomes a view, and the kernels take their packed deltas in one launch:
few large launches are nearer to the speed of memory than many small ones. Which linears belong together is not guessed
from names but seen in a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.kernels import Backend, Table
from deltacompress.runtime.modules.batch import MAX_VARIANTS, Batch, ForwardContext, Segment
from deltacompress.runtime.modules.vectors import VectorBank
from deltacompress.runtime.variants.operands import DenseDelta, FullWeight, PackedDelta

Weight = FullWeight | DenseDelta | PackedDelta


class _Run(NamedTuple):
    """Neighbouring rows that one product serves: those of one whole weight, or any others."""

    replaced: FullWeight | None
    segments: list[Segment]

    @property
    def rows(self) -> slice:
        return slice(self.segments[0].first, self.segments[-1].last)


class DecoupledLinear(nn.Linear):
    """Takes the place of an nn.Linear and keeps its parameters under their names; without a batch it is that linear.

    biases: what the variants bring, by slot; None for a linear without bias. is_head: it may see selected rows only.
    """

    def __init__(self, linear: nn.Linear, context: ForwardContext, kernels: Backend | None, *, is_head: bool) -> None:
        """kernels: what serves packed deltas; None where they are decoded."""
        nn.Module.__init__(self)  # not nn.Linear's: that would make a weight of its own
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        bias: Tensor | None = linear.bias
        self.biases: VectorBank | None = None if bias is None else VectorBank(bias)
        self._weights: dict[int, Weight] = {}
        self._context, self.is_head = context, is_head
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
        if isinstance(self._weights.get(slot), PackedDelta):
            assert self._table is not None
            self._table.clear(slot - 1)
        if weight is None:
            self._weights.pop(slot, None)
            return
        self._weights[slot] = weight
        if isinstance(weight, PackedDelta):
            assert self._table is not None
            self._table.set(slot - 1, weight.spec, weight.tensors["buffer"])

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; a head that keeps some rows only: [requests, tokens, in] -> [1, kept rows, out].

        Where vocabularies differ, out is the largest one of the batch, and what lies beyond a row's own is unspecified.
        """
        batch = self._context.batch
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
        if any(isinstance(self._weights.get(piece.slot), PackedDelta) for piece in segments):
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
            if isinstance(weight := self._weights.get(piece.slot), FullWeight):
                y[piece.rows, : weight.out] = self._replaced(x[piece.rows], weight, piece.slot)
        return y

    def _runs(self, segments: tuple[Segment, ...]) -> list[_Run]:
        runs: list[_Run] = []
        for piece in segments:
            weight = self._weights.get(piece.slot)
            replaced = weight if isinstance(weight, FullWeight) else None
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

    def _replaced(self, x: Tensor, weight: FullWeight, slot: int) -> Tensor:
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
            if isinstance(weight, DenseDelta):
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
        if isinstance(weight, FullWeight):
            return weight.out
        return self.out_features if weight is None else max(weight.out, self.out_features)


def _add_product(y: Tensor, x: Tensor, piece: Segment, weight: Tensor, column: int) -> None:
    """y[rows, column:] += x[rows] @ weight^T."""
    y[piece.rows, column : column + weight.shape[0]].addmm_(x[piece.rows], weight.T)


class LinearGroup:
    """Linears of one input, in the order in which the model calls them."""

    def __init__(self, members: Sequence[DecoupledLinear], kernels: Backend) -> None:
        """Takes over their weights (and biases, which all of them have or none)."""
        self._members, self._kernels = tuple(members), kernels
        self._sizes = [member.out_features for member in members]
        self._weight = torch.cat([member.weight for member in members])
        for member, piece in zip(members, self._weight.split(self._sizes), strict=True):
            member.weight = nn.Parameter(piece, requires_grad=False)
        biases: list[Tensor] = [member.bias for member in members if member.has_bias]
        self._bias = torch.cat(biases) if biases else None
        self._waiting: tuple[Tensor, list[Tensor]] | None = None  # input, outputs of the members to come

    def take(self, member: DecoupledLinear, x: Tensor, batch: Batch) -> Tensor | None:
        """The member's output for x; None if it has to compute it on its own."""
        if member is self._members[0]:
            self._waiting = (x, self._products(x, batch)) if self._applies(batch) else None
        if self._waiting is None or self._waiting[0] is not x:
            return None
        found = self._waiting[1][self._members.index(member)]
        if member is self._members[-1]:
            self._waiting = None
        return found

    def _applies(self, batch: Batch) -> bool:
        """Whether no member has anything but packed deltas of its own for the variants of this batch."""
        for member in self._members:
            if member.biases is not None and member.biases.touched(batch):
                return False
            weights = (member.own_weight(slot) for slot in batch.active())
            if any(
                one is not None and not (isinstance(one, PackedDelta) and "added" not in one.tensors) for one in weights
            ):
                return False
        return True

    def _products(self, x: Tensor, batch: Batch) -> list[Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        y = functional.linear(flat, self._weight, self._bias)
        if any(member.own_weight(slot) is not None for member in self._members for slot in batch.active()):
            tables = [member.table for member in self._members]
            self._kernels.sbmm_group(flat, y, batch.on_device(flat.shape[0]), tables)
        return list(y.view(*x.shape[:-1], y.shape[-1]).split(self._sizes, -1))


def group_linears(model: Any, linears: Sequence[DecoupledLinear], kernels: Backend) -> None:
    """Find and form the groups of a loaded model, by one forward over one token."""
    seen: list[tuple[DecoupledLinear, Tensor]] = []

    def note(module: DecoupledLinear, args: tuple[Any, ...]) -> None:
        seen.append((module, args[0]))

    hooks = [linear.register_forward_pre_hook(note) for linear in linears if not linear.is_head]
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len({id(module) for module, _ in seen}) != len(seen):
        return  # a module that is called twice is no affair of this
    groups: list[list[DecoupledLinear]] = [[module] for module, _ in seen[:1]]
    for (_, before), (module, x) in pairwise(seen):
        if x is before and module.has_bias == groups[-1][0].has_bias:
            groups[-1].append(module)
        else:
            groups.append([module])
    for members in groups:
        if len(members) > 1:
            group = LinearGroup(members, kernels)
            for member in members:
                member.group = group
