"""Recipes: what is accepted, which rule wins, and one clear line for everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.content import list_content
from deltacompress.errors import RecipeError
from deltacompress.recipe import Recipe

SHIPPED = {path.stem for path in list_content("calibration/recipes", ".yaml")}
EXACT = {"codec": "exact"}
OBS = {"codec": "obs", "bits": 4, "kind": "linear"}


def recipe(*rules: dict[str, Any], **fields: Any) -> Recipe:
    return Recipe.parse({"name": "mine", "rules": list(rules)} | fields)


def test_the_promised_recipes_are_shipped() -> None:
    promised = "int4-24 int2-24 sign-24 int4 int2 lossless deltazip-4bit deltazip-2bit sparsegpt-direct-4bit"
    assert set(promised.split()) <= SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_recipe_is_named_as_its_file_and_covers_every_tensor(name: str) -> None:
    loaded = Recipe.load(name)
    assert loaded.name == name
    assert loaded.description
    for kind in ("linear", "embedding", "head", "norm", "bias", "other"):
        assert loaded.rule_for("model.some.weight", kind).codec in ("obs", "rtn", "exact")  # type: ignore[arg-type]
    assert Recipe.parse(loaded.model_dump(mode="json")) == loaded


def test_published_settings_turn_off_what_we_added() -> None:
    for name in ("deltazip-4bit", "deltazip-2bit", "sparsegpt-direct-4bit"):
        loaded = Recipe.load(name)
        rule = loaded.rule_for("x", "linear")
        assert rule.codec == "obs"
        assert (rule.asymmetric, rule.refine_sweeps, rule.selection, rule.activation_order) == (0, 0, "diagonal", False)
        assert (str(rule.pattern), rule.refit_scales, loaded.sequential) == ("2:4", False, False)
        assert loaded.scope == ("full" if "direct" in name else "delta")


def test_the_first_rule_that_matches_wins() -> None:
    found = recipe(
        {"codec": "skip", "name": "*.0.*", "kind": ["linear", "bias"]}, OBS | {"bits": 2}, OBS | {"bits": 8}, EXACT
    )
    assert found.rule_for("layers.0.up", "linear").codec == "skip"
    assert found.rule_for("layers.0.norm", "norm").codec == "exact"
    second = found.rule_for("layers.1.up", "linear")
    assert second.codec == "obs"
    assert second.bits == 2


def test_names_match_case_and_all() -> None:
    assert recipe({"codec": "skip", "name": "A*"}, EXACT).rule_for("a.weight", "other").codec == "exact"


@given(kinds=st.lists(st.sampled_from(["linear", "embedding", "head", "norm", "bias", "other"]), min_size=1))
@settings(max_examples=30, deadline=None)
def test_a_tensor_without_a_rule_is_an_error(kinds: list[str]) -> None:
    only = recipe({"codec": "exact", "kind": kinds})
    for kind in ("linear", "embedding", "head", "norm", "bias", "other"):
        if kind in kinds:
            assert only.rule_for("x", kind).codec == "exact"  # type: ignore[arg-type]
        else:
            with pytest.raises(RecipeError, match=r"recipe mine: no rule matches x \(kind .*codec: exact"):
                only.rule_for("x", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["embedding", "norm", "bias", "other"])
def test_obs_needs_inputs(kind: str) -> None:
    with pytest.raises(RecipeError, match=r"codec obs on x.*no inputs to calibrate on"):
        recipe({"codec": "obs", "bits": 4}).rule_for("x", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rules": []}, "rules"),
        ({"rulez": [EXACT]}, "rulez"),
        ({"scope": "half"}, "scope"),
        ({"rules": [{"codec": "gptq"}]}, "gptq"),
        ({"rules": [{"kind": "linear"}]}, "codec"),
        ({"rules": [EXACT | {"bits": 4}]}, "bits"),
        ({"rules": [OBS | {"bits": 5}]}, "bits"),
        ({"rules": [OBS | {"bit": 4}]}, "bit"),
        ({"rules": [OBS | {"kind": "conv"}]}, "kind"),
        ({"rules": [OBS | {"bits": 1}]}, "midrise"),
        ({"rules": [OBS | {"sparsity": "4:2"}]}, "4:2"),
        ({"rules": [OBS | {"sparsity": "some"}]}, "some"),
        ({"rules": [OBS | {"group_size": -1}]}, "group_size"),
        ({"rules": [OBS | {"damp_fraction": 0}]}, "damp_fraction"),
        ({"rules": [OBS | {"asymmetric": 1.5}]}, "asymmetric"),
        ({"rules": [{"codec": "skip"}], "scope": "full"}, "skip"),
        ({"calibration": {"samples": 0}}, "samples"),
        ({"calibration": {"sample": 1}}, "sample"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "rules": [EXACT]} | change))
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert told in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "[1, 2]", "just words", "3"])
def test_yaml_that_is_no_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml: a recipe is a mapping"):
        Recipe.load(path)


@pytest.mark.parametrize("raw", [b"a: [", b"\xff\xfe\x00", b"a: !!python/object/apply:os.system [true]"])
def test_not_yaml(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError, match=r"r\.yaml: not YAML") as caught:
        Recipe.load(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe named 'int5'.*int2-24.*lossless"):
        Recipe.load("int5")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path)


def test_what_a_recipe_needs() -> None:
    assert Recipe.load("lossless").lossless
    assert not Recipe.load("lossless").needs_kinds
    by_kind = recipe({"codec": "rtn", "bits": 4, "kind": "embedding"}, EXACT)
    assert (by_kind.needs_calibration, by_kind.needs_kinds, by_kind.lossless) == (False, True, False)
    assert recipe(OBS, EXACT).needs_calibration
