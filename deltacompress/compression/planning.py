"""The plan of a compression: what happens to each tensor, decided and checked before any work is done."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from deltacompress.artifact.records import FILE_NAME
from deltacompress.artifact.side_by_side import side_by_side
from deltacompress.checkpoints.header import FLOATS
from deltacompress.checkpoints.names import MAX_NAME
from deltacompress.checkpoints.pairing import Pairing, TensorPair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.rows import Rows
from deltacompress.codecs.codec import Codec
from deltacompress.codecs.formats.table import matrix_of
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.registry import CODECS
from deltacompress.codecs.settings import ExactSettings, Quantizing, Settings
from deltacompress.errors import CheckpointError, PairError, RecipeError
from deltacompress.types import OddLinears, TensorKind

_MAX_NAME = MAX_NAME - 24  # a part is called tensor.part, in a file under the same rules
_READERS = 4  # pairs of tensors that are compared at once
_LARGE = ("linear", "embedding", "head")
_NOT_ODD = OddLinears()
Treatment = Literal["code", "exact", "identical", "added", "alias"]
_Ruled = tuple[TensorKind, Settings]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One fine-tuned tensor and what to do with it.

    treatment: code (lossy, by `settings`), exact, identical (bitwise the base's), added (exact, no base) or alias.
    fitted: what the codec's `fit` found for it, if it has one, once that has run; or how often each token comes.
    transposed: whether it is coded as [out, in] while it lies as [in, out].
    """

    pair: TensorPair
    kind: TensorKind
    treatment: Treatment
    settings: Settings
    fitted: Any = None
    transposed: bool = False

    @property
    def inputs(self) -> int:
        """Input features of a linear."""
        return self.pair.info.shape[0 if self.transposed else 1]

    @property
    def outputs(self) -> int:
        """Output features of a linear."""
        return self.pair.info.shape[1 if self.transposed else 0]

    def matrix(self, scope: Literal["delta", "full"]) -> tuple[int, int]:
        """Rows and columns of what is coded of it: none of those that the base does not have."""
        rows = self.pair.base_rows if scope == "delta" else None
        return matrix_of(self.pair.info.shape, rows, transposed=self.transposed)[:2]

    @property
    def name(self) -> str:
        return self.pair.info.name

    @property
    def codec(self) -> Codec:
        """What chooses its values."""
        return CODECS[self.settings.codec]

    @property
    def calibrated(self) -> bool:
        """Whether it is coded from what it receives."""
        return self.treatment == "code" and self.codec.calibrates

    @property
    def needs_teacher(self) -> bool:
        """Whether it is coded from what the fine-tuned model gives it, too."""
        return self.calibrated and self.settings.needs_teacher

    @property
    def by_outputs(self) -> bool:
        """Whether, alone with its input, it may take W_ft D and no D (numerics/hessian.py): fewer operations."""
        able = self.needs_teacher and self.codec.by_outputs and not self.transposed
        return able and 2 * self.outputs < self.inputs

    @property
    def needs_fisher(self) -> bool:
        """Whether it is coded by what its outputs are worth, too."""
        return self.calibrated and self.settings.needs_fisher


