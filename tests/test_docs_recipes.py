"""docs/recipes.md names every field and every shipped recipe, and its examples are recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from deltacompress.codecs.recipe import RULES, CalibrationSpec, Recipe
from deltacompress.codecs.settings import ExactSettings, ObsSettings, RtnSettings
from deltacompress.files.content import list_content
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


WORDS: dict[str, dict[str, Any]] = {
    "obs": {"codec": "obs"},
    "rtn": {"codec": "rtn"},
    "exact": {"codec": "exact"},
    "as published": {
        "codec": "obs", "selection": "diagonal", "activation_order": False, "asymmetric": 0.0, "refine_sweeps": 0,
        "gain": "least",
    },
    "sign times scale": {"bits": 1, "grid": "midrise"},
    "refitted": {"refit_scales": True},
    "dense": {"sparsity": "dense"},
    "2:4": {"sparsity": "2:4"},
    "symmetric": {"grid": "symmetric"},
    "in order": {"activation_order": False},
    "least loss": {"gain": "least"},
    "Fisher": {"fisher": True},
}  # fmt: skip
"""What the words of the table of shipped recipes promise."""
SETTINGS: dict[str, type[BaseModel]] = {"obs": ObsSettings, "rtn": RtnSettings, "exact": ExactSettings}


def promised(cell: str) -> dict[str, Any]:
    """All settings of a rule that a cell of the table describes, defaults included."""
    found: dict[str, Any] = {}
    for phrase in cell.replace(" on the weights themselves", "").split(", "):
        if bits := re.fullmatch(r"(\d+) bits", phrase):
            found["bits"] = int(bits[1])
        elif step := re.fullmatch(r"step ([\d.]+)", phrase):
            found["step"] = float(step[1])
        elif damping := re.fullmatch(r"damped by ([\d.]+)", phrase):
            found["damp_fraction"] = float(damping[1])
        elif group := re.fullmatch(r"groups of (\d+)", phrase):
            found["group_size"] = int(group[1])
        else:
            found |= WORDS[phrase]
    defaults = {name: field.default for name, field in SETTINGS[found["codec"]].model_fields.items()}
    return {name: value for name, value in (defaults | found).items() if value is not None}


@pytest.mark.parametrize("row", [row for row in ROWS if row[0].strip("`") in SHIPPED], ids=lambda row: row[0])
def test_shipped_recipes_do_what_the_table_says(row: list[str]) -> None:
    name, linear, head, embedding, rest = row[0].strip("`"), *row[1:]
    recipe = Recipe.load(name)
    cells = {"linear": linear, "head": head, "embedding": embedding, "norm": rest, "bias": rest, "other": rest}
    for kind, cell in cells.items():
        rule = recipe.rule_for("model.some.weight", kind)  # type: ignore[arg-type]
        assert rule.model_dump(exclude={"kind", "name"}) == promised(cell), kind
    assert recipe.scope == ("full" if "on the weights themselves" in linear else "delta")
    assert (recipe.sequential, recipe.calibration) == (True, CalibrationSpec())
    assert recipe.calibration.model_dump() == {"samples": 256, "seq_len": 256, "seed": 0}


@pytest.mark.parametrize("model", [Recipe, CalibrationSpec, *RULES.values()])
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
    for value in (*get_args(TensorKind), *RULES):
        assert f"`{value}`" in section("A rule: what it matches")


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.splitlines()[0])
def test_examples_are_recipes(text: str) -> None:
    recipe = Recipe.parse(yaml.safe_load(text))
    for kind in get_args(TensorKind):
        recipe.rule_for("some.tensor", kind)


def test_a_bare_pattern_is_refused() -> None:
    """What the page warns of: YAML 1.1 reads 2:4 as 124."""
    assert yaml.safe_load("sparsity: 2:4") == {"sparsity": 124}
