"""Garbage is not collected while a variant is opened, and is again afterwards, whatever happened."""

from __future__ import annotations

import gc
import threading

import pytest
from runtime_cases import Served

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.loading.collector import collector_paused
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
