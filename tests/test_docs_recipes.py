"""docs/recipes.md names every field and every shipped recipe, and its examples are recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from deltacompress.content import list_content
from deltacompress.recipe import CalibrationSpec, ExactRule, ObsRule, Recipe, RtnRule, SkipRule
from deltacompress.types import TensorKind

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
SHIPPED = sorted(path.stem for path in list_content("calibration/recipes", ".yaml"))
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_load_and_are_documented(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert recipe.description
    assert f"| `{name}` |" in section("Shipped recipes")


def test_no_recipe_is_documented_that_is_not_shipped() -> None:
    assert sorted(re.findall(r"^\| `([^`]+)` \|", section("Shipped recipes"), flags=re.MULTILINE)) == SHIPPED


@pytest.mark.parametrize("model", [Recipe, CalibrationSpec, ObsRule, RtnRule, ExactRule, SkipRule])
def test_every_field_is_documented_with_its_default(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        rows = [row for row in ROWS if row[0] == f"`{name}`" and len(row) == 4]
        assert rows, f"docs/recipes.md has no row for {name}"
        default: Any = field.default
        if field.is_required() or name == "codec":
            assert "required" in {row[2] for row in rows}
        elif isinstance(default, bool):
            assert f"`{str(default).lower()}`" in {row[2] for row in rows}
        elif isinstance(default, int | float):
            assert f"{default:g}" in {row[2] for row in rows}
        elif isinstance(default, str) and default:
            assert f"`{default}`" in {row[2] for row in rows}


def test_every_kind_and_codec_is_documented() -> None:
    for value in (*get_args(TensorKind), "obs", "rtn", "exact", "skip"):
        assert f"`{value}`" in section("A rule: what it matches")


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.splitlines()[0])
def test_examples_are_recipes(text: str) -> None:
    recipe = Recipe.parse(yaml.safe_load(text))
    for kind in get_args(TensorKind):
        recipe.rule_for("some.tensor", kind)


def test_a_bare_pattern_is_refused() -> None:
    """What the page warns of: YAML 1.1 reads 2:4 as 124."""
    assert yaml.safe_load("sparsity: 2:4") == {"sparsity": 124}
