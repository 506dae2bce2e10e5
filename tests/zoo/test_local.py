"""The local store: what it leaves on the disk, and that no link leads out of it."""

from __future__ import annotations

import ast
import errno
import os
import stat
from pathlib import Path

import pytest
from zoo.samples import files_of, make_artifact

from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import CapabilityError, ConflictError, NotAZooError, StoreError
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.local import LocalStore


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


def test_a_zoo_behind_a_link_is_served(tmp_path: Path) -> None:
    """`/data/zoo` is often a link to the disk that it lies on."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "disk")
    zoo = Zoo.init(link)
    source = make_artifact(tmp_path / "a")
    zoo.add(source, "t/m")
    zoo.tag("t/m", "prod")
    zoo.add(source, "t/gone")
    zoo.rm("t/gone")
    assert zoo.gc(grace=0).kept > 0
    assert zoo.verify().ok
    assert files_of(Zoo.open(link).pull("t/m@prod", tmp_path / "out")) == files_of(source)
    assert [one.name for one in Zoo.open(tmp_path / "disk").list()] == ["t/m"]
    with pytest.raises(ConflictError, match="not the zoo itself"):  # one zoo, whichever way it was opened
        Zoo.open(link).fsck(repair=True, copy=Zoo.open(tmp_path / "disk"))
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    zoo.add(source, "t/m")  # what was opened stays what it is
    for call in (Zoo.open, Zoo.init):
        with pytest.raises(NotAZooError, match=r"data: a symbolic link to .*elsewhere, where nothing is; mount"):
            call(link)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    source = make_artifact(tmp_path / "a")
    zoo.add(source, "t/m")

    def refuse(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(osfs, "link", refuse)
    told = r"this file system makes no hard links .*; keep it on one that does \(ext4, .*`zoo export`"
    for write in (lambda: Zoo.init(tmp_path / "new"), lambda: zoo.add(source, "t/m"), lambda: zoo.tag("t/m", "prod")):
        with pytest.raises(CapabilityError, match=told):
            write()
    assert zoo.pull("t/m", tmp_path / "out").is_dir()  # reading needs none
    assert zoo.verify().ok


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
        (file,) = (repo_root / "deltacompress" / "zoo").rglob(f"{name}.py")
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("os", "shutil"):
                assert node.attr not in _FILE_CALLS, f"{name}.py, line {node.lineno}: os.{node.attr}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", f"{name}.py, line {node.lineno}: open()"
