"""A full disk: what is there can be removed, and what was removed be freed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from zoo.cli_helpers import Run, data, failed
from zoo.samples import files_of, make_artifact, sample_parts

from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import DiskFullError
from deltacompress.zoo.store import local, osfs

BLOCK = 4096


class Disk:
    """As much room as there is in `blocks` blocks: each directory takes one, each file as many as it needs."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.blocks: int | None = None
        for name in ("write", "mkdir"):
            monkeypatch.setattr(osfs, name, self._bounded(getattr(osfs, name)))
        monkeypatch.setattr(osfs, "fsync", lambda fd: None)

    def used(self) -> int:
        found = {}
        for path in self.root.rglob("*"):
            with suppress(FileNotFoundError):  # the trial of a new zoo makes and removes files in threads
                told = path.stat()
                found[told.st_ino] = 1 if path.is_dir() else -(-told.st_size // BLOCK)
        return sum(found.values())

    def fill(self) -> None:
        """Nothing is free."""
        self.blocks = self.used()

    def _bounded(self, real: Any) -> Any:
        def call(*args: Any) -> Any:
            if self.blocks is not None and self.used() + 1 > self.blocks:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return call


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "zoo", monkeypatch)


def artifact(root: Path, name: str) -> Path:
    return make_artifact(root / name, sample_parts(name, big=12, size=60_000), seed=name)


@pytest.fixture
def zoo(disk: Disk, tmp_path: Path) -> Zoo:
    made = Zoo.init(disk.root)
    for name in ("keep", "go", "late"):
        made.add(artifact(tmp_path, name), f"t/{name}")
    return made


def test_rm_and_gc_work_when_nothing_else_does(zoo: Zoo, disk: Disk, tmp_path: Path) -> None:
    disk.fill()
    for write in (lambda: zoo.add(tmp_path / "go", "t/new"), lambda: zoo.tag("t/keep", "prod")):
        with pytest.raises(DiskFullError, match="the disk is full; free some space"):
            write()
    assert [*zoo.rm("t/go"), *zoo.rm("t/late")] == [1, 1]
    first = zoo.gc(grace=0)
    assert first.trashed > 0
    second = zoo.gc(grace=0, empty_trash=True)
    assert second.deleted == first.trashed
    assert disk.blocks is not None
    assert disk.used() < disk.blocks - 2 * local.RESERVED // BLOCK
    assert zoo.verify().ok
    assert str(zoo.add(tmp_path / "go", "t/new")) == "t/new@1"
    assert files_of(zoo.pull("t/keep", tmp_path / "out")) == files_of(tmp_path / "keep")
    disk.fill()  # and once more: the reserve is there again
    assert zoo.rm("t/new") == [1]
    assert zoo.gc(grace=0).trashed > 0


def test_what_there_is_no_room_for_waits(zoo: Zoo, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large blobs go first; what is left goes when the trash was emptied."""
    for part in (1, 2):
        zoo.store.release(part)
    monkeypatch.setattr(local, "RESERVED", 24 * BLOCK)
    zoo.store.reserve()
    large = make_artifact(tmp_path / "large", {"w.planes": os.urandom(200_000)}, seed="large", files={})
    zoo.add(large, "t/large")
    disk.fill()
    for name in ("large", "go", "late"):
        zoo.rm(f"t/{name}")
    first = zoo.gc(grace=0)
    assert 0 < first.trashed < first.left
    assert first.bytes > 200_000
    again, waiting = 0, first.left
    while waiting:
        done = zoo.gc(grace=0, empty_trash=True)
        assert done.left < waiting
        again, waiting = again + done.trashed, done.left
    assert first.left == again
    assert zoo.verify().unreferenced == 0
    assert [one.name for one in zoo.list()] == ["t/keep"]


def test_without_a_reserve_the_way_out_is_told(zoo: Zoo, disk: Disk) -> None:
    zoo.rm("t/go")
    for part in (1, 2):
        zoo.store.release(part)
    disk.fill()
    with pytest.raises(DiskFullError, match="the disk is full"):
        zoo.rm("t/late")
    with pytest.raises(DiskFullError, match=r"the disk is full.*`zoo gc --empty-trash`"):
        zoo.gc(grace=0)
    assert zoo.verify().ok


def test_a_zoo_of_before_gets_its_reserve_and_a_collector_leaves_it(zoo: Zoo, disk: Disk, tmp_path: Path) -> None:
    kept = [disk.root / "tmp" / f"reserve-{part}" for part in (1, 2)]
    for path in kept:
        path.unlink()
    zoo.add(tmp_path / "keep", "t/keep")
    assert [path.stat().st_size for path in kept] == [local.RESERVED] * 2
    zoo.gc(grace=0, empty_trash=True)
    assert all(path.exists() for path in kept)
    for path in kept:
        path.unlink()
    zoo.gc(grace=0)
    assert all(path.exists() for path in kept)
    assert zoo.verify().ok
    assert zoo.du().blobs == len(list(zoo.store.list("blobs/")))


def test_a_removal_that_was_made_although_the_disk_was_said_to_be_full(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems find out at fsync, of a directory even."""
    real, calls = osfs.link, []

    def link(source: str, target: str) -> None:
        real(source, target)
        if "/rm/" in target and not calls:
            calls.append(target)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(osfs, "link", link)
    assert zoo.rm("t/go") == [1]
    assert calls


def test_the_command_line_says_what_waits(
    run: Run, zoo: Zoo, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_ZOO", zoo.where)
    for part in (1, 2):
        zoo.store.release(part)
    monkeypatch.setattr(local, "RESERVED", 24 * BLOCK)
    zoo.store.reserve()
    disk.fill()
    failed(run("add", tmp_path / "go", "t/new"), 2, "the disk is full")
    assert data(run("rm", "t/go", "--json"))["removed"] == [1]
    code, out, err = run("gc", "--grace", "0", "--quiet")
    assert (code, out) == (0, "")
    assert "warning: the disk is full: " in err
    assert "free the trash with `zoo gc --empty-trash`" in err
    while (left := data(run("gc", "--grace", "0", "--empty-trash", "--json"))["left"]) > 0:
        assert left < 20
    assert run("verify")[0] == 0


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 4 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", where], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount")
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


def test_a_real_disk(mounted: Path, tmp_path: Path) -> None:
    zoo = Zoo.init(mounted / "zoo")
    count = 0
    with suppress(DiskFullError):
        while True:
            zoo.add(make_artifact(tmp_path / f"a{count}", sample_parts(count, big=9, size=30_000)), f"t/m{count}")
            count += 1
    with suppress(OSError), (mounted / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * BLOCK):
            pass
    assert count > 2
    assert os.statvfs(mounted).f_bavail == 0
    for number in range(1, count):
        zoo.rm(f"t/m{number}")
    trashed = zoo.gc(grace=0).trashed
    assert zoo.gc(grace=0, empty_trash=True).deleted == trashed > 0
    zoo.gc(grace=0, empty_trash=True)
    assert os.statvfs(mounted).f_bavail * os.statvfs(mounted).f_bsize > 1_000_000
    assert zoo.verify().ok
    assert files_of(zoo.pull("t/m0", tmp_path / "out")) == files_of(tmp_path / "a0")
    assert zoo.add(tmp_path / "a1", "t/new").version == 1
