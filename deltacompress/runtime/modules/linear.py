"""DecoupledLinear: one base product for the whole batch, and what each kind of operand adds to it.

Rows that nothing of a variant touches cost what they cost in the plain model. What variants do to a linear is up to the
products of their operands (operands/product.py), one for each kind, and each serves all rows of the batch at once.

Linears that read the same tensor (query, key and value; gate and up) form a group: their weights are laid side by side
in one tensor, of which each linear's parameter becomes a view, and the kernels take their packed deltas in one launch:
few large launches are nearer to the speed of memory than many small ones. Which linears belong together is not guessed
from names but seen in a forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deltacompress.kernels import Backend
from deltacompress.kernels.adapters import AdapterKernels
from deltacompress.runtime.batch import Batch, BatchRows, ForwardContext
from deltacompress.runtime.modules.vectors import VectorBank
from deltacompress.runtime.operands.operand import Operand, Traits
from deltacompress.runtime.operands.product import (
    BaseProduct,
    Combined,
    LinearOperand,
    LocalProduct,
    Product,
    Site,
    begin_with_base,
)


class DecoupledLinear(nn.Linear):
    """Takes the place of an nn.Linear and keeps its parameters under their names; without a batch it is that linear.

    biases: what the variants bring, by slot; None for a linear without bias. is_head: it may see selected rows only.
    base: its own product.
    """

    takes: ClassVar[tuple[type[Operand], ...]] = (LinearOperand, Combined)

    def __init__(
        self,
        linear: nn.Linear,
        context: ForwardContext,
        kernels: Backend | None,
        adapters: AdapterKernels | None = None,
        *,
        is_head: bool,
    ) -> None:
        """kernels: what serves packed deltas, None where they are decoded; adapters: as in Site."""
        nn.Module.__init__(self)  # not nn.Linear's: that would make a weight of its own
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        bias: Tensor | None = linear.bias
        self.base: BaseProduct = LocalProduct(linear.weight, bias)
        self.biases: VectorBank | None = None if bias is None else VectorBank(bias)
        self._context, self.is_head = context, is_head
        self.group: LinearGroup | None = None  # of linears that read the same tensor
        self._site = Site(self.in_features, self.out_features, kernels, adapters, linear.weight.dtype)
        self._products: dict[type[Product[Any]], Product[Any]] = {}

    @property
    def has_bias(self) -> bool:
        return self.biases is not None

    def product(self, kind: type[Product[Any]]) -> Product[Any]:
        """Its product of this kind."""
        if kind not in self._products:
            made = self._products | {kind: kind(self._site)}
            self._products = {one: made[one] for one in _ordered(made)}
        return self._products[kind]

    def products(self, slots: Iterable[int]) -> list[Product[Any]]:
        """Those that do something for one of these slots."""
        return [product for product in self._products.values() if product.serves(slots)]

    def set(self, slot: int, operand: LinearOperand | Combined | None) -> None:
        """Give `slot` its operand, or none any more."""
        for product in self._products.values():
            if slot in product.operands:
                product.set(slot, None)
        for part in () if operand is None else operand.parts:
            self.product(part.product).set(slot, part)

    def traits(self, slot: int) -> Traits | None:
        """See Seat."""
        found: Traits = set()
        for product in self._products.values():
            if slot in product.operands:
                more = product.traits(slot)
                if more is None:
                    return None
                found |= more
        return found

    def launched(self, slots: Collection[int]) -> Traits:
        """See Seat."""
        return {one for product in self.products(slots) for one in product.launched(slots)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; a head that keeps some rows only: [requests, tokens, in] -> [1, kept rows, out].

        Where vocabularies differ, out is the largest one of the batch, and what lies beyond a row's own is unspecified.
        """
        batch = self._context.batch
        if batch is None:
            return self.base(x)
        if self.group is not None and (found := self.group.take(self, x, batch)) is not None:
            return found
        if self.is_head and batch.keep is not None:
            x = x.reshape(-1, x.shape[-1]).index_select(0, batch.keep).unsqueeze(0)
        active = self.products(batch.active())
        if not active and not self._own_bias(batch):
            return self.base(x)
        flat = x.reshape(-1, x.shape[-1])
        for product in active:
            flat = product.before(flat, batch.rows(flat.shape[0], head=self.is_head))
        y = self.combined(flat, batch)
        return y.view(*x.shape[:-1], y.shape[-1])

    def combined(self, x: Tensor, batch: Batch) -> Tensor:
        """The base's product and all others, as operands/product.py says, of x [rows, in] as all `before`s left it."""
        y, rows = self.summed(x, batch), batch.rows(x.shape[0], head=self.is_head)
        for product in self.products(batch.active()):
            product.after(y, rows)
        self.add_late_bias(y, batch)
        return y

    def summed(self, x: Tensor, batch: Batch, out: Tensor | None = None) -> Tensor:
        """The base's product and what others add to it; out: where to, if nothing takes the base's place."""
        rows, active = batch.rows(x.shape[0], head=self.is_head), self.products(batch.active())
        with_bias = not self._acts_late(active, batch)
        if out is None:
            y, active = self._started(x, rows, active, with_bias=with_bias)
        else:
            y = self.base(x, with_bias=with_bias, out=out)
        for product in active:
            product.add(y, x, rows)
        return y

    def add_late_bias(self, y: Tensor, batch: Batch) -> None:
        """To y [rows, at least out], where `summed` left the bias out: it comes after everything else."""
        if self.biases is None or not self._acts_late(self.products(batch.active()), batch):
            return
        if batch.fixed:
            each = y.view(len(batch.index), -1, y.shape[1])  # tokens of a request have one bias
            each += self.biases.shaped(batch, 3)
            return
        for piece in batch.rows(y.shape[0], head=self.is_head).segments:
            bias = self.biases.vector(piece.slot)
            y[piece.rows, : bias.shape[0]] += bias

    def _acts_late(self, active: list[Product[Any]], batch: Batch) -> bool:
        return self._own_bias(batch) or any(one.acts_after or one.replaces for one in active)

    def _own_bias(self, batch: Batch) -> bool:
        return self.biases is not None and self.biases.touched(batch)

    def _started(
        self, x: Tensor, rows: BatchRows, active: list[Product[Any]], *, with_bias: bool
    ) -> tuple[Tensor, list[Product[Any]]]:
        """The base's product, as wide as the widest variant, rows that it has no part in unspecified; what is left."""
        replaced = {slot for product in active if product.replaces for slot in product.operands}
        widths = [self.out_features for piece in rows.segments if piece.slot not in replaced]
        widths += [p.width(piece.slot) for p in active for piece in rows.segments if piece.slot in p.operands]
        width, base = max(widths), self.base
        if width == self.out_features and not any(piece.slot in replaced for piece in rows.segments):
            y, left = begin_with_base(base, x, rows, {type(one): [one] for one in active}, with_bias=with_bias)
            return y, [product for (product,) in left.values()]
        y = x.new_zeros(x.shape[0], width) if width > self.out_features else x.new_empty(x.shape[0], width)
        for run in _runs(rows, replaced):
            y[run, : self.out_features] = base(x[run], with_bias=with_bias)
        return y, active


