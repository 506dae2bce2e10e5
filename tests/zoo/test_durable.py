"""In which order things reach the disk: what is acknowledged must be there after a power loss, and nothing half.

The sweeps of tests/zoo/reliability try every loss; these say what it is that holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from zoo.reliability.scenarios import report
from zoo.reliability.shim import hooked
from zoo.samples import make_artifact, sample_parts

from deltacompress.zoo import Zoo
from deltacompress.zoo.exchange import transfer
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.local import LocalStore

Call = tuple[str, str]


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """(call, path) of every call that changes something or makes it durable."""
    calls: list[Call] = []
    open_files: dict[int, str] = {}

    def hook(name: str, args: tuple[Any, ...], real: Any) -> Any:
        result = real(*args)
        if name == "open_":
            open_files[result] = args[0]
            if args[1] & os.O_CREAT:
                calls.append(("create", args[0]))
        elif name in ("write", "truncate", "fsync"):
            calls.append((name, open_files.get(args[0], "?")))
        elif name in ("link", "rename"):
            calls.extend([(f"{name} from", args[0]), (name, args[1])])
        elif name in ("unlink", "mkdir"):
            calls.append((name, args[0]))
        return result

    with hooked(hook):
        yield calls


def last(calls: list[Call], name: str, path: object) -> int:
    return max(at for at, call in enumerate(calls) if call == (name, str(path)))


def first_after(calls: list[Call], at: int, name: str, path: object) -> int:
    """Where the first such call after `at` is."""
    found = [later for later, call in enumerate(calls) if later > at and call == (name, str(path))]
    assert found, f"no {name} of {path} after {calls[at]}"
    return found[0]


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    made = Zoo.init(tmp_path / "zoo")
    made.add(make_artifact(tmp_path / "a", sample_parts(1)), "t/bot")
    return made


def test_an_object_is_on_the_disk_before_it_has_its_name_and_the_name_before_it_counts(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = LocalStore(tmp_path / "store")
    with recorded() as calls:
        assert store.put_if_absent("a/b/c", b"x" * 5000)
    linked = last(calls, "link", tmp_path / "store/a/b/c")
    temporary = calls[linked - 1][1]
    written = last(calls, "write", temporary)
    assert written < first_after(calls, written, "fsync", temporary) < linked
    assert first_after(calls, linked, "fsync", tmp_path / "store/a/b")
    for folder, parent in (("store/a", "store"), ("store/a/b", "store/a")):
        assert first_after(calls, last(calls, "mkdir", tmp_path / folder), "fsync", tmp_path / parent) < linked


def test_who_comes_second_makes_the_first_one_s_object_durable(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    LocalStore(tmp_path / "store").put_if_absent("a/b", b"x")
    with recorded() as calls:
        assert not LocalStore(tmp_path / "store").put_if_absent("a/b", b"x")
    synced = [path for name, path in calls if name == "fsync"]
    assert {str(tmp_path / "store" / "a"), str(tmp_path / "store")} <= set(synced)


def test_a_move_makes_the_new_name_durable_before_the_old_one_goes(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = LocalStore(tmp_path / "store")
    store.put_if_absent("a/b", b"x")
    with recorded() as calls:
        store.move("a/b", "trash/a/b")
    linked = last(calls, "link", tmp_path / "store/trash/a/b")
    gone = last(calls, "unlink", tmp_path / "store/a/b")
    assert linked < first_after(calls, linked, "fsync", tmp_path / "store/trash/a") < gone


def test_an_alias_that_points_there_already_is_made_durable_before_that_is_said(zoo: Zoo, tmp_path: Path) -> None:
    """Somebody else may have moved it, and not come so far."""
    zoo.tag("t/bot@1", "prod")
    with recorded() as calls:
        Zoo.open(zoo.where).tag("t/bot@1", "prod")
    assert ("fsync", str(tmp_path / "zoo/names/t/bot/alias/prod")) in calls
    zoo.attach(*report(zoo.resolve("t/bot").manifest))
    with recorded() as calls:
        Zoo.open(zoo.where).attach(*report(zoo.resolve("t/bot").manifest))
    assert [path for name, path in calls if name == "fsync" and "/referrers/" in path]


def test_a_pull_is_whole_on_the_disk_before_it_has_its_name_and_the_name_before_it_is_done(
    zoo: Zoo, tmp_path: Path
) -> None:
    work, out = tmp_path / "out.partial", tmp_path / "out"
    with recorded() as calls:
        zoo.pull("t/bot", out)
    named = last(calls, "rename", out)
    files = sorted(path.name for path in out.iterdir())
    assert "manifest.json" in files
    for file in files:
        changed = max(at for at, (name, path) in enumerate(calls) if path == str(work / file) and name != "fsync")
        assert first_after(calls, changed, "fsync", work / file) < named
        assert first_after(calls, last(calls, "create", work / file), "fsync", work) < named
    assert first_after(calls, named, "fsync", tmp_path)


def test_a_pull_that_goes_on_makes_what_it_finds_durable_too(zoo: Zoo, tmp_path: Path) -> None:
    zoo.pull("t/bot", tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "more.partial")
    with recorded() as calls:
        zoo.pull("t/bot", tmp_path / "more")
    named = last(calls, "rename", tmp_path / "more")
    assert not [call for call in calls if call[0] == "write"]
    for path in (tmp_path / "more").iterdir():
        assert last(calls, "fsync", tmp_path / "more.partial" / path.name) < named


def test_an_export_is_whole_on_the_disk_before_it_has_its_name(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "x.tar"
    with recorded() as calls:
        transfer.export(zoo, ["t/bot"], out)
    linked = last(calls, "link", out)
    temporary = calls[linked - 1][1]
    written = last(calls, "write", temporary)
    assert written < first_after(calls, written, "fsync", temporary) < linked
    assert first_after(calls, linked, "fsync", tmp_path)


@pytest.mark.parametrize("made", [True, False])
def test_a_link_that_was_interrupted_after_it_did_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """The name is ours, whatever the call said; unless it is somebody else's."""
    (tmp_path / "store").mkdir()
    store = LocalStore(tmp_path / "store")
    real, calls = osfs.link, []

    def link(source: str, target: str) -> None:
        if not calls:
            calls.append(target)
            if made:
                real(source, target)
            else:
                Path(target).write_bytes(b"theirs")
            raise InterruptedError
        real(source, target)

    monkeypatch.setattr(osfs, "link", link)
    assert store.put_if_absent("a", b"ours") is made
    assert store.get("a", limit=9) == (b"ours" if made else b"theirs")
