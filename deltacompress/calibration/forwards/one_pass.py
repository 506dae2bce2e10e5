"""Norms and rotary embeddings of a library's layers, in one pass over memory where the library takes five or more.

Element by element nothing is computed, only moved: for a 7B layer on a GPU these two are a fifth of a forward. What
takes their place is PyTorch's own fused norm and one kernel (numerics/triton/rotary.py). No model is known by name:
where a result is not the library's, to the rounding of its numbers, the library's function stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from deltacompress.numerics.triton import fused

_ROTARY = "apply_rotary_pos_emb"
_EPSILONS = ("variance_epsilon", "eps")
_ERROR = {torch.float16: 2e-3, torch.float32: 1e-5}
"""How far results may be from the library's, relative to them, both rounded to this dtype."""


@contextmanager
def in_one_pass(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """In this block the layer's root mean square norms and rotary embeddings take one pass each, as far as they can.

    A rotation does where Triton runs on the device.
    """
    with ExitStack() as stack:
        for norm in layer.modules():
            if (epsilon := _epsilon(norm)) is not None:
                stack.callback(vars(norm).pop, "forward", None)
                norm.forward = _like(norm.forward, _norm(norm, epsilon))
        for room in {type(module).__module__ for module in layer.modules() if fused.usable(device)}:
            names = vars(sys.modules[room])
            if (rotary := names.get(_ROTARY)) is not None:
                stack.callback(names.__setitem__, _ROTARY, rotary)
                names[_ROTARY] = _like(rotary, _rotated)
        yield


def _like(library: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` for what it takes, if what it gives first is what the library's function gives; else the library's."""
    agrees: bool | None = None

    def either(*args: Any, **kwargs: Any) -> Any:
        nonlocal agrees
        found = ours(*args) if not kwargs and agrees is not False else None
        if found is None:
            return library(*args, **kwargs)
        if agrees is None:
            expected = library(*args)
            agrees = all(map(_same, _tensors(found), _tensors(expected)))
            return found if agrees else expected
        return found

    return either


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether both round the same values, of one shape and dtype. NaN is equal to nothing."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype) or found.dtype not in _ERROR:
        return False
    return bool((found - expected).norm() <= _ERROR[found.dtype] * expected.norm())


def _epsilon(module: nn.Module) -> float | None:
    """What a norm adds to the mean square, if it has one and no parameter but a weight for each feature."""
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"weight"} or parameters["weight"].ndim != 1:
        return None
    return next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)


def _norm(module: nn.Module, epsilon: float) -> Callable[..., Tensor | None]:
    def run(*args: Any) -> Tensor | None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if len(args) != 1 or args[0].dtype != torch.float32 or args[0].shape[-1:] != weight.shape:
            return None
        return rms_norm(args[0], weight.shape, weight, epsilon)

    return run


def _rotated(*args: Any) -> tuple[Tensor, Tensor] | None:
    from deltacompress.numerics.triton.rotary import rotate, takes

    if len(args) != 4 or not all(isinstance(one, Tensor) for one in args):
        return None
    query, key, cos, sin = args
    tables = cos.dtype == sin.dtype == query.dtype == key.dtype and query.dtype in _ERROR
    if not tables or not takes(query, cos, sin) or not takes(key, cos, sin):
        return None
    return rotate(query, cos, sin), rotate(key, cos, sin)