@dataclass(frozen=True)
class Plan:
    """Everything decided: the pair, the recipe and one TensorPlan per fine-tuned tensor, by name.

    unwalked: names of the linears that are exact because they have no input of their own; merged: of those that are
    because a codec that looks at the whole model finds no module of theirs. stacked: of all experts in one, exact.
    """

    pairing: Pairing
    recipe: Recipe
    tensors: dict[str, TensorPlan]
    unwalked: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()

    @property
    def base(self) -> Checkpoint:
        return self.pairing.base

    @property
    def finetuned(self) -> Checkpoint:
        return self.pairing.finetuned

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the pair, a line each."""
        odd = {*self.unwalked, *self.merged, *self.stacked}
        able = [one for one in self.tensors.values() if one.treatment in ("code", "exact") and one.name not in odd]
        able = [one for one in able if one.kind == "linear" and one.pair.info.dtype in FLOATS]
        codecs = {one.name: one.settings.codec for one in able}
        notes = [*self.pairing.notes, *self.recipe.notes_on(self.tensors, codecs)]
        whole = Counter(plan.pair.info.dtype for plan in self.tensors.values() if plan.kind in _LARGE)
        kept = (
            (self.unwalked, "linear weights", "do not run once in each forward"),
            (self.merged, "linear weights", "are no modules of transformers' model"),
            (self.stacked, "tensors", "hold a weight of all experts each"),
        )
        notes += [f"{len(names)} {what} ({names[0]}, ...) {why}: stored exactly" for names, what, why in kept if names]
        notes += [f"{n} weights are {dtype}: stored exactly" for dtype, n in whole.items() if dtype not in FLOATS]
        return tuple(notes)

    @property
    def bf16_linears(self) -> bool:
        """Whether the fine-tuned model's linears, and so what they are restored to, are bfloat16 throughout."""
        return {plan.pair.info.dtype for plan in self.tensors.values() if plan.kind == "linear"} <= {"BF16"}

    @property
    def calibrated(self) -> bool:
        """Whether any tensor is coded from activations."""
        return any(plan.calibrated for plan in self.tensors.values())

    @property
    def to_fit(self) -> dict[str, list[TensorPlan]]:
        """The tensors of each codec that fits the whole model before it encodes, by the codec's name."""
        found: dict[str, list[TensorPlan]] = {}
        for plan in self.tensors.values():
            if plan.treatment == "code" and plan.codec.fit is not None:
                found.setdefault(plan.codec.name, []).append(plan)
        return found

    @property
    def asymmetric(self) -> bool:
        """Whether any tensor needs the fine-tuned model's activations too."""
        return any(plan.needs_teacher for plan in self.tensors.values())

    @property
    def fisher(self) -> bool:
        """Whether any tensor needs the Fisher information of its outputs."""
        return any(plan.needs_fisher for plan in self.tensors.values())

    def wrong_with(self, fitted: Any) -> str | None:
        """What makes `fitted`, as an interrupted run left it, none of what this plan's codecs fit."""
        wanted = {plan.name: plan for plans in self.to_fit.values() for plan in plans}
        if not isinstance(fitted, dict) or fitted.keys() != wanted.keys():
            return "its tensors are not those of this run"
        for name, plan in wanted.items():
            if plan.codec.accepts is not None and not plan.codec.accepts(fitted[name]):
                return f"its value for {name} is none that {plan.codec.name} fits"
        return None

    def with_fitted(self, values: Mapping[str, Any]) -> Plan:
        """The same with what was fitted for some tensors."""
        found = {name: replace(self.tensors[name], fitted=value) for name, value in values.items()}
        return replace(self, tensors=self.tensors | found)

    def with_counts(self, ids: Tensor) -> Plan:
        """The same with how often each token comes in `ids`, int64, for the tensors whose codecs want it."""
        wanting = (one for one in self.tensors.values() if one.treatment == "code" and one.codec.counts)
        return self.with_fitted({one.name: ids.flatten().bincount(minlength=one.pair.info.shape[0]) for one in wanting})

    def rows(self, plan: TensorPlan, device: torch.device | None = None) -> tuple[Rows | None, Rows]:
        """(what the tensor is coded against, the fine-tuned tensor), to be read piece by piece; as `base_of`."""
        finetuned, pair = Rows(self.finetuned, plan.name, device=device), plan.pair
        if self.recipe.scope == "full" or pair.base_name is None:
            return None, finetuned
        wide = plan.treatment not in ("exact", "identical")
        return Rows(self.base, pair.base_name, rows=pair.base_rows, wide=wide, device=device), finetuned

    def base_of(self, plan: TensorPlan, device: torch.device | None = None) -> torch.Tensor | None:
        """What the tensor is coded against, the fine-tuned one left unread; None where there is nothing.

        f32 for coded tensors; the base's own bits for exact and identical ones, where a cast could change a NaN or
        round an F64.
        """
        if self.recipe.scope == "full":
            return None
        return self.pairing.read_base(plan.pair, bits=plan.treatment in ("exact", "identical"), device=device)

    def read_ahead(self, names: Iterable[str], device: torch.device) -> None:
        """Let a thread read what the calibrated ones of these are made of, beside a GPU; a CPU has no time to spare."""
        chosen = names if device.type == "cuda" else ()
        plans = [self.tensors[name] for name in chosen if self.tensors[name].calibrated]
        self.finetuned.read_ahead(plan.name for plan in plans)
        if self.recipe.scope == "delta":
            self.base.read_ahead(plan.pair.base_name for plan in plans if plan.pair.base_name)


