"""Damage and bad input: told in one line that names entry, file and repair, mended where it can be, no one else hit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from zoo.samples import files_of, make_artifact, sample_parts

from deltacompress.errors import ChecksumError, FormatError, TruncatedFileError
from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import (
    ConflictError,
    DamagedBlobError,
    DamagedRecordError,
    InvalidNameError,
    MissingBlobError,
    NotFoundError,
    ZooFormatError,
)
from deltacompress.zoo.layout import version_key
from deltacompress.zoo.records import ZooRecord, encode, nonce


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "a", sample_parts(1), {"z.w.symbols": os.urandom(9000), "z.n.planes": b"q"})


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    return Zoo.init(tmp_path / "zoo")


def blob_path(zoo: Zoo, digest: str) -> Path:
    return Path(zoo.where) / "blobs" / "sha256" / digest[:2] / digest


def damage(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))


def test_damage_is_told_and_mended_by_publishing_again(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    part = next(layer for layer in zoo.show("team/bot")[1].layers if "part" in layer.annotations)
    damage(blob_path(zoo, part.digest))
    (problem,) = zoo.verify().problems
    assert (problem.kind, problem.entries, problem.file) == ("damaged", ("team/bot@1",), part.annotations["part"])
    with pytest.raises(DamagedBlobError, match=r"team/bot@1.*is damaged; repair it"):
        zoo.pull("team/bot", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    blob_path(zoo, part.digest).unlink()
    assert [one.kind for one in zoo.verify("team/bot").problems] == ["missing"]
    with pytest.raises(MissingBlobError, match=r"team/bot@1.*is missing; repair it"):
        zoo.pull("team/bot", tmp_path / "out")
    blob_path(zoo, part.digest).write_bytes(b"nonsense")
    zoo.add(artifact, "team/again")
    assert files_of(zoo.pull("team/bot", tmp_path / "out")) == files_of(artifact)
    assert zoo.verify().ok
    zoo.gc(grace=0)
    assert not blob_path(zoo, part.digest).exists()
    assert zoo.verify().ok


def test_fsck_mends_blobs_and_records_from_a_copy(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.tag("team/bot", "prod")
    shutil.copytree(zoo.where, tmp_path / "copy")
    for path in Path(zoo.where).rglob("*"):
        if path.is_file() and path.name != "zoo.json":
            damage(path)
    assert not zoo.fsck().ok
    assert not zoo.fsck(repair=True).ok  # nothing to repair from
    done = zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy"))
    assert done.ok, done.left.problems
    assert files_of(zoo.pull("team/bot@prod", tmp_path / "out")) == files_of(artifact)
    with pytest.raises(ConflictError, match="another copy"):
        zoo.fsck(repair=True, copy=zoo)


def test_fsck_mends_from_the_trash(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.rm("team/bot@1")
    zoo.gc(grace=0)
    zoo.add(artifact, "team/bot")
    part = next(layer for layer in zoo.show("team/bot")[1].layers if "part" in layer.annotations)
    damage(blob_path(zoo, part.digest).with_name(part.digest + ".1"))
    assert not zoo.verify().ok
    assert zoo.fsck(repair=True).ok


def test_one_damaged_entry_stops_nobody_else(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    for name in ("team/bad", "team/good"):
        zoo.add_artifact(make_artifact(tmp_path / name, sample_parts(name), seed=name), name)
    damage(blob_path(zoo, zoo.resolve("team/bad").manifest))
    listed = {entry.name: entry for entry in zoo.list()}
    assert "damaged" in (listed["team/bad"].problem or "")
    assert listed["team/good"].problem is None
    assert zoo.pull("team/good", tmp_path / "out").is_dir()
    with pytest.raises(DamagedBlobError, match=r"manifest of team/bad@1"):
        zoo.show("team/bad")
    with pytest.raises(DamagedBlobError):
        zoo.gc(grace=0)  # what it needs is not known
    zoo.rm("team/bad@1")
    zoo.gc(grace=0)
    assert zoo.verify().ok
    damage(Path(zoo.where) / version_key("team/good", 1))
    with pytest.raises(DamagedRecordError, match="canonical"):
        zoo.resolve("team/good")
    assert zoo.rm("team/good@1") == [1]


def test_records_of_other_places_are_refused(zoo: Zoo, artifact: Path) -> None:
    """A record that is sound but was copied to another key (an old version over a new one) is damage."""
    for _ in range(2):
        zoo.add(artifact, "team/bot")
    first, second = (Path(zoo.where) / version_key("team/bot", n) for n in (1, 2))
    second.unlink()
    shutil.copy(first, second)
    with pytest.raises(DamagedRecordError, match="another place"):
        zoo.resolve("team/bot@2")
    first.unlink()
    kinds = {problem.kind for problem in zoo.verify().problems}
    assert kinds == {"missing", "damaged"}


def test_strays_are_told(zoo: Zoo, tmp_path: Path) -> None:
    (Path(zoo.where) / "link").symlink_to(tmp_path)
    (Path(zoo.where) / "names" / "x y").mkdir(parents=True)
    (Path(zoo.where) / "blobs" / "note.txt").parent.mkdir(exist_ok=True)
    (Path(zoo.where) / "blobs" / "note.txt").write_text("hello")
    found = {problem.key for problem in zoo.verify().problems}
    assert found == {"link", "names/x y", "blobs/note.txt"}


def test_a_zoo_of_a_newer_format(zoo: Zoo) -> None:
    path = Path(zoo.where) / "zoo.json"
    path.unlink()
    path.write_bytes(encode("zoo.json", ZooRecord(format=2, id=nonce(), capabilities=())))
    with pytest.raises(ZooFormatError, match="format 2, this program reads up to 1; upgrade") as caught:
        Zoo.open(zoo.where)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda root: (root / "config.json").unlink(), TruncatedFileError),
        (lambda root: (root / "config.json").write_bytes(b'{"model_type":"llamb"}'), ChecksumError),
        (lambda root: damage(next(root.glob("*.safetensors"))), ChecksumError),
        (lambda root: (root / "manifest.json").unlink(), TruncatedFileError),
    ],
)
def test_a_damaged_artifact_is_not_published(zoo: Zoo, artifact: Path, harm: object, error: type[Exception]) -> None:
    harm(artifact)  # type: ignore[operator]
    with pytest.raises(error):
        zoo.add(artifact, "team/bot")
    assert list(zoo.list()) == []
    assert list(zoo.store.list("blobs/")) == []


def test_code_is_not_published(zoo: Zoo, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "x", files={"modeling_evil.py": b"import os"})
    with pytest.raises(FormatError, match="no config or tokenizer file"):
        zoo.add(artifact, "team/evil")


def test_names_that_are_not_there(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no entry team/none"):
        zoo.pull("team/none", tmp_path / "out")
    zoo.add(artifact, "team/bot")
    with pytest.raises(NotFoundError, match="no version 7; it has 1 to 1"):
        zoo.resolve("team/bot@7")
    with pytest.raises(NotFoundError, match="not removed"):
        zoo.undelete("team/bot@1")
    with pytest.raises(ConflictError, match="not an alias"):
        zoo.rm("team/bot@prod")
    with pytest.raises(InvalidNameError):
        zoo.add(artifact, "team/bot@1")
    zoo.rm("team/bot")
    with pytest.raises(NotFoundError, match="every version of team/bot was removed"):
        zoo.resolve("team/bot")
