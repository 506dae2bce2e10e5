"""What variants do in a linear layer. Each kind of operand has one `Product`, which serves all rows of a batch at once.

    y = after(base(before(x)) + add(before(x))) + bias

and each part may be left out: a packed delta (one kernel launch for all variants), low rank B A x and a few entries
S x are added, a rotation x R comes before, a scale of the outputs after. A whole weight takes the base's place for its
rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from deltacompress.kernels import Backend
from deltacompress.kernels.adapters import AdapterKernels
from deltacompress.runtime.batch import BatchRows, Segment, kernel_slot
from deltacompress.runtime.operands.operand import Operand, PinnedMemory, Traits


class BaseProduct(Protocol):
    """The base's part of a linear, or of several that read one input and lie side by side."""

    def __call__(self, x: Tensor, *, with_bias: bool = True, out: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out]; out: where to, columns of a wider tensor, say; x is [rows, in] then."""


class LocalProduct(BaseProduct):
    """A base whose weight [out, in] (and bias [out]) is in this process."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @override
    def __call__(self, x: Tensor, *, with_bias: bool = True, out: Tensor | None = None) -> Tensor:
        bias = self.bias if with_bias else None
        if out is None:
            return functional.linear(x, self.weight, bias)
        return torch.mm(x, self.weight.T, out=out) if bias is None else torch.addmm(bias, x, self.weight.T, out=out)


@dataclass(frozen=True)
class Site:
    """The linear that a product serves.

    kernels: what serves packed deltas; adapters: what serves operands of adapters, None: loops over segments; dtype: of
    activations and operands.
    """

    in_features: int
    out_features: int
    kernels: Backend | None
    adapters: AdapterKernels | None = None
    dtype: torch.dtype = torch.float32


class LinearOperand(Operand, ABC):
    """An operand of a linear's weight."""

    @property
    @abstractmethod
    def product(self) -> type[Product[Any]]:
        """What computes with operands of this kind."""

    @property
    def parts(self) -> tuple[LinearOperand, ...]:
        """Itself; of `Combined`, several."""
        return (self,)


@dataclass(frozen=True)
class Combined(Operand):
    """Operands of different kinds that one variant brings for one linear: a delta and an adapter over it, say."""

    parts: tuple[LinearOperand, ...]

    @classmethod
    def of(cls, *parts: LinearOperand) -> Combined:
        """Of these parts.

        Raises:
            ValueError: two are of one kind.
        """
        if len({part.product for part in parts}) != len(parts):
            raise ValueError("two operands of one kind for one linear")
        return cls({}, parts)

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return next((why for part in self.parts if (why := part.misfit(base, dtype)) is not None), None)

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @override
    def placed_bytes(self, kernels: Backend | None) -> int:
        return sum(part.placed_bytes(kernels) for part in self.parts)

    @override
    def placed(self, device: torch.device, kernels: Backend | None) -> Self:
        return replace(self, parts=tuple(part.placed(device, kernels) for part in self.parts))

    @override
    def pinned(self, memory: PinnedMemory) -> Self:
        return replace(self, parts=tuple(part.pinned(memory) for part in self.parts))


O = TypeVar("O", bound=LinearOperand)  # noqa: E741


