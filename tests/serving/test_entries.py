"""Directories of the cache are held as long as a variant is read from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacompress.serving.messages import Origin
from deltacompress.serving.worker.entries import Entries
from deltacompress.zoo.exchange import cache, resolve


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of directories that were let go of, in a zoo in which what ends in `over` goes over a delta."""
    found: list[str] = []
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
