"""Linears that read the same tensor (query, key and value; gate and up) as one product.

Their weights are laid side by side in one tensor, of which each linear's parameter becomes a view, and the kernels take
their packed deltas in one launch: few large launches are nearer to the speed of memory than many small ones. Which
linears belong together is not guessed from names but seen in a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.kernels import Backend
from deltacompress.runtime.batch import Batch
from deltacompress.runtime.operands import Packed

if TYPE_CHECKING:
    from deltacompress.runtime.linear import DecoupledLinear


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
            if any(one is not None and not (isinstance(one, Packed) and "added" not in one.tensors) for one in weights):
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
