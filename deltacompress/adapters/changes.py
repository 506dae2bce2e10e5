"""From the tensors of an adapter's file to what changes, module by module: all of them used, none a silent no-op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deltacompress.adapters.checks import low_rank, rotation, sparse, whole
from deltacompress.adapters.checks.base import (
    HEAD,
    HEAD_OF_NEOX,
    DoesNotFitError,
    NoSuchTargetError,
    Shape,
    embedding_of,
    find,
    is_tied,
    weight_of,
)
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
    brought = _brought(tensors, settings)
    found = {module: _change(one, tensors, settings, base) for module, one in brought.items()}
    rotation.check_factors(brought.values(), tensors)
    called = _called(found, base)
    _check_targets({module for module, one in brought.items() if one.matrices}, settings, [*called, HEAD])
    of_model = [one for one in called if one != HEAD_OF_NEOX]
    _check_names_saved(found, settings, [*of_model, *([HEAD] if is_tied(base) else [])])
    _check_tokens(found, settings, tied=is_tied(base))
    return found


def check_together(tensors: Tensors, settings: AdapterConfig) -> None:
    """What can be known without a base: there is something, of what belongs together all, and as the config says.

    Raises:
        ValueError: as changes_of.
    """
    brought = [one for one in _brought(tensors, settings).values() if one.matrices]
    for one in brought:
        if settings.kind == "lora":
            low_rank.alone(one, tensors, settings)
        elif settings.kind == "boft":
            rotation.alone(one, tensors, settings)
        elif settings.kind == "shira":
            sparse.need(one)
        else:
            dense, others = _rosa_parts(one, settings)
            if dense is not None:
                low_rank.alone(dense, tensors, settings)
            if others:
                sparse.need_compressed(one)
    rotation.check_factors(brought, tensors)
    _check_targets_alone([one.module for one in brought], settings)


def modules_of(changes: Mapping[str, Change], base: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """What half_note takes, by the names in a checkpoint, for want of a model. base: as changes_of.

    Left out are experts, whose matrices are one parameter in the model, and what is beside a language model that sees.
    """
    tied, texts = is_tied(base), any("language_model" in name.split(".") for name in base)
    of_model = {one.tensor.rpartition(".")[0]: one.module for one in changes.values() if not tied or one.module != HEAD}
    names = [name for name in base if not texts or {"language_model", HEAD} & {*name.split(".")}]
    names = [name for name in names if "experts" not in name.split(".")]
    called = zip(names, _called(changes, names), strict=True)
    modules = {name: of_model.get(name.rpartition(".")[0], module) for name, module in called}
    matrices = [module for name, module in modules.items() if name.endswith(".weight") and len(base[name]) == 2]
    biased = [module for name, module in modules.items() if name.endswith(".bias")]
    return [*matrices, *([HEAD] if tied else [])], biased


def half_note(
    changes: Mapping[str, Change], settings: AdapterConfig, modules: Collection[str], biased: Collection[str]
) -> str | None:
    """What to tell of a file that has nothing for some of what its config means; None: it has all.

    modules: of the model, that can have matrices; biased: those that have a bias. Which modules an expression means is
    not known.
    """
    named, told = not isinstance(settings.targets, str), list[str]()
    if named:
        there = {name for name, one in changes.items() if any((one.low_rank, one.embedding, one.rotation, one.sparse))}
        meant = [one for one in modules if settings.has_matrices(one)]
        end = "they are served as they are without it"
        told += _lacking(meant, there, "nothing for {} modules that its config names", end, settings)
    if settings.biases == "all" or (settings.biases == "targets" and named):
        there = {name for name, one in changes.items() if one.whole is not None and one.whole.bias is not None}
        meant = [one for one in biased if settings.biases == "all" or settings.is_target(one)]
        end = "they keep those that they have without it"
        told += _lacking(meant, there, "no bias for {} modules whose biases were trained", end, settings)
    return "; ".join(told) or None


def head_note(changes: Mapping[str, Change], base: Mapping[str, Shape]) -> str | None:
    """What to tell of a head that has grown beyond its embedding; None: it has not. base: as changes_of.

    Whether the model ties one that is stored beside it to that, no shape says.
    """
    head, table = changes.get(HEAD), embedding_of(base)
    if head is None or table is None or is_tied(base):
        return None
    rows = next((one.shape[0] for one in changes.values() if one.tensor == table), base[table][0])
    if head.shape[0] <= rows:
        return None
    return f"its head has {head.shape[0]} rows, its embedding {rows}: it is served where the model ties the two only"


def _lacking(meant: Sequence[str], there: set[str], what: str, end: str, settings: AdapterConfig) -> list[str]:
    lacking = [one for one in meant if one not in there]
    if not lacking:
        return []
    unless = ", unless the expression of exclude_modules leaves them out" if settings.by_expression else ""
    told = what.format(f"{len(lacking)} of {len(meant)}")
    return [f"its file has {told} ({lacking[0]} first): {end}{unless}"]


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


def _brought(tensors: Tensors, settings: AdapterConfig) -> dict[str, Brought]:
    found = by_module(tensors, settings.kind)
    there = [module for module, one in found.items() if one.matrices]
    if not there:
        raise ValueError(f"holds no {settings.kind} matrices")
    for module in there:
        if (why := settings.why_none(module)) is not None:
            raise ValueError(f"module {module} {why}")
    return found


def _change(brought: Brought, tensors: Tensors, settings: AdapterConfig, base: Mapping[str, Shape]) -> Change:
    module = brought.module
    if not brought.roles and not any(find(f"{module}.{part}", base) for part in ("weight", "bias")):
        raise DoesNotFitError(f"module {module} is not in the base")  # of which there are copies
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
    try:
        return _matrices_as_said(brought, tensors, settings, shape)
    except DoesNotFitError:
        if settings.transposed:
            with suppress(DoesNotFitError):
                _matrices_as_said(brought, tensors, replace(settings, transposed=False), shape)
                told = "what is there fits a weight [out, in]; make fan_in_fan_out of the config false"
                raise ValueError(f"module {brought.module}: {told}") from None
        raise


def _matrices_as_said(brought: Brought, tensors: Tensors, settings: AdapterConfig, shape: Shape) -> dict[str, Any]:
    """By the config. outputs, inputs: as it says that the weight lies."""
    outputs, inputs = reversed(shape) if settings.transposed else shape
    if settings.kind == "boft":
        return {"rotation": rotation.rotation(brought, tensors, settings, outputs, inputs)}
    if settings.kind == "shira":
        return {"sparse": sparse.scattered(brought, tensors, settings, outputs, inputs)}
    if settings.kind == "lora":
        if any(role.startswith("embedding") for role in brought.roles):
            return {"embedding": low_rank.embedding(brought, tensors, settings, *shape)}
        return {"low_rank": low_rank.low_rank(brought, tensors, settings, outputs, inputs)}
    return _rosa(brought, tensors, settings, outputs, inputs)


def _rosa(brought: Brought, tensors: Tensors, settings: AdapterConfig, outputs: int, inputs: int) -> dict[str, Any]:
    """Both parts, or the one that rank and density leave."""
    found: dict[str, Any] = {}
    dense, others = _rosa_parts(brought, settings)
    if dense is not None:
        found["low_rank"] = low_rank.low_rank(dense, tensors, settings, outputs, inputs)
    if others:
        found["sparse"] = sparse.compressed(brought, tensors, settings, outputs, inputs)
    return found


def _rosa_parts(brought: Brought, settings: AdapterConfig) -> tuple[Brought | None, bool]:
    """Its A and B, if it has any, and whether it has entries; raises ValueError: a part is missing."""
    module, there = brought.module, brought.matrices
    for has, part in ((settings.rank_of(module) > 0, {"A", "B"}), (settings.density_of(module) > 0, {"values"})):
        if has and not there >= part:
            raise ValueError(f"module {module} has {', '.join(sorted(there))} only, without {', '.join(sorted(part))}")
    dense = Brought(module, {role: name for role, name in brought.roles.items() if role in ("A", "B")})
    return dense if dense.roles else None, bool(there - {"A", "B"})


def _called(found: Mapping[str, Change], base: Iterable[str]) -> list[str]:
    """Modules of the base as the model calls them: the file's tell the prefix that a checkpoint may leave out."""
    own = ((one.module, one.tensor.rpartition(".")[0]) for one in found.values() if one.tensor)
    prefix = next((module.removesuffix(name) for module, name in own if module.endswith(name)), "")
    return [prefix + name.rpartition(".")[0] for name in base]


