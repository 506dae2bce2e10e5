"""Garbage is not collected while a variant is opened, and little is looked at in a walk; whatever happens in them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from runtime_cases import Served

from deltacompress.errors import InputError
from deltacompress.processes.collector import collector_paused, heap_spared
from deltacompress.runtime import Runtime
from deltacompress.runtime.variants.delta import DeltaVariant


def test_loads_pause_it(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen, opened = Runtime.from_base(trio["a"].pair.base), [], DeltaVariant.open
    monkeypatch.setattr(DeltaVariant, "open", lambda *given: (seen.append(gc.isenabled()), opened(*given))[1])
    runtime.load(trio["a"].artifact, "a")
    assert seen == [False]
    assert gc.isenabled()

    def fail(*_: object) -> None:
        seen.append(gc.isenabled())
        raise InputError("told")

    monkeypatch.setattr(DeltaVariant, "open", fail)
    with pytest.raises(InputError, match="told"):
        runtime.load(trio["b"].artifact, "b")
    assert seen == [False, False]
    assert gc.isenabled()


def test_who_paused_it_before_keeps_it_so() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_that_overlap() -> None:
    """The first to leave is not the last."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        entered.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


class Knot:
    """Garbage, once its name is gone, that only a collection finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    """Tests have what they import frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_unfrozen")
def test_what_was_there_is_spared() -> None:
    before, garbage = Knot(), Knot()
    kept, gone = weakref.ref(before), weakref.ref(garbage)
    del garbage
    try:
        with heap_spared():
            assert gone() is None
            del before
            inside = weakref.ref(Knot())
            with heap_spared():
                pass
            gc.collect()
            assert inside() is None
            assert kept() is not None
            raise ZeroDivisionError
    except ZeroDivisionError:
        gc.collect()
        assert kept() is None


@pytest.mark.usefixtures("_unfrozen")
def test_who_spared_most_of_it_before_keeps_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    since = Knot()
    kept = weakref.ref(since)
    with heap_spared():
        del since
        gc.collect()
        assert kept() is None  # nothing of this process is kept from collections that it would have
    assert gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # what Python 3.12 spares itself
    before = Knot()
    kept = weakref.ref(before)
    with heap_spared():
        del before
        gc.collect()
        assert kept() is not None
    gc.collect()
    assert kept() is None