class Product(Generic[O]):
    """The operands of one kind in one linear, by slot (batch.py), and what they do to rows of those slots.

    replaces: `add` writes what the base and its weight would give for its rows, which the base leaves out; before all
    that add to them. acts_after: `after` does something. Biases come last where there is either.
    """

    replaces: ClassVar[bool] = False
    acts_after: ClassVar[bool] = False

    def __init__(self, site: Site) -> None:
        self.site = site
        self.operands: dict[int, O] = {}

    def set(self, slot: int, operand: O | None) -> None:
        """Give `slot` its operand, on the device, or none any more."""
        if operand is None:
            self.operands.pop(slot, None)
        else:
            self.operands[slot] = operand

    def traits(self, slot: int) -> Traits | None:
        """Of a slot of its own, see Seat (modules/model.py); what loops over segments has None."""
        return None

    def launched(self, slots: Collection[int]) -> Traits:
        """See Seat; of slots of which one is its own."""
        return {one for slot in slots if slot in self.operands for one in self.traits(slot) or ()}

    def serves(self, slots: Iterable[int]) -> bool:
        """Whether one of these slots has an operand of this kind."""
        return any(slot in self.operands for slot in slots)

    def width(self, slot: int) -> int:
        """Columns of y that `slot`, one of its own, needs."""
        return self.site.out_features

    def before(self, x: Tensor, rows: BatchRows) -> Tensor:
        """What the base and all products take in place of x [rows, in], which must not be written to."""
        return x

    @classmethod
    def before_group(cls, inputs: Sequence[Tensor], rows: BatchRows, products: Sequence[Self]) -> Sequence[Tensor]:
        """`before` for linears of one batch, each with its input, which may be one for all."""
        return [one.before(x, rows) for x, one in zip(inputs, products, strict=True)]

    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        """Add to y [rows, at least out], in place, for rows of its slots; x [rows, in]: as all `before`s left it."""

    def after(self, y: Tensor, rows: BatchRows) -> None:
        """Change y in place, for rows of its slots, once everything but the biases is in it."""

    @classmethod
    def after_group(cls, y: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        """`after` for linears whose results lie side by side in y."""
        at = 0
        for one in products:
            one.after(y[:, at : at + one.site.out_features], rows)
            at += one.site.out_features

    def joins(self, slots: Iterable[int]) -> bool:
        """Whether `add` alone, in one `add_group`, serves these slots in linears that read one input."""
        return False

    @classmethod
    def add_group(cls, y: Tensor, x: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        """`add` for linears that read the same x; y: their results side by side."""
        at = 0
        for one in products:
            one.add(y[:, at : at + one.site.out_features], x, rows)
            at += one.site.out_features

    @classmethod
    def added_to_base(
        cls, base: BaseProduct, x: Tensor, rows: BatchRows, products: Sequence[Self], *, with_bias: bool
    ) -> Tensor | None:
        """`base(x)` with what `add_group` adds to it, where both are one launch; else None."""
        return None

    def own(self, rows: BatchRows) -> Iterable[tuple[Segment, O]]:
        """Segments of its slots with their operands."""
        return ((piece, self.operands[piece.slot]) for piece in rows.segments if piece.slot in self.operands)


Kinds = dict[type[Product[Any]], list[Product[Any]]]
"""Products of linears that read one input, by kind: each linear's, in their order."""


def begin_with_base(
    base: BaseProduct, x: Tensor, rows: BatchRows, products: Kinds, *, with_bias: bool = True
) -> tuple[Tensor, Kinds]:
    """The base's product, with one kind of the others in it where that is one launch; and the kinds that are left."""
    for kind, own in products.items():
        if (y := kind.added_to_base(base, x, rows, own, with_bias=with_bias)) is not None:
            return y, {one: products[one] for one in products if one is not kind}
    return base(x, with_bias=with_bias), products


class TableProduct(Product[O], ABC, Generic[O]):
    """Of operands in a table of kernels/adapters: one launch for all slots, loops for what the table cannot take.

    looped: the latter, by slot; everything, where the reference backend serves.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.looped: dict[int, O] = {}
        if site.adapters is not None:
            self.make(site.adapters)

    @abstractmethod
    def make(self, kernels: AdapterKernels) -> None:
        """Make the empty table."""

    @abstractmethod
    def fits(self, operand: O) -> bool:
        """Whether the table can take it."""

    @abstractmethod
    def fill(self, place: int, operand: O) -> None:
        """Put it into a place of the table, as kernels count them."""

    @abstractmethod
    def clear(self, place: int) -> None:
        """Empty that place."""

    @override
    def traits(self, slot: int) -> Traits | None:
        return None if slot in self.looped else self.launches(slot)

    def launches(self, slot: int) -> Traits | None:
        """Traits of a slot that is in the table: by default that there is such a product at all."""
        return {type(self).__name__}

    @override
    def set(self, slot: int, operand: O | None) -> None:
        if slot in self.operands and slot not in self.looped:
            self.clear(kernel_slot(slot))
        self.looped.pop(slot, None)
        super().set(slot, operand)
        if operand is None:
            return
        if self.site.adapters is not None and self.fits(operand):
            self.fill(kernel_slot(slot), operand)
        else:
            self.looped[slot] = operand

    def kernels_for(self, rows: BatchRows) -> AdapterKernels | None:
        """What serves those of these rows whose operands are in the table; None if there are none."""
        tabled = any(piece.slot in self.operands and piece.slot not in self.looped for piece in rows.segments)
        return self.site.adapters if tabled else None

    def loops(self, rows: BatchRows) -> Iterable[tuple[Segment, O]]:
        """Segments whose operands are not in the table, with these."""
        return ((piece, self.looped[piece.slot]) for piece in rows.segments if piece.slot in self.looped)

    def own_columns(self, y: Tensor) -> Tensor:
        """The columns of y that the base's weight has, too; others are of grown vocabularies."""
        return y[:, : self.site.out_features]


def add_linear(y: Tensor, x: Tensor, piece: Segment, weight: Tensor, column: int) -> None:
    """y[rows, column:] += x[rows] @ weight^T."""
    y[piece.rows, column : column + weight.shape[0]].addmm_(x[piece.rows], weight.T)