def _runs(rows: BatchRows, replaced: AbstractSet[int]) -> Iterator[slice]:
    """Neighbouring rows that one base product serves."""
    for is_replaced, pieces in groupby(rows.segments, key=lambda piece: piece.slot in replaced):
        if not is_replaced:
            first, *rest = pieces
            yield slice(first.first, (rest or [first])[-1].last)


class LinearGroup:
    """Linears of one input, in the order in which the model calls them."""

    def __init__(self, members: Sequence[DecoupledLinear]) -> None:
        """Takes over their weights (and biases, which all of them have or none)."""
        self._members = tuple(members)
        self._sizes = [member.out_features for member in members]
        weight = torch.cat([member.weight for member in members])
        biases: list[Tensor] = [member.bias for member in members if member.has_bias]
        self._base: BaseProduct = LocalProduct(weight, torch.cat(biases) if biases else None)
        for member, piece in zip(members, weight.split(self._sizes), strict=True):
            member.weight = nn.Parameter(piece, requires_grad=False)
            member.base = LocalProduct(member.weight, member.bias)
            member.group = self
        self._waiting: tuple[Tensor, list[Tensor]] | None = None  # input, outputs of the members to come

    def take(self, member: DecoupledLinear, x: Tensor, batch: Batch) -> Tensor | None:
        """The member's output for x; None if it has to compute it on its own."""
        if member is self._members[0]:
            self._waiting = self._results(x, batch)
        if self._waiting is None or self._waiting[0] is not x:
            return None
        found = self._waiting[1][self._members.index(member)]
        if member is self._members[-1]:
            self._waiting = None
        return found

    def _results(self, x: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """(x, output of each member)."""
        flat = x.reshape(-1, x.shape[-1])
        kinds = self._joint(batch)
        if kinds is None:
            return x, [one.view(*x.shape[:-1], one.shape[-1]) for one in self._apart(flat, batch)]
        rows = batch.rows(flat.shape[0])
        products = {kind: [member.product(kind) for member in self._members] for kind in kinds}
        y, left = begin_with_base(self._base, flat, rows, products)
        for kind, own in left.items():
            kind.add_group(y, flat, rows, own)
        return x, list(y.view(*x.shape[:-1], y.shape[-1]).split(self._sizes, -1))

    def _joint(self, batch: Batch) -> list[type[Product[Any]]] | None:
        """What is added for all members at once; None where variants bring what cannot be."""
        slots, kinds = batch.active(), set[type[Product[Any]]]()
        for member in self._members:
            if member.biases is not None and member.biases.touched(batch):
                return None
            for product in member.products(slots):
                if not product.joins(slots):
                    return None
                kinds.add(type(product))
        return _ordered(kinds)

    def _apart(self, x: Tensor, batch: Batch) -> list[Tensor]:
        """The output of each member by a product of its own, of what all `before`s at once make of x [rows, in].

        They lie side by side, unless something takes the base's place, so that all `after`s of a kind are one launch.
        """
        inputs, rows = [x] * len(self._members), batch.rows(x.shape[0])
        active = [{type(one): one for one in member.products(batch.active())} for member in self._members]
        for kind in _ordered({kind for own in active for kind in own}):
            of = [at for at, own in enumerate(active) if kind in own]
            made = kind.before_group([inputs[at] for at in of], rows, [active[at][kind] for at in of])
            for at, one in zip(of, made, strict=True):
                inputs[at] = one
        if any(kind.replaces for own in active for kind in own):
            return [member.combined(one, batch) for member, one in zip(self._members, inputs, strict=True)]
        y = x.new_empty(x.shape[0], sum(self._sizes))
        parts = y.split(self._sizes, -1)
        for member, one, part in zip(self._members, inputs, parts, strict=True):
            member.summed(one, batch, part)
        for kind in _ordered({kind for own in active for kind in own if kind.acts_after}):
            kind.after_group(y, rows, [member.product(kind) for member in self._members])
        for member, part in zip(self._members, parts, strict=True):
            member.add_late_bias(part, batch)
        return list(parts)


def _ordered(kinds: Iterable[type[Product[Any]]]) -> list[type[Product[Any]]]:
    """Whole weights first, since the others add to what they write; and the same order in every process."""
    return sorted(kinds, key=lambda one: (not one.replaces, one.__name__))


def group_linears(model: Any, linears: Sequence[DecoupledLinear]) -> None:
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
            LinearGroup(members)
