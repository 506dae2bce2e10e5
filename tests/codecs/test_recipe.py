"""Recipes: what is accepted, which rule wins, and one clear line for everything else."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import RecipeError
from deltacompress.files.content import list_content

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
        assert (str(rule.pattern), rule.refit_scales, loaded.sequential) == ("2:4", False, True)
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
        ({"rulez": [EXACT]}, "rulez: no such field; see"),
        ({"scope": "half"}, "scope"),
        ({"rules": [{"codec": "gptq"}]}, "gptq"),
        ({"rules": [{"kind": "linear"}]}, "codec"),
        ({"rules": [EXACT | {"bits": 4}]}, "bits"),
        ({"rules": [OBS | {"bits": 5}]}, "bits"),
        ({"rules": [OBS | {"bit": 4}]}, "rules.0.obs.bit: no such field; see"),
        ({"rules": [{"codec": "obs", "bit": 4}]}, "rules.0.obs.bit: no such field; see"),
        ({"rules": [OBS | {"kind": "conv"}]}, "kind"),
        ({"rules": [OBS | {"bits": 1}]}, "midrise"),
        ({"rules": [OBS | {"sparsity": "4:2"}]}, "4:2"),
        ({"rules": [OBS | {"sparsity": "some"}]}, "some"),
        ({"rules": [OBS | {"group_size": -1}]}, "group_size"),
        ({"rules": [OBS | {"damp_fraction": 0}]}, "damp_fraction"),
        ({"rules": [OBS | {"asymmetric": 1.5}]}, "asymmetric"),
        (
            {"rules": [{"codec": "skip"}], "scope": "full"},
            "rules.0.skip: restores the base's tensor, which scope: full",
        ),
        ({"calibration": {"samples": 0}}, "samples"),
        ({"calibration": {"sample": 1}}, "sample"),
        ({"calibration": {"seed": 2**50 + 1}}, "seed"),
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


SIGNS = {"codec": "obs", "bits": 1, "grid": "midrise", "sparsity": "drawn:3:8", "kind": "linear"}


def test_drawn_signs_are_of_deltas() -> None:
    assert recipe(SIGNS, EXACT).scope == "delta"
    told = r"^recipe: rules\.1\.obs\.sparsity: drawn:3:8 keeps .*\(scope: full\); take scope: delta, or another"
    with pytest.raises(RecipeError, match=told):
        recipe(OBS | {"name": "a"}, SIGNS, EXACT, scope="full")
    assert recipe(SIGNS | {"sparsity": "3:8"}, EXACT, scope="full").scope == "full"


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        ({"codec": "obs", "bits": 1}, "bits: 1"),
        (SIGNS | {"range_search": [0.5, 1]}, "sparsity: 'drawn:3:8', range_search: [0.5, 1]"),
        (SIGNS | {"codec": "rtn"}, "codec: 'rtn', bits: 1, sparsity: 'drawn:3:8'"),
        (OBS | {"bits": 16, "selection": "joint", "refit_scales": True}, "bits: 16, refit_scales: True"),
        (OBS | {"fisher": True, "sparsity": "unstructured:0.5"}, "bits: 4, sparsity: 'unstructured:0.5', fisher: True"),
        ({"codec": "gptq", "bits": 4}, "codec: 'gptq'"),
    ],
)
def test_of_a_whole_rule_the_fields_that_do_not_fit_are_shown(rule: dict[str, Any], got: str) -> None:
    rule = {"kind": "linear", "name": ["model.layers.*"], "damp_fraction": 0.3, "asymmetric": 0.5} | rule
    with pytest.raises(RecipeError) as caught:
        recipe({key: value for key, value in rule.items() if rule["codec"] == "obs" or key in {*SIGNS, "name"}}, EXACT)
    found = str(caught.value).split(" (got ")[1].removesuffix("); see docs/recipes.md")
    assert sorted(found.split(", ")) == sorted(got.split(", "))


def test_of_a_field_that_is_missing_nothing_is_shown() -> None:
    with pytest.raises(RecipeError, match=r"rules\.0\.obs\.bits: Field required; see"):
        recipe({"codec": "obs", "kind": "linear"})


@pytest.mark.parametrize("text", ["", "[1, 2]", "just words", "3"])
def test_yaml_that_is_no_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml: a recipe is a mapping"):
        Recipe.load(path)


@pytest.mark.parametrize("raw", [b"a: [", b"\xff\xfe\x00", b"a: 2024-13-45", b"a: \0", b"a: 1\n---\nb: 2"])
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: a\nrules:\n  - {codec: exact}\nname: b\n", "line 4: 'name' is given twice"),
        ("name: a\nrules:\n  - {codec: rtn, bits: 4, bits: 2}\n", "line 3: 'bits' is given twice"),
        ("name: a\nrules:\n  - codec: rtn\n    bits: 4\n    sparsity: 2:4\n", "line 5: 2:4 .* quote it, '2:4'"),
        ("name: a\nrules: [{codec: rtn, bits: 4, range_factor: 1:30.5}]\n", "line 2: 1:30.5 .* quote it"),
        ("a: !!python/object/apply:os.system [true]", "line 1: could not determine a constructor"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_traps_of_yaml(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"r\.yaml: {told}") as caught:
        Recipe.load(path)
    assert "\n" not in str(caught.value)


def test_what_yaml_allows_still_does(tmp_path: Path) -> None:
    """Anchors, merge keys that are overridden, quoted patterns, a byte order mark."""
    path = tmp_path / "r.yaml"
    path.write_text(
        "\ufeffname: a\nrules:\n  - &quick {name: '*.a', codec: rtn, bits: 4, sparsity: '2:4'}\n"
        "  - {<<: *quick, name: '*.b', bits: 2, range_factor: 0.9}\n  - {codec: exact}\n"
    )
    first, second, _ = Recipe.load(path).rules
    assert (first.bits, first.sparsity, second.bits, second.sparsity) == (4, "2:4", 2, "2:4")  # type: ignore[union-attr]


def test_a_file_that_unfolds_to_billions_is_refused_in_one_line(tmp_path: Path) -> None:
    levels = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 12)]
    path = tmp_path / "r.yaml"
    path.write_text("\n".join([*levels, "name: *a11", "rules: [{codec: exact}]"]))
    with pytest.raises(RecipeError, match="name") as caught:
        Recipe.load(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "meant"),
    [("int424", "int4-24"), ("INT4-24", "int4-24"), ("loseless", "lossless"), ("deltazip", "deltazip-")],
)
def test_did_you_mean(name: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=f"no recipe named '{name}'; did you mean {meant}.*shipped: "):
        Recipe.load(name)


@pytest.mark.parametrize("name", ["", ".", "a\0b", "zzzz"])
def test_names_like_nothing(name: str) -> None:
    with pytest.raises(RecipeError, match=r"no recipe named .*; shipped: .*\(or give a path\)"):
        Recipe.load(name)


def test_recipes_go_to_other_processes() -> None:
    """Their rule classes are made from the registry, and must be found by name nevertheless."""
    recipe = Recipe.load("int4-24")
    again = pickle.loads(pickle.dumps(recipe))  # noqa: S301  # made a line above
    assert again == recipe
    assert [type(rule) for rule in again.rules] == [type(rule) for rule in recipe.rules]


def test_what_is_a_path_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "lossless").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, why in (("/", "a directory"), ("fifo", "a named pipe"), ("./fifo", "a named pipe"), ("./x", "No such")):
        with pytest.raises(RecipeError, match=rf"the recipe cannot be read \({why}"):
            Recipe.load(name)
    assert Recipe.load("lossless").name == "lossless"


@pytest.mark.parametrize("value", ["4", True, 4.0])
@pytest.mark.parametrize(
    "rule",
    [
        {"codec": "low-rank", "rank": ...},
        {"codec": "rtn", "grid": "midrise", "bits": ...},
        {"codec": "rtn", "bits": 4, "group_size": ...},
        {"codec": "obs", "bits": 4, "refine_sweeps": ...},
        {"codec": "obs", "bits": 4, "block_size": ...},
    ],
)
def test_a_whole_number_is_written_as_one(rule: dict[str, Any], value: Any) -> None:
    given = {key: value if one is ... else one for key, one in rule.items()}
    field = next(key for key, one in rule.items() if one is ...)
    if field in ("group_size", "block_size"):
        given[field] = value if value is True else type(value)(32)
    with pytest.raises(RecipeError, match=rf"rules\.0\.{rule['codec']}\.{field}: .*Input should be "):
        Recipe.parse({"name": "r", "rules": [given, {"codec": "exact"}]})


@pytest.mark.parametrize(("kind", "others"), [("embedding", "counted, rtn, low-rank, exact"), ("norm", "rtn, exact")])
def test_what_to_use_where_nothing_can_be_calibrated(kind: Any, others: str) -> None:
    with pytest.raises(RecipeError, match=f"; use {others} or skip for it$"):
        recipe({"codec": "bitdelta"}).rule_for("x", kind)


@pytest.mark.parametrize("value", ["4", True, 4.0])
@pytest.mark.parametrize("field", ["samples", "seq_len", "seed"])
def test_so_are_those_of_the_calibration(field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"calibration\.{field}: Input should be a valid integer"):
        Recipe.parse({"name": "r", "rules": [{"codec": "exact"}], "calibration": {field: value}})
