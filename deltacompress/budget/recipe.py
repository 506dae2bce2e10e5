"""From a choice to a recipe, as anybody could have written it."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from deltacompress.codecs.recipe import CalibrationSpec, Recipe

_NUMBERED = re.compile(r"(.*\.)\d+(\..*)")


def recipe_of(
    name: str, description: str, chosen: Iterable[tuple[Iterable[str], Mapping[str, Any]]], spec: CalibrationSpec
) -> Recipe:
    """One rule for all tensors that are coded alike, by their names; everything else is exact.

    chosen: of each group, its tensors and the fields of their rule. spec: what it calibrates on.
    """
    each = [(list(names), dict(fields)) for names, fields in chosen]
    rules: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for patterns, (_, fields) in zip(_patterns([names for names, _ in each]), each, strict=True):
        rules.setdefault(repr(sorted(fields.items())), (fields, []))[1].extend(patterns)
    listed = [{"name": sorted(patterns)} | fields for fields, patterns in rules.values()]
    told = {"name": name, "description": description, "rules": [*listed, {"codec": "exact"}]}
    return Recipe.parse(told | {"calibration": spec.model_dump()})


def _patterns(groups: Sequence[Sequence[str]]) -> list[set[str]]:
    """What matches the tensors of each group: their names, but one for those that differ in their last number alone,
    as experts do, unless those of other groups have it, too.
    """
    numbered = {name: _NUMBERED.fullmatch(name) for names in groups for name in names}
    shared = {
        name: "[0-9]*".join(map(glob.escape, found.groups())) if found else name for name, found in numbered.items()
    }
    of = [Counter(shared[name] for name in names) for names in groups]
    known = Counter(pattern for counts in of for pattern in counts)
    return [
        {shared[name] if counts[shared[name]] > 1 == known[shared[name]] else glob.escape(name) for name in names}
        for names, counts in zip(groups, of, strict=True)
    ]


def as_yaml(recipe: Recipe) -> str:
    """The file that `--recipe` takes."""
    data = recipe.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
