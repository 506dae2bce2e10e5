"""From a choice to a recipe, as anybody could have written it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from deltacompress.codecs.recipe import CalibrationSpec, Recipe


def recipe_of(
    name: str, description: str, chosen: Iterable[tuple[Iterable[str], Mapping[str, Any]]], spec: CalibrationSpec
) -> Recipe:
    """One rule for all tensors that are coded alike, by their patterns; everything else is exact.

    chosen: of each group, what matches its tensors (Group.patterns) and the fields of their rule. spec: what it
    calibrates on.
    """
    rules: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for patterns, fields in chosen:
        rules.setdefault(repr(sorted(fields.items())), (dict(fields), []))[1].extend(patterns)
    listed = [{"name": sorted(patterns)} | fields for fields, patterns in rules.values()]
    told = {"name": name, "description": description, "rules": [*listed, {"codec": "exact"}]}
    return Recipe.parse(told | {"calibration": spec.model_dump()})


def as_yaml(recipe: Recipe) -> str:
    """The file that `--recipe` takes."""
    data = recipe.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
