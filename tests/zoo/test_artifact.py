"""Real artifacts through the zoo, and what bundling small parts saves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from zoo.samples import files_of, make_artifact

from deltacompress.artifact.delta import verify
from deltacompress.artifact.manifest import read_manifest
from deltacompress.errors import CheckpointError, ChecksumError, FormatError
from deltacompress.files.places import MANIFEST
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries.artifact import SMALL, describe
from deltacompress.zoo.ledger.entry import BUNDLE, HEADER, PART


def test_a_real_artifact_comes_back_and_verifies(artifact: Path, tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifact, "team/real")
    out = zoo.pull("team/real", tmp_path / "out")
    assert files_of(out) == files_of(artifact)
    assert verify(out).manifest.digest == zoo.show("team/real")[1].summary["artifact"]


def test_publishing_is_a_function_of_the_artifact_alone(artifact: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(artifact, tmp_path / "another name")
    assert describe(copy).entry.digest == describe(artifact).entry.digest


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1])
def test_parts_of_every_size(size: int, tmp_path: Path) -> None:
    parts = {"a.planes": bytes(size), "b.planes": b"b" * size, "c.planes": b"c" * 9000, "d.planes": b"d" * size}
    made = make_artifact(tmp_path / "in", parts, {"only.planes": b""}, files={})
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(made, "t/m")
    assert files_of(zoo.pull("t/m", tmp_path / "out")) == files_of(made)


def test_small_parts_of_a_shard_share_one_blob(tmp_path: Path) -> None:
    parts = {f"l{i}.planes": bytes([i]) * 64 for i in range(50)} | {f"m{i}.planes": bytes([i]) * 5000 for i in range(3)}
    entry = describe(make_artifact(tmp_path / "in", parts, files={})).entry
    kinds = [layer.media_type for layer in entry.layers]
    assert kinds == [HEADER, BUNDLE, PART, PART, PART]
    assert entry.layers[1].size == 50 * 64


@pytest.mark.parametrize("hashed", ["sha256", "blake3"])
def test_every_hash_of_a_part_is_compared(hashed: str, tmp_path: Path) -> None:
    """A zoo does not take what no loader would."""
    copy = shutil.copytree(Path(__file__).parent.parent / "golden" / "v1" / "sign-24", tmp_path / "copy")
    manifest = read_manifest(copy)
    first, *rest = manifest.tensors
    parts = (first.parts[0].model_copy(update={hashed: "0" * 64}), *first.parts[1:])
    changed = manifest.model_copy(update={"tensors": (first.model_copy(update={"parts": parts}), *rest)})
    (copy / MANIFEST).write_bytes(changed.to_bytes())
    with pytest.raises(ChecksumError, match=rf"{first.name}\.{parts[0].name}: its bytes differ"):
        describe(copy)


@pytest.mark.parametrize(
    ("is_twice", "listed", "told"),
    [
        (False, "a", "part b.planes is not the one that the manifest lists"),
        (False, "abc", "part c.planes is not in any shard"),
        (True, "ab", "part a.planes stands in two shards"),
    ],
)
def test_shards_hold_what_the_manifest_lists(is_twice: bool, listed: str, told: str, tmp_path: Path) -> None:
    made = make_artifact(tmp_path / "in", {"a.planes": b"x" * 50}, {"b.planes": b"x" * 50}, files={})
    manifest = read_manifest(made)
    tensors = tuple(manifest.tensors[0].model_copy(update={"name": name}) for name in listed)
    first, second = manifest.shards
    if is_twice:
        shutil.copy(made / first.file, made / second.file)
        second = first.model_copy(update={"file": second.file})
    finetuned = manifest.finetuned.model_copy(update={"tensors": len(tensors)})
    changed = manifest.model_copy(update={"tensors": tensors, "finetuned": finetuned, "shards": (first, second)})
    (made / MANIFEST).write_bytes(changed.to_bytes())
    with pytest.raises(FormatError, match=told):
        describe(made)


def test_a_shard_that_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, opened = make_artifact(tmp_path / "in", {"l.planes": b"x" * 50}, files={}), os.open

    def refuse(path: str, *given: Any, **named: Any) -> int:
        if path.endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="cannot be read"):
        describe(made)
