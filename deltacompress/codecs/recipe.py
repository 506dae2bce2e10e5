"""Recipes: which codec each tensor goes through.

A recipe is a list of rules; the first that matches a tensor decides, and a tensor that none matches is an error, so no
tensor is stored whole (or dropped) for lack of a rule. Recipes are YAML files: the shipped ones live in
calibration/recipes/ and are named without their suffix.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from deltacompress.arguments import checked
from deltacompress.codecs.codec import Codec
from deltacompress.codecs.registry import CODECS
from deltacompress.codecs.settings import Quantizing, Settings
from deltacompress.errors import CalibrationError, RecipeError, option
from deltacompress.files.content import find_yaml
from deltacompress.files.strict_yaml import read_yaml
from deltacompress.types import TensorKind

_FOLDER = "calibration/recipes"
MAX_SEED = 2**50
"""What the manifest can record: JSON numbers are exact up to 2^53 in every reader."""


class _Matcher(BaseModel):
    """kind: one kind or several (types.TensorKind); name: glob over checkpoint names, or several. Absent = any."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: TensorKind | tuple[TensorKind, ...] | None = None
    name: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    def matches(self, name: str, kind: TensorKind) -> bool:
        """Whether the rule applies to a checkpoint tensor."""
        kinds = (self.kind,) if isinstance(self.kind, str) else self.kind
        named = not self.globs or any(fnmatchcase(name, one) for one in self.globs)
        return named and (kinds is None or kind in kinds)

    @property
    def globs(self) -> tuple[str, ...]:
        """Those over names; none where the rule asks for no name."""
        return (self.name,) if isinstance(self.name, str) else self.name or ()


def _rule(codec: Codec) -> type[BaseModel]:
    """What a rule with this codec can say: which tensors it is for, and how they are coded."""
    title = codec.settings.__name__.removesuffix("Settings") + "Rule"
    bases = (_Matcher, codec.settings)
    return create_model(title, __base__=bases, __doc__=f"A rule with codec {codec.name}.", __module__=__name__)


RULES = {name: _rule(codec) for name, codec in CODECS.items()}
globals().update({rule.__name__: rule for rule in RULES.values()})  # where pickle looks for them
if TYPE_CHECKING:

    class Rule(_Matcher, Settings):
        """Any of RULES."""

else:
    Rule = Annotated[Union[tuple(RULES.values())], Field(discriminator="codec")]  # noqa: UP007


class CalibrationSpec(BaseModel):
    """How much calibration data a recipe wants; the command line may override it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    samples: Annotated[int, Field(strict=True, ge=1)] = 256
    seq_len: Annotated[int, Field(strict=True, ge=2)] = 256
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] = 0

    def overridden(self, *, samples: int | None, seq_len: int | None, seed: int | None) -> CalibrationSpec:
        """With what is given in the place of the recipe's."""
        given = {"samples": samples, "seq_len": seq_len, "seed": seed}
        return self.model_copy(update={name: value for name, value in given.items() if value is not None})


