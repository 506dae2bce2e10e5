"""A cache that cannot be used only costs compiling; the compiler is a stand-in, so this needs none."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacompress.kernels.cuda import nvrtc


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_unusable_cache_only_costs_compiling(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_(name: str, *_: object) -> bytes:
        compiled.append(name)
        return b"code"

    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    if kind == "file":  # where a folder should be
        (tmp_path / "cache").write_text("")
    else:  # where a file should be
        assert nvrtc.compile_source("pack", {}, "sm_90") == b"code"
        (kept,) = (tmp_path / "cache" / "kernels").iterdir()
        kept.unlink()
        kept.mkdir()
        compiled.clear()
    for count in (1, 2):
        assert nvrtc.compile_source("pack", {}, "sm_90") == b"code"
        assert len(compiled) == count
