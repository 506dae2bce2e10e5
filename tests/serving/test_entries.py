"""Directories of the cache are held as long as a variant is read from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo.samples import make_artifact

from deltacompress.serving.messages import Origin
from deltacompress.serving.worker.entries import Entries
from deltacompress.zoo import Zoo
from deltacompress.zoo.exchange import cache, resolve


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of directories that were let go of, in a zoo in which what ends in `over` goes over a delta."""
    found: list[str] = []
    monkeypatch.setattr(resolve, "open_zoo", lambda zoo: zoo)
    monkeypatch.setattr(cache, "let_go", lambda path: found.append(path.name))
    monkeypatch.setattr(resolve, "entry_path", lambda entry, zoo, *, base: Path("/cache") / entry)
    monkeypatch.setattr(
        resolve, "delta_path", lambda entry, zoo: Path("/cache/below") if entry.endswith("over") else None
    )
    return found


def test_what_a_variant_took_is_let_go_of_when_it_goes(left: list[str]) -> None:
    entries, origin = Entries("zoo", "base"), Origin("t/one", 1, {})
    assert entries.directory("one") == "/cache/one"
    assert entries.beneath("one") is None
    entries.loaded("a", origin)
    assert entries.directory("two-over") == "/cache/two-over"
    assert entries.beneath("two-over") == Path("/cache/below")
    entries.loaded("b", None)
    assert entries.origins == {"a": origin, "b": None}
    assert left == []
    entries.gone("b")
    assert left == ["two-over", "below"]
    assert entries.origins == {"a": origin}
    entries.gone("b")
    entries.gone("a")
    assert left == ["two-over", "below", "one"]


def test_what_fails_to_load_takes_nothing(left: list[str]) -> None:
    entries = Entries("zoo", "base")
    entries.directory("one")
    entries.loaded("a", None)
    entries.directory("two-over")
    entries.beneath("two-over")
    entries.failed()
    assert left == ["two-over", "below"]
    entries.failed()
    entries.loaded("b", None)  # a directory of the user's own
    entries.gone("b")
    assert left == ["two-over", "below"]
    entries.gone("a")
    assert left == ["two-over", "below", "one"]


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)
    made = Zoo.init(tmp_path / "zoo")
    made.add_artifact(make_artifact(tmp_path / "source", seed=1), "team/bot")
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each opening of a zoo."""
    found: list[object] = []
    real = Zoo.open
    monkeypatch.setattr(Zoo, "open", lambda location: found.append(location) or real(location))
    return found


@pytest.mark.parametrize("fails", [True, False])
def test_a_load_opens_the_zoo_once(zoo: Zoo, tmp_path: Path, opened: list[object], fails: bool) -> None:
    """And each load anew: where a zoo is may be a link that somebody moves."""
    entries = Entries(zoo.where, str(tmp_path))
    for count in (1, 2):
        assert entries.meant("team/bot") == "team/bot@1"
        assert Path(entries.directory("team/bot@1")).is_dir()
        assert entries.origin("team/bot@1") == Origin("team/bot", 1, {})
        assert entries.beneath("team/bot@1") is None
        assert opened == [zoo.where] * count
        if fails:
            entries.failed()
        else:
            entries.loaded(f"bot-{count}", None)
    for count in (1, 2):
        entries.gone(f"bot-{count}")
    assert tmp_path not in [parent for one in cache._held for parent in one.parents]


def test_what_is_a_path_opens_no_zoo(zoo: Zoo, tmp_path: Path, opened: list[object]) -> None:
    assert Entries(zoo.where, str(tmp_path)).meant("/no/such/place") is None
    assert Entries(zoo.where, str(tmp_path)).meant(str(tmp_path)) is None
    assert Entries(None, str(tmp_path)).meant("team/bot") is None
    assert opened == []


def test_a_zoo_that_is_open_is_not_opened_again(zoo: Zoo, tmp_path: Path, opened: list[object]) -> None:
    entries = Entries(zoo, str(tmp_path))
    assert entries.meant("team/bot") == "team/bot@1"
    assert entries.origin("team/bot@1").version == 1
    assert opened == []
