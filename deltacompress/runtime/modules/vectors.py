"""Norm weights and biases of many variants: a vector per slot, gathered per row.

A norm keeps its own module and its own forward (Gemma adds one to the weight, others do not; the casts differ): for the
time of one call its `weight` is replaced by the rows' weights, shaped so that they broadcast. Only nn.LayerNorm needs a
forward of its own, because its kernel takes one vector for all rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.errors import UnsupportedModelError
from deltacompress.kernels.triton import fused
from deltacompress.runtime.batch import BASE, Batch, ForwardContext
from deltacompress.runtime.operands.operand import Operand, Traits, Vector


class SlotVectors:
    """Vectors [n, size], row s of slot s: the base's where that has none; the last row is for all slots above."""

    def __init__(self, base: Tensor, slots: int) -> None:
        self.vectors = base.expand(slots + 1, -1).clone()

    @property
    def slots(self) -> int:
        return self.vectors.shape[0] - 1


class VectorBank:
    """One vector per slot; slots without one of their own use the base's."""

    takes: ClassVar[tuple[type[Operand], ...]] = (Vector,)

    def __init__(self, base: Tensor) -> None:
        self.base = base
        self.own: dict[int, Tensor] = {}
        self._stack: SlotVectors | None = None  # in place for as long as no higher slot gets a vector of its own

    def set(self, slot: int, operand: Vector | None) -> None:
        """Give `slot` its own vector (the base's shape), or none any more."""
        if operand is not None:
            self.own[slot] = operand.tensors["vector"]
        elif self.own.pop(slot, None) is None:
            return
        if self._stack is not None and slot < self._stack.slots:
            self._stack.vectors[slot].copy_(self.vector(slot))
            return
        if self._stack is not None:  # graphs may go on reading the old one, for slots that have nothing of their own
            self._stack.vectors.copy_(self.base)
        # made here, not when it is first read: so it changes at the same moments wherever the same slots are set
        self._stack = SlotVectors(self.base, 1 << slot.bit_length())
        for each, vector in self.own.items():
            self._stack.vectors[each].copy_(vector)

    def traits(self, slot: int) -> Traits | None:
        """See Seat."""
        if slot not in self.own:
            return set()
        assert self._stack is not None
        return {self._stack}

    def launched(self, slots: Collection[int]) -> Traits:
        """See Seat."""
        return {one for slot in slots for one in self.traits(slot) or ()}

    def vector(self, slot: int) -> Tensor:
        """The vector of one slot."""
        return self.own.get(slot, self.base)

    def touched(self, batch: Batch) -> bool:
        """Whether a request of this batch has a vector of its own."""
        return bool(self.own) and any(slot in self.own for slot in batch.active())

    def shaped(self, batch: Batch, dims: int) -> Tensor:
        """The vectors, ready to broadcast over an activation [requests, ..., size] of `dims` dimensions."""
        if batch.uniform is not None:
            return self.vector(batch.uniform)
        stack = self.stacked(batch)
        rows = stack.index_select(0, batch.index.clamp(max=stack.shape[0] - 1))
        return rows.view(rows.shape[0], *(1,) * (dims - 2), rows.shape[1])

    def stacked(self, batch: Batch) -> Tensor:
        """[n, size]: a request of this batch uses row min(slot, n - 1)."""
        if batch.uniform is not None or not self.touched(batch):
            return self.vector(BASE if batch.uniform is None else batch.uniform).unsqueeze(0)
        assert self._stack is not None
        return self._stack.vectors


class Shadow:
    """For the time of a `with` block, `module.name` is `value`: the instance's dict comes before its parameters."""

    def __init__(self, module: nn.Module, **values: Any) -> None:
        self._own, self._values = module.__dict__, values
        self._before = {name: self._own[name] for name in values if name in self._own}

    def __enter__(self) -> None:
        self._own.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name in self._values:
            del self._own[name]
        self._own.update(self._before)


def decouple_norm(
    module: nn.Module, context: ForwardContext, path: str, *, fuse: bool = False
) -> dict[str, VectorBank]:
    """Let a norm module use each row's own vectors; returns its banks by parameter name.

    fuse: compute it in one launch, where it is a norm that kernels/triton/fused.py knows.

    Raises:
        UnsupportedModelError: a norm whose parameters are not a weight (and a bias) over the last dimension.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters.keys() <= {"weight", "bias"} or any(p.dim() != 1 for p in parameters.values()):
        raise UnsupportedModelError(
            f"a {type(module).__name__} with parameters {sorted(parameters)} has no rule", where=path
        )
    banks = {name: VectorBank(parameter) for name, parameter in parameters.items()}
    plain = module.forward
    known = _known_norm(module) if fuse and banks.keys() == {"weight"} else None

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch = context.batch
        if batch is not None and known is not None and x.dtype == module.weight.dtype and not (args or kwargs):
            return fused.rms_norm(x, banks["weight"].stacked(batch), batch.index, *known)
        if batch is None or not any(bank.touched(batch) for bank in banks.values()):
            return plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        if batch.uniform is None and x.dim() == 2 and x.shape[0] != len(batch.index) and not (args or kwargs):
            return forward(x.unflatten(0, (len(batch.index), -1))).flatten(0, 1)  # OPT: requests and tokens in one
        vectors = {name: bank.shaped(batch, x.dim()) for name, bank in banks.items()}
        if isinstance(module, nn.LayerNorm) and batch.uniform is None:
            y = functional.layer_norm(x, module.normalized_shape, None, None, module.eps)
            y = y * vectors["weight"] if "weight" in vectors else y
            return y + vectors["bias"] if "bias" in vectors else y
        with Shadow(module, **vectors):
            return plain(x, *args, **kwargs)  # type: ignore[no-any-return]

    module.forward = forward
    return banks


def _known_norm(module: nn.Module) -> tuple[float, fused.NormKind] | None:
    """(epsilon, kind) of a norm whose own forward gives, bit by bit, what kernels/triton/fused.py stands for."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    draw = torch.Generator(weight.device).manual_seed(0)
    x, w = (torch.randn(n, weight.shape[0], device=weight.device, generator=draw).to(weight.dtype) for n in (3, 1))
    with Shadow(module, weight=w[0]):
        wanted = module(x)
    kinds: tuple[fused.NormKind, ...] = ("plain", "unit offset")
    found = (kind for kind in kinds if torch.equal(wanted, fused.norm_formula(x, w, eps, kind)))
    return next(((eps, kind) for kind in found), None)