def _check_names_saved(found: Mapping[str, Change], settings: AdapterConfig, modules: Sequence[str]) -> None:
    """Of each name of modules_to_save there is something, unless the base has no such module; `check_saved` asks for
    all of it, of the model's own names. modules: as the base calls them.
    """
    for name in settings.saved:
        only = replace(settings, saved=(name,))
        if not any(map(only.is_saved, found)) and any(map(only.is_saved, modules)):
            raise ValueError(f"has nothing of {name}, which modules_to_save names")


def _check_targets(there: set[str], settings: AdapterConfig, modules: Sequence[str]) -> None:
    """Every name of the list has matrices, unless all that it means is left out; an expression may leave out anything.

    there: what has matrices; modules: of the model.
    """
    if isinstance(settings.targets, str):
        return
    for target in settings.targets:
        if any(is_named(module, (target,)) for module in there):
            continue
        meant = [module for module in modules if is_named(module, (target,))]
        if not meant:
            raise NoSuchTargetError(f"has no matrices for its target module {target}, and the base no such module")
        if not settings.by_expression and any(map(settings.has_matrices, meant)):
            error = NoSuchTargetError if set(meant) == {HEAD_OF_NEOX} else ValueError
            raise error(f"has no matrices for its target module {target}")


def _check_targets_alone(there: Sequence[str], settings: AdapterConfig) -> None:
    """The same as far as no base has to say what a name means: where nothing could leave out all of it."""
    may_leave_out = settings.by_expression or settings.excluded or settings.saved or settings.layers is not None
    if isinstance(settings.targets, str) or settings.kind == "rosa" or may_leave_out:  # RoSA's may be of size 0
        return
    for target in settings.targets:
        if not any(is_named(module, (target,)) for module in there):
            raise NoSuchTargetError(f"has no matrices for its target module {target}")


def _check_tokens(found: Mapping[str, Change], settings: AdapterConfig, *, tied: bool) -> None:
    """tied: the head to the embedding, whose rows PEFT saves once for both, where the same are named for both."""
    there = {module: change.rows for module, change in found.items() if change.rows is not None}
    for at, tokens in settings.tokens.items():
        count = sum(whole.means(at, module) for module in there)
        if not count and tied and whole.means(at, HEAD):
            count = sum(rows.indices == tokens for rows in there.values())
        if count != 1:
            raise ValueError(f"trainable_token_indices names {at or 'the embedding'}, of which {count} are in the file")
