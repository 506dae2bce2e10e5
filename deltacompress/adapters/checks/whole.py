"""Tensors that take the place of the base's, and rows of a table that do."""

from __future__ import annotations

from collections.abc import Mapping

from deltacompress.adapters.checks.base import HEAD, DoesNotFitError, NotReadError, Shape, find, is_table, same
from deltacompress.adapters.patterns import is_named
from deltacompress.adapters.records import TokenRows, Whole
from deltacompress.adapters.settings import AdapterConfig
from deltacompress.adapters.tensors import Brought
from deltacompress.types import TensorInfo

Tensors = Mapping[str, TensorInfo]


def whole(brought: Brought, tensors: Tensors, settings: AdapterConfig, base: Mapping[str, Shape]) -> Whole | None:
    """Its weight and bias, if it brings any.

    Raises:
        ValueError: they may not be brought, or do not fit.
    """
    module, roles = brought.module, brought.roles
    for plain, beside in (("weight", "weight beside"), ("bias", "bias beside")):
        if plain in roles and beside in roles:
            raise ValueError(f"tensors {roles[plain]} and {roles[beside]} are both the {plain} of {module}")
        if beside in roles and not (brought.matrices or (plain == "weight" and "rows" in roles)):
            raise ValueError(f"tensor {roles[beside]} is whole, but {module} has no matrices")
    for part in ("weight", "bias"):
        copy, own = roles.get(f"copy of the {part}"), roles.get(part)
        if copy is not None and own is None:
            raise ValueError(f"tensor {copy} is a copy of a {part} that is not there")
        if copy is not None and own is not None and not _alike(tensors[copy], tensors[own]):
            raise ValueError(f"tensor {copy} is no copy of {own}")
    weight = roles.get("weight", roles.get("weight beside"))
    bias = roles.get("bias", roles.get("bias beside"))
    if weight is not None:
        table = is_table(module) or "embedding A" in roles  # PEFT saves them unasked where they may have been resized
        if not table and not settings.is_saved(module):
            raise ValueError(f"tensor {weight} is whole, but {module} is not among modules_to_save")
        if "weight" in roles and (brought.matrices or "rows" in roles):
            raise ValueError(f"tensor {weight} is whole, but {module} has matrices or rows too")
        _fits(module, "weight", tensors[weight], base, grows=table)
    if bias is not None:
        if weight is not None and tensors[weight].shape > base[find(f"{module}.weight", base) or ""]:
            what = "a bias beside rows that the vocabulary has grown by, which is not read here"
            if find(f"{module}.bias", base) is not None:
                raise NotReadError(f"module {module}: {what}")
        _fits(module, "bias", tensors[bias], base, grows=False)
    return None if weight is None and bias is None else Whole(weight, bias)


def means(at: str, module: str) -> bool:
    """Whether a key of trainable_token_indices is this module's."""
    return is_named(module, (at,)) if at else module.rpartition(".")[2] != HEAD


def rows(brought: Brought, tensors: Tensors, settings: AdapterConfig, shape: Shape, *, tied: bool) -> TokenRows | None:
    """Its rows of single tokens, if it brings any; shape: of the table; tied: the head to the embedding.

    Raises:
        ValueError: the config does not name them, or they do not fit.
    """
    name = brought.roles.get("rows")
    if name is None:
        return None
    module = brought.module
    wanted = [found for at, found in settings.tokens.items() if means(at, module)]
    if not wanted and module == HEAD and tied:  # PEFT saves those of the embedding again where the vocabulary has grown
        wanted = list(settings.tokens.values())
    if len(wanted) != 1:
        raise ValueError(f"tensor {name} holds rows, but trainable_token_indices names none, or several, for {module}")
    if brought.matrices:
        raise ValueError(f"module {module} has rows of single tokens and matrices, which PEFT does not put together")
    count = tensors[name].shape[:1]
    if count != (len(wanted[0]),):
        told = f"trainable_tokens_delta has shape {list(tensors[name].shape)}, by the config {len(wanted[0])} rows"
        raise ValueError(f"module {module}: {told}")
    same(module, "trainable_tokens_delta", tensors[name], (len(wanted[0]), shape[1]))
    if max(wanted[0]) >= shape[0]:
        raise DoesNotFitError(f"module {module}: token {max(wanted[0])} is beyond the {shape[0]} rows of the table")
    return TokenRows(wanted[0], name)


def _alike(one: TensorInfo, two: TensorInfo) -> bool:
    return (one.shape, one.dtype) == (two.shape, two.dtype)


def _fits(module: str, leaf: str, info: TensorInfo, base: Mapping[str, Shape], *, grows: bool) -> None:
    found = find(f"{module}.{leaf}", base)
    if found is None:
        raise DoesNotFitError(f"tensor {module}.{leaf} is not in the base")
    shape = base[found]
    if grows and len(shape) == len(info.shape) == 2 and info.shape[0] > shape[0]:
        shape = (info.shape[0], shape[1])
    same(module, leaf, info, shape)
