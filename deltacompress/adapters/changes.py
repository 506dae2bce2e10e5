"""From the tensors of an adapter's file to what changes, module by module: all of them used, none a silent no-op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from deltacompress.adapters.checks import low_rank, sparse, whole
from deltacompress.adapters.checks.base import HEAD, Shape, find, is_tied, weight_of
from deltacompress.adapters.checks.rotation import rotation
from deltacompress.adapters.patterns import is_named
from deltacompress.adapters.records import Change, Whole
from deltacompress.adapters.settings import AdapterConfig
from deltacompress.adapters.tensors import Brought, by_module
from deltacompress.types import TensorInfo

Tensors = Mapping[str, TensorInfo]


def changes_of(tensors: Tensors, settings: AdapterConfig, base: Mapping[str, Shape]) -> dict[str, Change]:
    """Module, as the model calls it -> what the adapter brings for it.

    base: tensor name -> shape.

    Raises:
        ValueError: one line without the file's name: which tensor it is, and how it does not fit.
    """
    brought = by_module(tensors, settings.kind)
    if not any(one.matrices for one in brought.values()):
        raise ValueError(f"holds no {settings.kind} matrices")
    found = {module: _change(one, tensors, settings, base) for module, one in brought.items()}
    _check_targets({module for module, one in brought.items() if one.matrices}, settings, base)
    _check_tokens(found, settings, tied=is_tied(base))
    return found


def half_note(
    changes: Mapping[str, Change], settings: AdapterConfig, modules: Collection[str], biased: Collection[str]
) -> str | None:
    """What to tell of a file that has nothing for some of what its config means; None: it has all.

    modules: of the model, that can have matrices; biased: those that have a bias. Of an expression it is not known
    which of them it means.
    """
    known = not isinstance(settings.targets, str) and not settings.by_expression
    if known:
        there = {name for name, one in changes.items() if any((one.low_rank, one.embedding, one.rotation, one.sparse))}
        left_out = {one for one in modules if settings.is_empty(one) or settings.is_saved(one)}
        meant = [one for one in modules if settings.is_target(one) and one not in left_out]
        if lacking := [one for one in meant if one not in there]:
            told = f"its file has nothing for {len(lacking)} of {len(meant)} modules that its config names"
            return f"{told} ({lacking[0]} first): they are served as they are without it"
    if settings.biases == "none" or (settings.biases == "targets" and not known):
        return None
    there = {name for name, one in changes.items() if one.whole is not None and one.whole.bias is not None}
    meant = [one for one in biased if settings.biases == "all" or settings.is_target(one)]
    if lacking := [one for one in meant if one not in there]:
        told = f"its file has no bias for {len(lacking)} of {len(meant)} modules whose biases were trained"
        return f"{told} ({lacking[0]} first): they keep those that they have without it"
    return None


def check_saved(changes: Mapping[str, Change], settings: AdapterConfig, tensors: Iterable[str]) -> None:
    """Of each module that modules_to_save names all is in the file: PEFT loads no other.

    tensors: weights and biases of the model, as it calls them.

    Raises:
        ValueError: one line without the file's name.
    """
    for tensor in tensors:
        module, _, part = tensor.rpartition(".")
        if not settings.is_saved(module):
            continue
        own = changes[module].whole if module in changes else None
        if own is None:
            raise ValueError(f"has nothing of {module}, which modules_to_save names")
        if (own.bias if part == "bias" else own.weight) is None:
            raise ValueError(f"has no {part} of {module}, which modules_to_save names")


def _change(brought: Brought, tensors: Tensors, settings: AdapterConfig, base: Mapping[str, Shape]) -> Change:
    module = brought.module
    if brought.matrices and not settings.is_target(module):
        raise ValueError(f"module {module} is not among target_modules")
    own = whole.whole(brought, tensors, settings, base)
    if brought.matrices or "rows" in brought.roles:
        tensor = weight_of(module, base)
    else:
        tensor = find(f"{module}.weight", base) or ""
    shape = _shape(own, tensors, base.get(tensor, ()))
    parts: dict[str, Any] = {}
    if brought.matrices:
        parts = _matrices(brought, tensors, settings, shape)
    if "rows" in brought.roles:
        parts["rows"] = whole.rows(brought, tensors, settings, shape, tied=is_tied(base))
    return Change(module, tensor, shape, settings.transposed, whole=own, **parts)


def _shape(own: Whole | None, tensors: Tensors, shape: Shape) -> Shape:
    return shape if own is None or own.weight is None else tensors[own.weight].shape


def _matrices(brought: Brought, tensors: Tensors, settings: AdapterConfig, shape: Shape) -> dict[str, Any]:
    outputs, inputs = reversed(shape) if settings.transposed else shape
    if settings.kind == "boft":
        return {"rotation": rotation(brought, tensors, settings, outputs, inputs)}
    if settings.kind == "shira":
        return {"sparse": sparse.scattered(brought, tensors, settings, outputs, inputs)}
    if settings.kind == "lora":
        if any(role.startswith("embedding") for role in brought.roles):
            return {"embedding": low_rank.embedding(brought, tensors, settings, *shape)}
        return {"low_rank": low_rank.low_rank(brought, tensors, settings, outputs, inputs)}
    return _rosa(brought, tensors, settings, outputs, inputs)


def _rosa(brought: Brought, tensors: Tensors, settings: AdapterConfig, outputs: int, inputs: int) -> dict[str, Any]:
    """Both parts, or the one that rank and density leave."""
    module = brought.module
    found: dict[str, Any] = {}
    there = brought.matrices
    for has, part in ((settings.rank_of(module) > 0, {"A", "B"}), (settings.density_of(module) > 0, {"values"})):
        if has and not there >= part:
            raise ValueError(f"module {module} has {', '.join(sorted(there))} only, without {', '.join(sorted(part))}")
    if there & {"A", "B"}:
        dense = Brought(module, {role: name for role, name in brought.roles.items() if role in ("A", "B")})
        found["low_rank"] = low_rank.low_rank(dense, tensors, settings, outputs, inputs)
    if there - {"A", "B"}:
        found["sparse"] = sparse.compressed(brought, tensors, settings, outputs, inputs)
    return found


def _check_targets(modules: set[str], settings: AdapterConfig, base: Iterable[str]) -> None:
    """Every name of the list has matrices; or all that it means is left out of them, or they were left out of the file.

    What an exclude_modules that is an expression leaves out is not known.
    """
    if isinstance(settings.targets, str) or settings.by_expression:
        return
    for target in settings.targets:
        if any(is_named(module, (target,)) for module in modules):
            continue
        meant = [module for module in (name.rpartition(".")[0] for name in base) if is_named(module, (target,))]
        if not meant or any(map(settings.is_target, meant)):
            raise ValueError(f"has no matrices for its target module {target}")


def _check_tokens(found: Mapping[str, Change], settings: AdapterConfig, *, tied: bool) -> None:
    """tied: the head to the embedding, whose rows PEFT saves once for both, where the same are named for both."""
    there = {module: change.rows for module, change in found.items() if change.rows is not None}
    for at, tokens in settings.tokens.items():
        count = sum(whole.means(at, module) for module in there)
        if not count and tied and whole.means(at, HEAD):
            count = sum(rows.indices == tokens for rows in there.values())
        if count != 1:
            raise ValueError(f"trainable_token_indices names {at or 'the embedding'}, of which {count} are in the file")