class Recipe(BaseModel):
    """A whole recipe.

    scope: "delta" encodes w_ft - w_base; "full" encodes w_ft itself and never uses the base (the direct-compression
    baselines). sequential: within a layer, compress the linears stage by stage and let each stage see the inputs that
    the stages before it really produce (q/k/v, then o, then gate/up, then down); else all at once, as published.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    description: str = ""
    scope: Literal["delta", "full"] = "delta"
    sequential: bool = True
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    calibration: CalibrationSpec = CalibrationSpec()

    @model_validator(mode="after")
    def _rules_for_its_scope(self) -> Recipe:
        for number, rule in enumerate(self.rules if self.scope == "full" else ()):
            at = f"rules.{number}.{rule.codec}"
            if rule.codec == "skip":
                raise ValueError(f"{at}: restores the base's tensor, which scope: full never uses")
            if isinstance(rule, Quantizing) and rule.pattern.kind == "drawn":
                told = "signs of a share of the weights: enough of a delta, not of weights themselves (scope: full)"
                raise ValueError(f"{at}.sparsity: {rule.sparsity} keeps {told}; take scope: delta, or another pattern")
        return self

    @classmethod
    @checked
    def load(cls, name_or_path: str | Path) -> Recipe:
        """Read a shipped recipe by name, or any by path (it is a path if it has a suffix or a directory part).

        Raises:
            RecipeError: no such recipe, not YAML, or a field that is unknown, given twice or out of range.
        """
        path = find_yaml(name_or_path, _FOLDER, what="recipe", kind=RecipeError)
        data = read_yaml(path, what="recipe", docs="docs/recipes.md", kind=RecipeError)
        return cls.parse(data, where=str(path))

    @classmethod
    def parse(cls, data: Any, *, where: str = "recipe") -> Recipe:
        """Check plain data (a mapping, as YAML or JSON gives it).

        Raises:
            RecipeError: names the first field that is wrong.
        """
        if not isinstance(data, dict):
            raise RecipeError(
                f"a recipe is a mapping with name and rules, not {type(data).__name__}",
                where=where,
                way_out="see docs/recipes.md",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            errors = error.errors()
            first = errors[0]
            if first["type"] == "missing":  # perhaps as it is misspelt
                unknown = [
                    one for one in errors if one["type"] == "extra_forbidden" and one["loc"][:-1] == first["loc"][:-1]
                ]
                first = next(iter(unknown), first)
            at = ".".join(str(part) for part in first["loc"] if "[" not in str(part))  # not which branch of a union
            told = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                told = f"{at}: no such field"
            elif at:  # of a whole recipe it tells all
                told = f"{at}: {told}{_given(told, first['input'])}"
            raise RecipeError(told, where=where, way_out="see docs/recipes.md") from error

    def rule_for(self, name: str, kind: TensorKind) -> Settings:
        """The settings of the first rule that matches.

        Raises:
            RecipeError: no rule matches, or one that wants calibration data matches a tensor that has no inputs.
        """
        for rule in self.rules:
            if rule.matches(name, kind):
                if not CODECS[rule.codec].takes(kind):
                    raise self._not_taken(rule, name, kind)
                return rule
        raise RecipeError(
            f"no rule matches {name} (kind {kind})",
            where=f"recipe {self.name}",
            way_out="end the rules with codec: exact",
        )

    def _not_taken(self, rule: Settings, name: str, kind: TensorKind) -> RecipeError:
        told = "which has no inputs to calibrate on"
        others = "counted, rtn, low-rank, exact or skip" if kind == "embedding" else "rtn, exact or skip"
        if CODECS[rule.codec].counts:
            told, others = "which has no row for each token", f"obs, {others}" if kind in ("linear", "head") else others
        return RecipeError(
            f"codec {rule.codec} on {name} (kind {kind}), {told}",
            where=f"recipe {self.name}",
            way_out=f"use {others} for it",
        )

    def notes_on(self, names: Collection[str], linears: Mapping[str, str]) -> list[str]:
        """What looks as if it were made for another model, a line each: globs that match none of the tensors' names,
        linears that only a rule for everything leaves exact, or out. linears: the codec of each that could be coded.
        """
        unknown = [one for rule in self.rules for one in rule.globs if one not in names]
        lost = [one for one in unknown if not any(fnmatchcase(name, one) for name in names)]
        told = [(lost, "names of its rules", "match no tensor")]
        if whole := [name for name, codec in linears.items() if codec in ("exact", "skip")]:
            some = [rule for rule in self.rules if rule.globs or rule.kind is not None]
            left = [name for name in whole if not any(rule.matches(name, "linear") for rule in some)]
            if len(whole) < len(linears):  # a recipe that codes none means it
                how = "match only its rule for all, which codes none"
                told.append((left, f"of {len(linears)} linear weights", how))
        return [
            f"recipe {self.name}: {len(found)} {what} ({', '.join(found[:3])}{', ...' * (len(found) > 3)}) {how}"
            for found, what, how in told
            if found
        ]

    def check_calibration(self, source: object) -> None:
        """Make sure that there is something to calibrate on, where a rule wants it.

        Raises:
            CalibrationError: `source` is None.
        """
        if source is None and self.needs_calibration:
            raise CalibrationError(
                f"recipe {self.name} calibrates: give {option('calibration')} FILE (or a data set id)"
            )

    @property
    def needs_calibration(self) -> bool:
        """Whether a rule runs the model on calibration tokens."""
        return any(CODECS[rule.codec].needs_tokens for rule in self.rules)

    @property
    def walks_layers(self) -> bool:
        """Whether a rule calibrates layer after layer, which several GPUs can share."""
        return any(CODECS[rule.codec].calibrates for rule in self.rules)

    @property
    def needs_kinds(self) -> bool:
        """Whether a rule asks what a tensor is in its model; if none does, any checkpoint will do."""
        return self.needs_calibration or any(rule.kind is not None for rule in self.rules)

    @property
    def lossless(self) -> bool:
        """Whether every rule is exact."""
        return all(rule.codec == "exact" for rule in self.rules)


def _given(told: str, found: Any) -> str:
    """What a field was given, for the message that tells of it; of a whole rule, the fields that the message names.

    By reprlib: a file of a few lines can name a list of billions of entries, by aliases of aliases.
    """
    if not isinstance(found, dict):
        return f" (got {reprlib.repr(found):.80})"
    words = set(re.findall(r"\w+", told))
    named = [f"{name}: {reprlib.repr(value):.40}" for name, value in found.items() if name in words]
    return f" (got {', '.join(named)})" if named else ""
