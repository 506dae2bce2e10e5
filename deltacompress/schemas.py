"""JSON Schemas of what people and other programs read and write: manifests, recipes, jobs files and evaluation
reports.

`python -m deltacompress.schemas` writes them to registry/schemas/; a test keeps them equal to the models. A schema says
less than the models: that a one-bit grid must be midrise, what a sparsity pattern may be, that tensors are sorted by
name, and that a digest is right, only the package checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deltacompress.artifact.records import SCHEMA_VERSION, Manifest
from deltacompress.codecs.recipe import Recipe
from deltacompress.evaluation.report.data import report_schema
from deltacompress.files.content import content_root
from deltacompress.fleet.jobs_file import JobsFile

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


_OPTIONAL = {"FileRecord": {"zstd"}, "PartRecord": {"blake3"}, "TensorRecord": {"kept", "tokens"}}
"""By record: what not all of a kind have."""


def manifest_schema() -> dict[str, Any]:
    """Schema of manifest.json. Every field is required but those of _OPTIONAL: the writer leaves no other one out."""
    schema = Manifest.model_json_schema(mode="serialization")
    schema["properties"]["digest"] = {
        "description": "sha256 over the canonical JSON of all other fields",
        "pattern": "^[0-9a-f]{64}$",
        "title": "Digest",
        "type": "string",
    }
    for name, record in (("Manifest", schema), *schema["$defs"].items()):
        record["required"] = sorted(record["properties"].keys() - _OPTIONAL.get(name, set()))
    return {"$schema": _DIALECT} | schema


def recipe_schema() -> dict[str, Any]:
    """Schema of a recipe, for editors and for checking one without the package."""
    schema = Recipe.model_json_schema(mode="validation")
    for name, rule in schema["$defs"].items():
        if name.endswith("Rule"):  # the codec tells the rules apart, so it is never left to its default
            rule["required"] = sorted({"codec", *rule.get("required", ())})
    return {"$schema": _DIALECT} | schema


def jobs_schema() -> dict[str, Any]:
    """Schema of a jobs file."""
    return {"$schema": _DIALECT} | JobsFile.model_json_schema(mode="validation")


def files() -> dict[str, str]:
    """File name -> text of every schema."""
    schemas = {
        f"manifest-v{SCHEMA_VERSION}": manifest_schema(),
        "jobs": jobs_schema(),
        "recipe": recipe_schema(),
        "report": {"$schema": _DIALECT} | report_schema(),
    }
    return {f"{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()}


def write(directory: Path) -> None:
    """Write every schema into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(content_root() / "registry" / "schemas")
