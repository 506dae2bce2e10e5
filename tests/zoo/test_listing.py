"""`list` and its index: quick, never wrong, and nothing is lost with it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from zoo.samples import make_artifact, sample_parts

from deltacompress.zoo import Zoo, create
from deltacompress.zoo.entries.index import index_path
from deltacompress.zoo.entries.listing import Listed
from deltacompress.zoo.store import osfs


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)


@pytest.fixture
def artifacts(tmp_path: Path) -> list[Path]:
    return [make_artifact(tmp_path / name, sample_parts(name), seed=name) for name in "abc"]


def copy_of(zoo: Zoo, where: str) -> Zoo:
    """Every object under the same key elsewhere: `cp -r`, or a sync of two buckets."""
    if "://" not in where:
        shutil.copytree(zoo.where, where)
    else:
        store = create.store_at(where)
        for key in zoo.store.list(""):
            store.put_if_absent(key, zoo.store.get(key, limit=1 << 20))
    return Zoo.open(where)


def without_index(zoo: Zoo) -> Sequence[Listed]:
    index_path(zoo.id).unlink(missing_ok=True)
    return zoo.list(all_versions=True, removed=True)


def test_a_cache_folder_that_may_not_be_looked_into(
    any_zoo: Zoo, artifacts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    any_zoo.add(artifacts[0], "t/m")
    wanted, asked = any_zoo.list(), Path.is_file

    def refuse(self: Path) -> bool:
        if self.suffix == ".sqlite":
            raise PermissionError(13, "Permission denied", str(self))
        return asked(self)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert any_zoo.list() == wanted


def test_two_copies_that_went_different_ways_do_not_show_each_others_rows(any_zoo: Zoo, artifacts: list[Path]) -> None:
    any_zoo.add(artifacts[0], "t/m")
    other = copy_of(any_zoo, any_zoo.where + "-copy")
    assert other.id == any_zoo.id
    for zoo, artifact, version in ((any_zoo, artifacts[1], 1), (other, artifacts[2], 2)):
        zoo.add(artifact, "t/m")
        zoo.tag(f"t/m@{version}", "prod")
        zoo.rm(f"t/m@{3 - version}")
    seen = [zoo.list(all_versions=True, removed=True) for zoo in (any_zoo, other, any_zoo, other)]
    assert seen[0] == seen[2] == without_index(any_zoo)
    assert seen[1] == seen[3] == without_index(other)
    for zoo, rows, version in ((any_zoo, seen[0], 1), (other, seen[1], 2)):
        assert [one.removed for one in rows] == [version == 1, version == 2]
        assert [one.aliases for one in rows] == [("prod",) if one.version == version else () for one in rows]
        assert rows[2 - version].manifest == zoo.resolve("t/m").manifest
    assert seen[0][0].manifest != seen[1][0].manifest
    assert seen[0][1].manifest == seen[1][1].manifest


def test_a_zoo_restored_from_a_backup_shows_what_it_holds(artifacts: list[Path], tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifacts[0], "t/m")
    shutil.copytree(zoo.where, tmp_path / "backup")
    zoo.add(artifacts[1], "t/m")
    zoo.list(all_versions=True)
    shutil.rmtree(zoo.where)
    shutil.copytree(tmp_path / "backup", zoo.where)
    made = Zoo.open(zoo.where).add(artifacts[2], "t/m")
    assert (made.version, zoo.list()[0].manifest) == (2, made.manifest)


def test_the_index_only_saves_time(
    any_zoo: Zoo, artifacts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for artifact in artifacts:
        any_zoo.add(artifact, "t/m")
    any_zoo.tag("t/m@2", "prod")
    first = any_zoo.list(all_versions=True)
    path = index_path(any_zoo.id)
    assert path.is_file()
    keys: list[str] = []
    get, stream = type(any_zoo.store).get, type(any_zoo.store).stream

    def counted_get(self: Any, key: str, *, limit: int) -> bytes:
        keys.append(key)
        return get(self, key, limit=limit)

    def counted_stream(self: Any, key: str, **options: Any) -> Any:
        keys.append(key)
        return stream(self, key, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(any_zoo.store), "get", counted_get)
        patch.setattr(type(any_zoo.store), "stream", counted_stream)
        assert any_zoo.list(all_versions=True) == first
    assert not [key for key in keys if key.startswith("blobs/")]  # no manifest is read again
    if "://" in any_zoo.where:
        assert not keys  # nor anything else: a listing tells ETags
    path.unlink()
    assert any_zoo.list(all_versions=True) == first
    path.write_bytes(b"no data base at all" * 99)
    assert any_zoo.list(all_versions=True) == first
    assert any_zoo.list(all_versions=True) == first


def test_a_cache_that_cannot_be_written_is_done_without(
    artifacts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifacts[0], "t/m")
    assert len(zoo.list()) == len(zoo.list()) == 1
