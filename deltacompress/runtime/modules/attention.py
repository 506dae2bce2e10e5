"""Attention over pages, and rotary positions, in a launch or two, inside the model's own modules.

Nothing of an architecture is re-implemented: attention is swapped through transformers' registry of attention
functions, and rotary positions by giving the module's own forward another `apply_rotary_pos_emb`, only where that
function gives, bit by bit, what kernels/triton/fused.py stands for. Whatever is of another shape takes the way
that it always takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltacompress.kernels.triton import fused
from deltacompress.models.architectures.caches import cache_argument
from deltacompress.runtime.batch import ForwardContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME, _SEEN = "deltacompress_sdpa", "deltacompress_sdpa_seen"
"""Names of the attention functions in transformers' registry: that which serves, that which looks at what it gets."""
_CONTEXT = "_deltacompress_current"
_ROTARY = "apply_rotary_pos_emb"
_UNKNOWN = ("softcap", "s_aux", "position_bias", "sinks")  # what changes the result and is not covered here


def fuse_attention(model: PreTrainedModel, context: ForwardContext) -> bool:
    """Let the attention modules of a model that uses sdpa take the short way over pages.

    Returns whether all of them hand on what the cache gives them as it is, so that it may be pages.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    for name, function in ((NAME, _attention), (_SEEN, _seen_attention)):
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    known: dict[Any, bool] = {}
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.__dict__[_CONTEXT] = context
            _rotate_fast(module, known)
    model.set_attn_implementation(_SEEN)
    try:
        return _hands_on(model, context)
    finally:
        model.set_attn_implementation(NAME)


class _Spy(DynamicCache):  # type: ignore[misc]
    """Remembers what it gave. arrived: how often an attention function got just that, and could take pages instead."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Tensor, Tensor]] = []
        self.arrived = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.given.append(super().update(*args, **kwargs))
        return self.given[-1]

    def note(self, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
        """An attention function got these."""
        same = bool(self.given) and key is self.given[-1][0] and value is self.given[-1][1]
        alike = query.shape[-1] == key.shape[-1] and key.shape == value.shape
        self.arrived += same and alike and _known(options)


def _hands_on(model: PreTrainedModel, context: ForwardContext) -> bool:
    """Seen in a forward over one token, not guessed."""
    spy: Any = _Spy()
    context.rows = spy
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            model(input_ids=ids, use_cache=True, **{cache_argument(model): spy})
    finally:
        context.rows = None
    return bool(0 < spy.arrived == len(spy.given))


def _seen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    context: ForwardContext | None = module.__dict__.get(_CONTEXT)
    if context is not None and isinstance(context.rows, _Spy):
        context.rows.note(query, key, value, options)
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
    return found


def _known(options: Mapping[str, Any]) -> bool:
    """Whether nothing changes the result that fused.attend does not cover."""
    return all(options.get(name) is None for name in _UNKNOWN)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context: ForwardContext | None = module.__dict__.get(_CONTEXT)
    rows = None if context is None else context.rows
    if rows is not None:  # key and value are pages
        if attention_mask is not None and _known(kwargs) and fused.attends(query, key, value, attention_mask):
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            return fused.attend(query, key, value, rows.table, attention_mask, rows.positions, scale), None
        key, value = rows.gathered(key), rows.gathered(value)
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return found


def _rotate_fast(module: nn.Module, known: dict[Any, bool]) -> None:
    """Give this module's forward the fused rotation, if it calls one that is the same."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return
    plain = forward.__globals__.get(_ROTARY)
    if plain is None:
        return
    if plain not in known:
        known[plain] = _is_rotation(plain)
    if not known[plain]:
        return

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        alike = cos.shape == sin.shape and cos.stride() == sin.stride() and cos.dtype == sin.dtype
        if args or kwargs or not alike or not q.is_cuda or not fused.rotates(q, k, cos):
            return plain(q, k, cos, sin, *args, **kwargs)
        return fused.rotate(q, k, cos, sin)

    names = {**forward.__globals__, _ROTARY: rotate}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(made, module)


def _is_rotation(plain: Callable[..., Any]) -> bool:
    """Whether a function rotates by halves, as kernels/triton/fused.py does."""
    draw = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, generator=draw) for shape in ((2, 3, 2, 8), (2, 1, 2, 8), (2, 2, 8), (2, 2, 8))
    )
    try:
        found = plain(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another function of the same name
    wanted = fused.rotate_formula(q, k, cos, sin)
    return len(found) == 2 and all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
