"""The local store: what it leaves on the disk, and that no link leads out of it."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

from deltacompress.zoo import Zoo, osfs
from deltacompress.zoo.errors import ConflictError, NotAZooError, StoreError
from deltacompress.zoo.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "store").mkdir()
    return LocalStore(tmp_path / "store")


def test_objects_are_read_only_and_nothing_is_left_behind(store: LocalStore, tmp_path: Path) -> None:
    store.put_if_absent("a/b", b"x")
    store.put_if_absent("a/b", b"y")
    mode = (tmp_path / "store/a/b").stat().st_mode
    assert stat.S_IMODE(mode) & 0o222 == 0
    assert list((tmp_path / "store/tmp").iterdir()) == []


def test_links_are_not_followed_in_or_out(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "store" / "dir").symlink_to(outside)
    (tmp_path / "store" / "file").symlink_to(outside / "secret")
    with pytest.raises(StoreError, match="links"):
        store.put_if_absent("dir/new", b"x")
    with pytest.raises(StoreError, match="link"):
        store.get("file", limit=9)
    with pytest.raises(StoreError, match="links"):
        store.put_if_absent("file", b"x")
    assert list(store.list("")) == []
    assert sorted(store.strays()) == ["dir", "file"]
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_temporary_file_that_was_swept_is_written_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = osfs.link, []

    def link(source: str, target: str) -> None:
        if not swept:
            swept.append(source)
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(osfs, "link", link)
    assert store.put_if_absent("a", b"x")
    assert store.get("a", limit=1) == b"x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_store(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "store").chmod(0o555)
    with pytest.raises(StoreError, match="no permission"):
        store.put_if_absent("a/b", b"x")


def test_places_that_are_no_zoo(tmp_path: Path) -> None:
    with pytest.raises(NotAZooError, match="no such directory"):
        Zoo.open(tmp_path / "none")
    with pytest.raises(NotAZooError, match="not a zoo"):
        Zoo.open(tmp_path)
    with pytest.raises(NotAZooError, match="s3://bucket"):
        Zoo.open("http://host/zoo")
    Zoo.init(tmp_path / "deep" / "zoo")
    with pytest.raises(ConflictError, match="a zoo already"):
        Zoo.init(tmp_path / "deep" / "zoo")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(ConflictError, match="empty or new"):
        Zoo.init(tmp_path / "full")
    with pytest.raises(ConflictError, match="in the way"):
        Zoo.init(tmp_path / "full" / "thesis.txt")


_FILE_CALLS = {"open", "write", "fsync", "link", "unlink", "mkdir", "makedirs", "rename", "replace", "remove", "rmdir"}


def test_no_system_call_goes_past_the_shim(repo_root: Path) -> None:
    """What the reliability harness cannot see it cannot test."""
    core = "artifact blobs check create fsck gc local publish pull removal tags txn usage verify versions".split()
    for name in core:
        tree = ast.parse((repo_root / "deltacompress" / "zoo" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("os", "shutil"):
                assert node.attr not in _FILE_CALLS, f"{name}.py, line {node.lineno}: os.{node.attr}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", f"{name}.py, line {node.lineno}: open()"
