"""Artifacts written by earlier versions of the program: today's must read them, and restore the very same bits.

tests/golden/make.py wrote them; one folder for each schema version, kept forever.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from pairs import weights_of

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.records import SCHEMA_VERSION
from deltacompress.artifact.restoration import restore

GOLDEN = Path(__file__).parents[1] / "golden"
ARTIFACTS = sorted(path.parent for path in GOLDEN.glob("v*/*/manifest.json"))


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_old_artifact_restores_to_the_recorded_tensors(artifact: Path, tmp_path: Path) -> None:
    base = artifact.parent / "base"
    verify(artifact)
    delta = verify(artifact, base=base)
    assert f"v{delta.manifest.schema_version}" == artifact.parent.name
    found = weights_of(restore(artifact, base=base, out=tmp_path / "out"))
    hashes = {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in found.items()
    }
    assert hashes == json.loads((artifact.parent / "restored.json").read_text())[artifact.name]


def test_every_version_has_its_golden_artifacts() -> None:
    assert {path.parent.name for path in ARTIFACTS} == {f"v{i}" for i in range(1, SCHEMA_VERSION + 1)}


def test_they_cover_the_format() -> None:
    """Every format, width, grid, pattern and kind of part that a small Llama can show."""
    records = [record for path in ARTIFACTS for record in load_delta(path).manifest.tensors]
    assert {record.format for record in records} == {"packed", "exact", "none"}
    packed = [record for record in records if record.format == "packed"]
    assert {record.params["bits"] for record in packed} == {1, 2, 3, 4, 16}
    assert {record.params["grid"] for record in packed} == {"minmax", "midrise", "symmetric"}
    assert {str(record.params["sparsity"]).partition(":")[0] for record in packed} == {
        "dense",
        "2",
        "1",
        "drawn",
        "unstructured",
    }
    parts = {part.name for record in records for part in record.parts}
    assert {
        "codes",
        "pattern",
        "scales",
        "zeros",
        "values",
        "row_mask",
        "symbols",
        "groups",
        "nonzero",
        "planes",
    } <= parts
    assert any(record.params.get("masked") for record in packed)
    assert {load_delta(path).manifest.lossless for path in ARTIFACTS} == {"none", "zstd"}


def test_they_stay_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 220_000
