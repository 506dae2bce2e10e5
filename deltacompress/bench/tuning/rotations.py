"""BOFT of one factor as it is trained: PEFT's forward, in fewer and smaller products, and none that waits for the host.

PEFT solves a batch of systems for each linear, which asks the device how that went, and multiplies dense rotations of
whole inputs. Here the blocks of all linears are turned into rotations at once, by products alone, and each block turns
its own features. The same numbers but for rounding; the parameters are PEFT's own, and so is what it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from deltacompress.calibration.forwards.precision import Precision


@contextmanager
def without_extension(layer: Any) -> Iterator[None]:
    """In this block PEFT's module of BOFT layers does not try to compile its CUDA extension: nothing here calls it."""
    compiled = layer.get_fbd_cuda
    layer.get_fbd_cuda = lambda: None
    try:
        yield
    finally:
        layer.get_fbd_cuda = compiled


def speed_up(model: Any) -> None:
    """Let the BOFT linears of a PEFT model run as above, in place."""
    linears = [one for one in model.modules() if hasattr(one, "boft_R")]
    parameters = [(*one.boft_R.values(), *one.boft_s.values()) for one in linears]
    turns = dict[int, Tensor]()
    for index, (one, (_, scale)) in enumerate(zip(linears, parameters, strict=True)):
        one.forward = partial(_forward, one.base_layer, scale, index, turns)

    def make(*_: Any) -> None:
        found = rotations(torch.cat([blocks.flatten(0, 1) for blocks, _ in parameters]))
        turns.update(enumerate(found.split([blocks.shape[1] for blocks, _ in parameters])))

    # what is made is forgotten after each forward: gradients of the next must not lead back into this one
    model.register_forward_pre_hook(make)
    model.register_forward_hook(lambda *_: turns.clear(), always_call=True)


def rotations(blocks: Tensor) -> Tensor:
    """Cayley's transform of each of [n, b, b]: (I - K)(I + K)^-1, K the skew part of a block."""
    found: Tensor = _Cayley.apply(blocks)  # type: ignore[no-untyped-call]
    return found


def _forward(base: nn.Linear, scale: Tensor, index: int, turns: dict[int, Tensor], x: Tensor) -> Tensor:
    """scale: [out, 1]. turns: of the linear of this index [blocks, b, b], which features are multiplied by."""
    blocks = turns[index]
    pieces = x.reshape(-1, blocks.shape[0], blocks.shape[1]).transpose(0, 1)
    turned = (pieces @ blocks).transpose(0, 1).reshape(x.shape)
    found = nn.functional.linear(turned, base.weight) * scale.squeeze(-1)
    bias: Tensor | None = base.bias
    return found if bias is None else found + bias


class _Cayley(torch.autograd.Function):
    """With M = (I + K)^-1 the rotation is 2 M - I, and dM = - M dK M. In fp32, whatever else is: a rotation of rounded
    products is none.
    """

    @staticmethod
    @override
    def forward(ctx: Any, blocks: Tensor) -> Tensor:
        one = torch.eye(blocks.shape[-1], device=blocks.device, dtype=blocks.dtype)
        with Precision("fp32").products():
            inverse = _inverse(one + (blocks - blocks.transpose(1, 2)) / 2)
        ctx.save_for_backward(inverse)
        return 2 * inverse - one

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        with Precision("fp32").products():
            return _gradient(inverse, gradient)


def _gradient(inverse: Tensor, gradient: Tensor) -> Tensor:
    """Of blocks, from that of their rotations; inverse: (I + K)^-1."""
    turned = inverse.transpose(1, 2)
    own: Tensor = -2 * (turned @ gradient @ turned)
    return (own - own.transpose(1, 2)) / 2


def _inverse(matrices: Tensor) -> Tensor:
    """Of [n, b, b] whose symmetric part is positive definite, as that of I + K is: halves in turn, without pivots."""
    size = matrices.shape[-1]
    if size == 1:
        return matrices.reciprocal()
    half = size // 2
    above, below = matrices[:, :half], matrices[:, half:]
    first = _inverse(above[:, :, :half])
    right, down = first @ above[:, :, half:], below[:, :, :half] @ first
    last = _inverse(torch.baddbmm(below[:, :, half:], below[:, :, :half], right, alpha=-1))
    corner = last @ down
    found = torch.empty_like(matrices)
    found[:, :half, :half] = torch.baddbmm(first, right, corner)
    found[:, :half, half:] = (right @ last).neg_()
    found[:, half:, :half] = corner.neg_()
    found[:, half:, half:] = last
    return found
