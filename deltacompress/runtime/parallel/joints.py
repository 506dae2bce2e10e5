"""Where the ranks' results become one: after linears that read a share of heads or width, embedding and head.

Everything else of a model runs on each rank as in a model that is so small. Variants' products are part of what is
exchanged, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltacompress.runtime.modules.linear import DecoupledLinear
from deltacompress.runtime.parallel.group import Group
from deltacompress.runtime.parallel.parts.split import Split

Forward = Callable[[Tensor], Tensor]


def join(model: nn.Module, split: Split, group: Group) -> None:
    """Let the modules of a rank's model, which know variants already, give the result of all ranks."""
    for path, module in model.named_modules():
        joint = split.joint(path)
        if joint is None or not isinstance(module, DecoupledLinear | nn.Embedding):
            continue
        own: Any = module.forward
        if joint == "sum":
            module.forward = _summed(own, group)  # type: ignore[assignment]
        elif joint == "lookup":
            module.forward = _looked_up(own, split, group)  # type: ignore[assignment]
        else:
            module.forward = _side_by_side(own, split, group)  # type: ignore[assignment]


def _summed(own: Forward, group: Group) -> Forward:
    return lambda x: group.sum(own(x).contiguous())


def _looked_up(own: Forward, split: Split, group: Group) -> Forward:
    def forward(ids: Tensor) -> Tensor:
        places = ids - split.first_token
        there = (places >= 0) & (places < split.tokens)
        rows = own(places.clamp(0, split.tokens - 1))
        return group.sum(torch.where(there[..., None], rows, torch.zeros_like(rows)))

    return forward


def _side_by_side(own: Forward, split: Split, group: Group) -> Forward:
    return lambda x: group.side_by_side(own(x))[..., : split.vocabulary]
