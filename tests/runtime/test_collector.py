"""Garbage is not collected while a variant is opened, and is again afterwards, whatever happened."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from runtime_cases import Served

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.collector import collector_paused
from deltacompress.runtime.residency import Residency


def test_loads_pause_it(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime, seen, read = Runtime.from_base(trio["a"].pair.base), [], Residency.read
    monkeypatch.setattr(Residency, "read", lambda *given: (seen.append(gc.isenabled()), read(*given))[1])
    runtime.load(trio["a"].artifact, "a")
    assert seen[0] is False
    assert gc.isenabled()
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match="empty"):
        runtime.load(tmp_path / "empty")
    assert gc.isenabled()


def test_who_paused_it_before_keeps_it_so() -> None:
    gc.disable()
    try:
        with pytest.raises(InputError), collector_paused():
            raise InputError("x")
        assert not gc.isenabled()
    finally:
        gc.enable()
