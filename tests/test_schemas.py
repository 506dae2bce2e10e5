from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from safetensors.torch import save_file

from deltacompress import schemas
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.errors import RecipeError
from deltacompress.files.content import content_path, list_content

RECIPES = [path.stem for path in list_content("calibration/recipes", ".yaml")]
LOSSLESS = {"name": "mine", "rules": [{"codec": "exact"}]}


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def plain(recipe: str) -> Any:
    """As JSON has it: lists, no tuples."""
    return yaml.safe_load(content_path("calibration", "recipes", f"{recipe}.yaml").read_text(encoding="utf-8"))


def test_the_shipped_schemas_are_those_of_the_models() -> None:
    shipped = {path.name: path.read_text(encoding="utf-8") for path in list_content("registry/schemas", ".json")}
    assert shipped == schemas.files(), "run `python -m deltacompress.schemas`"


def test_write(tmp_path: Path) -> None:
    schemas.write(tmp_path / "new")
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()} == schemas.files()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of a real artifact with packed, exact, identical, added and grown tensors."""
    root = tmp_path_factory.mktemp("pair")
    generator = torch.Generator().manual_seed(3)
    base = {"a.weight": torch.randn(4, 8, generator=generator), "norm.weight": torch.ones(8)}
    base |= {"same": torch.ones(3), "wte.weight": torch.randn(5, 8, generator=generator)}
    tuned = {name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
    tuned |= {
        "same": base["same"],
        "new": torch.ones(2),
        "wte.weight": torch.cat([base["wte.weight"], torch.ones(1, 8)]),
    }
    for name, tensors in (("base", base), ("finetuned", tuned)):
        (root / name).mkdir()
        (root / name / "config.json").write_text('{"model_type": "llama"}')
        save_file(tensors, root / name / "model.safetensors")
    rules = [{"name": "norm*", "codec": "exact"}, {"codec": "rtn", "bits": 2, "sparsity": "2:4"}]
    recipe = Recipe.parse({"name": "test", "rules": rules})
    compress(root / "base", root / "finetuned", recipe=recipe, out=root / "delta")
    data: dict[str, Any] = json.loads((root / "delta" / "manifest.json").read_bytes())
    return data


def test_a_real_manifest_fits_its_schema(manifest: dict[str, Any]) -> None:
    assert {tensor["status"] for tensor in manifest["tensors"]} == {"coded", "exact", "identical", "added"}
    validator(schemas.manifest_schema()).validate(manifest)
    validator(schemas.recipe_schema()).validate(manifest["recipe"])


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "0"},
        {"schema_version": 2},
        {"lossless": "lzma"},
        {"shards": [{"file": "../delta.safetensors", "bytes": 1, "sha256": "0" * 64}]},
        {"extra": 1},
        {"calibration": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_manifest_does_not_fit(manifest: dict[str, Any], change: dict[str, Any]) -> None:
    assert not validator(schemas.manifest_schema()).is_valid(manifest | change)


@pytest.mark.parametrize("field", ["digest", "schema_version", "tensors", "calibration"])
def test_no_field_of_a_manifest_may_be_missing(manifest: dict[str, Any], field: str) -> None:
    assert not validator(schemas.manifest_schema()).is_valid({k: v for k, v in manifest.items() if k != field})


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_fit_the_schema(name: str) -> None:
    validator(schemas.recipe_schema()).validate(plain(name))


@pytest.mark.parametrize(
    "data",
    [
        {"rules": [{"codec": "exact"}]},
        LOSSLESS | {"rules": []},
        LOSSLESS | {"speed": "fast"},
        LOSSLESS | {"rules": [{"codec": "gzip"}]},
        LOSSLESS | {"rules": [{"bits": 2}]},
        LOSSLESS | {"rules": [{"bits": 2, "block_size": 128}]},
        LOSSLESS | {"rules": [{"codec": "rtn", "bits": 5}]},
        LOSSLESS | {"rules": [{"codec": "rtn", "bits": 2, "block_size": 128}]},
        LOSSLESS | {"rules": [{"codec": "exact", "kind": "bias "}]},
        LOSSLESS | {"calibration": {"samples": 0}},
    ],
)
def test_what_the_package_refuses_does_not_fit_the_schema(data: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Recipe.parse(data)
    assert not validator(schemas.recipe_schema()).is_valid(data)