def make_plan(
    pairing: Pairing, recipe: Recipe, kind_of: Callable[[str], TensorKind], odd: OddLinears = _NOT_ODD
) -> Plan:
    """Choose a rule for every tensor of a pairing, and refuse what cannot work.

    odd: linears that are coded another way than they lie, or, by a codec that calibrates, not at all.

    Raises:
        PairError: codec skip on a tensor with more rows than the base's; both models are the same.
        CheckpointError: a side file with an odd name, or that cannot be read; a tensor whose name is too long, or that
            cannot be read.
        RecipeError: a tensor that no rule fits, or a group size that does not divide.
    """
    base, finetuned = pairing.base, pairing.finetuned
    for file in finetuned.side_files():
        if not re.fullmatch(FILE_NAME, file.name):
            told = "not a file name that an artifact may hold"
            raise CheckpointError(told, where=file, way_out="rename or remove it")
        finetuned.open_side_file(file).close()  # it is copied at the end, and must not fail then
    for name in (one for one in finetuned.tensors if len(one) > _MAX_NAME):
        told = f"tensor {name[:40]}... has a name of {len(name)} characters, more than {_MAX_NAME}"
        raise CheckpointError(told, where=finetuned.path, way_out="rename it")
    kinds = ((found.info.name, kind_of(found.info.name)) for found in pairing.pairs)
    rules = {name: (kind, recipe.rule_for(name, kind)) for name, kind in kinds}  # before any weight is read
    same = _identical(pairing) if recipe.scope == "delta" else frozenset()
    tensors = {plan.name: plan for plan in _plans(pairing, recipe, rules, odd, same)}
    _check_shapes(recipe, tensors.values())
    if all(plan.treatment in ("identical", "alias") for plan in tensors.values()):
        same_as = f"the base {base.path} (content hash {finetuned.fingerprint()[:12]})"
        told = f"has the weights of {same_as}, so there is nothing to compress"
        raise PairError(told, where=finetuned.path, way_out="give the fine-tuned model")
    exact = [name for name, plan in tensors.items() if plan.treatment == "exact"]
    unwalked = tuple(name for name in exact if name in odd.unwalked)
    merged = tuple(name for name in exact if name in odd.merged and name not in odd.unwalked)
    stacked = tuple(name for name in exact if name in odd.stacked)
    return Plan(pairing, recipe, tensors, unwalked, merged, stacked)


def _plans(
    pairing: Pairing, recipe: Recipe, rules: Mapping[str, _Ruled], odd: OddLinears, same: frozenset[str]
) -> Iterator[TensorPlan]:
    for found in pairing.pairs:
        name = found.info.name
        kind, settings = rules[name]
        codec = CODECS[settings.codec]
        if (name in odd.unwalked and codec.calibrates) or (name in odd.merged and codec.fit is not None):
            settings = ExactSettings()
        treatment = _treatment(found, recipe, settings, same)
        if treatment == "code" and settings.codec == "skip" and found.base_rows not in (None, found.info.shape[0]):
            raise PairError("codec skip, but the base has fewer rows", where=name, way_out="use rtn or exact for it")
        turned = name in odd.transposed and treatment == "code" and isinstance(settings, Quantizing)
        used = settings if treatment == "code" else ExactSettings()
        yield TensorPlan(found, kind, treatment, used, transposed=turned)


def _check_shapes(recipe: Recipe, tensors: Iterable[TensorPlan]) -> None:
    """Raises RecipeError: a tensor cannot be coded as it is to be. The smallest first: what it allows, others do."""
    shapes = [(one, *one.matrix(recipe.scope)) for one in tensors if one.treatment == "code"]
    for plan, rows, columns in sorted(shapes, key=lambda one: min(one[1:])):
        try:
            plan.settings.check_shape(rows, columns, plan.name)
        except RecipeError as error:
            raise error.retold(RecipeError, within=f"recipe {recipe.name}") from error


def _identical(pairing: Pairing) -> frozenset[str]:
    """The fine-tuned tensors that are the base's bit for bit; others are read no further than they differ."""
    base, finetuned = pairing.base, pairing.finetuned

    def same(found: TensorPair) -> bool:
        if found.base_name is None or found.base_rows is not None:
            return False
        other, info = base.tensors[found.base_name], found.info
        return (other.dtype, other.shape) == (info.dtype, info.shape) and base.equals(other.name, finetuned, info.name)

    are = side_by_side(same, pairing.pairs, _READERS)
    return frozenset(found.info.name for found, it_is in zip(pairing.pairs, are, strict=True) if it_is)


def _treatment(found: TensorPair, recipe: Recipe, settings: Settings, same: frozenset[str]) -> Treatment:
    info, status = found.info, found.status
    if status != "paired" and not (recipe.scope == "full" and status == "added"):
        return "alias" if status == "alias" else "added"
    lossy = info.dtype in FLOATS and len(info.shape) >= 1 and info.numel > 0 and settings.codec != "exact"
    return "identical" if info.name in same else "code" if lossy else "exact"
