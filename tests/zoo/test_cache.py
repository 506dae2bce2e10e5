"""How many bytes the cache of entries may take, and who goes when there is no more room."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo.checkpoints import files_of

from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import PullError
from deltacompress.zoo.exchange import cache
from deltacompress.zoo.exchange.cache import let_go
from deltacompress.zoo.exchange.resolve import artifact_path
from deltacompress.zoo.store import osfs

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
SOURCES = ("int2-24", "int4-24", "sign-24")


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zoo]:
    """t/<source> of each, and a cache without a limit."""
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DELTACOMPRESS_ZOO", str(tmp_path / "zoo"))
    monkeypatch.delenv("DELTACOMPRESS_CACHE_BYTES", raising=False)
    made = Zoo.init(tmp_path / "zoo")
    for source in SOURCES:
        made.add(GOLDEN / source, f"t/{source}")
    yield made
    for path in [*cache._held]:
        while path in cache._held:
            let_go(path)


def size(source: str) -> int:
    return sum(len(raw) for raw in files_of(GOLDEN / source).values())


def pulled(source: str, *, held: bool = False) -> Path:
    path = artifact_path(f"t/{source}")
    assert files_of(path) == files_of(GOLDEN / source)
    if not held:
        let_go(path)
    return path


def aged(path: Path, seconds: int) -> None:
    """As if it had been used so long ago."""
    then = time.time() - seconds
    os.utime(path.with_name(f"{path.name}.lock"), (then, then))


def test_the_least_recently_used_make_room(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pulled("int2-24"), pulled("int4-24")
    for path, seconds in ((first, 20), (second, 10)):
        aged(path, seconds)
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(sum(map(size, SOURCES))))
    third = pulled("sign-24")
    assert all(one.exists() for one in (first, second, third))  # to the byte
    cache._remove(third)
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(sum(map(size, SOURCES)) - 1))
    pulled("int2-24")  # the most recently used now
    pulled("sign-24")
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


def test_as_many_go_as_it_takes(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [pulled(source) for source in SOURCES]
    for path, seconds in zip(paths, (30, 20, 10), strict=True):
        aged(path, seconds)
    cache._remove(paths[2])
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("sign-24")))
    assert [pulled("sign-24").exists(), paths[0].exists(), paths[1].exists()] == [True, False, False]


def test_what_is_held_stays(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pulled("int2-24", held=True)
    pulled("int2-24", held=True)  # twice
    aged(first, 20)
    second = pulled("int4-24")
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("int2-24") + max(size("sign-24"), size("int4-24"))))
    third = pulled("sign-24")
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    let_go(first)  # once
    pulled("int4-24")
    assert (first.exists(), second.exists(), third.exists()) == (True, True, False)
    aged(first, 20)
    let_go(first)
    pulled("sign-24")
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)
    let_go(first)  # nobody has it, or it is none: nothing
    let_go(Path("/"))


def test_no_room_is_told_and_nothing_goes(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pulled("int2-24", held=True), pulled("int4-24")
    wanted = size("sign-24")
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("int2-24") + wanted - 1))
    with pytest.raises(
        PullError, match=rf"no room for {wanted:,} bytes: {wanted - 1:,} of .* not in use; set .*CACHE_BYTES"
    ):
        artifact_path("t/sign-24")
    assert first.exists()
    assert second.exists()
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", "1")
    with pytest.raises(PullError, match=": 0 of 1 are not in use"):
        artifact_path("t/sign-24")
    assert pulled("int4-24") == second  # what is there takes no more room


def test_another_process_holds(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from deltacompress.zoo.exchange.resolve import artifact_path\n"
        "print(artifact_path('t/int2-24'), flush=True); sys.stdin.read()"
    )
    holds = [sys.executable, "-c", code]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("sign-24")))
        with pytest.raises(PullError, match="no room"):
            artifact_path("t/sign-24")
        assert files_of(path) == files_of(GOLDEN / "int2-24")
        other.communicate()
    pulled("sign-24")
    assert not path.exists()


def test_one_that_is_being_pulled_stays_and_a_killed_pull_goes(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700, exist_ok=True)
    partial = root / f"{'a' * 64}.partial"
    partial.mkdir()
    (partial / "half").write_bytes(b"x" * 100)
    for other in ("kernels", "mine", "b" * 63):  # no business of ours
        (root / other).mkdir()
        (root / other / "file").write_bytes(b"x" * 100)
    (root / ("c" * 64)).symlink_to(root / "mine")
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("sign-24") + 99))
    with cache._locked(root / f"{'a' * 64}.lock"), pytest.raises(PullError, match="no room"):
        artifact_path("t/sign-24")
    assert partial.exists()
    pulled("sign-24")
    assert not partial.exists()
    assert all((root / other / "file").exists() for other in ("kernels", "mine", "b" * 63, "c" * 64))


def test_a_killed_pull_of_the_same_is_no_other(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / "cache" / f"{zoo.resolve('t/sign-24').manifest}.partial"
    partial.mkdir(mode=0o700, parents=True)
    (partial / "manifest.json").write_bytes(b"x" * 100)
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("sign-24")))
    pulled("sign-24")
    assert not partial.exists()


@pytest.mark.parametrize("wrong", ["0", "-1", "many", "1 parsec"])
def test_a_limit_that_is_none(zoo: Zoo, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", wrong)
    with pytest.raises(PullError, match=f"DELTACOMPRESS_CACHE_BYTES={wrong}: is no size; give one such as 200GB"):
        artifact_path("t/sign-24")


def test_sizes_have_units(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", "1KB")
    with pytest.raises(PullError, match=" of 1,000 are"):
        artifact_path("t/sign-24")
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", "1GiB")
    pulled("sign-24")


@pytest.mark.parametrize("waits", [True, False])
def test_where_nothing_can_be_locked_nobody_is_said_to_be_at_it(
    zoo: Zoo, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """waits: for the entry's own lock; the other is asked for by whoever would remove what it is of."""
    first = pulled("int2-24")
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(size("int4-24")))
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation == (fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise OSError(errno.ENOLCK, "No locks available")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(PullError, match=r"\.lock: No locks available; check the disk and run it again"):
        artifact_path("t/int4-24")
    assert first.exists()


def test_what_cannot_be_held_is_not_left_open(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            raise OSError(errno.ENOLCK, "No locks available")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PullError, match="No locks available"):
        artifact_path("t/int4-24")
    assert os.listdir("/proc/self/fd") == before
