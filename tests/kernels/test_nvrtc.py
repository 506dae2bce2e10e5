"""Compiling the CUDA sources needs no GPU, so every kind of kernel is compiled where NVIDIA's compiler is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacompress.errors import BackendError
from deltacompress.kernels.cuda import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.missing() is not None, reason=f"no NVRTC: {nvrtc.missing()}")
COMMON = {"BITS": 3, "SPARSE": 1, "DTYPE": 0, "FAST": 1, "STAGES": 2, "PER_SM": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    ("name", "arch", "macros"),
    [
        ("decode", "sm_80", {"GROUP": 0, "ROWS": 1, "WARPS": 4}),
        ("decode", "sm_90", {"GROUP": 16, "ROWS": 8, "WARPS": 4, "DTYPE": 2, "FAST": 0}),
        ("prefill", "sm_80", {"GROUP": 0, "WIDE": 8}),
        ("prefill", "sm_90", {"GROUP": 32, "WIDE": 4, "DTYPE": 1}),
        ("hopper", "sm_90a", {"GROUP": 0, "STAGES": 3}),
        ("hopper", "sm_90a", {"GROUP": 64, "SPARSE": 0, "FAST": 0, "STAGES": 8}),
        ("pack", "sm_80", {}),
        ("pack", "sm_90", {"BITS": 3, "SPARSE": 0}),
        ("blake3", "sm_80", {"SUBTREE": 256}),
        ("blake3", "sm_90", {"SUBTREE": 256}),
    ],
)
def test_compiles(name: str, arch: str, macros: dict[str, int]) -> None:
    assert nvrtc.compile_source(name, COMMON | macros, arch)[:4] == b"\x7fELF"


def test_the_cache_is_used_and_a_damaged_file_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    macros = COMMON | {"GROUP": 0, "ROWS": 1, "WARPS": 4}
    first = nvrtc.compile_source("decode", macros, "sm_90")
    (kept,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
        assert nvrtc.compile_source("decode", macros, "sm_90") == first
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    assert nvrtc.compile_source("decode", macros, "sm_90") == first
    assert nvrtc.compile_source("decode", macros | {"BITS": 2}, "sm_90") != first
    assert len(list(cache.iterdir())) == 2


def test_a_ring_that_is_too_short_is_refused() -> None:
    """It would compile, and not wait for what it reads."""
    with pytest.raises(BackendError, match="waits for nothing"):
        nvrtc.compile_source("hopper", COMMON | {"GROUP": 0}, "sm_90a")


def test_a_source_that_does_not_compile_is_named() -> None:
    with pytest.raises(BackendError, match=r"decode\.cu .*error"):
        nvrtc.compile_source("decode", {"BITS": 4}, "sm_90")
