"""What ran the solver's loops is told, and part of what a resumed run must share."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from deltacompress.compression import run_identity
from deltacompress.numerics.compiled import fused as compiled
from deltacompress.numerics.triton import fused

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def take(kernels: bool, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, works in ((fused, kernels), (compiled, loops)):
        monkeypatch.setattr(module, "usable", lambda _device, works=works: works)
        monkeypatch.setattr(module, "missing", lambda _device, works=works: None if works else "it is not there")
    monkeypatch.setattr(fused, "triton_version", lambda: "3")
    monkeypatch.setattr(compiled, "numba_version", lambda: "0.7")


@pytest.mark.parametrize(
    ("device", "kernels", "loops", "told"),
    [
        (CPU, False, True, "solver in numba 0.7"),
        (CPU, False, False, "solver in PyTorch"),
        (GPU, True, False, "solver in Triton 3"),
        (GPU, False, False, "solver in PyTorch"),
    ],
)
def test_what_ran_the_loops_is_named(
    device: torch.device, kernels: bool, loops: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(kernels, loops, monkeypatch)
    assert run_identity.solver(device) == told
    note = run_identity.solver_note(device)
    if told == "solver in PyTorch":
        assert note is not None
        assert note.startswith("the solver's loops run in PyTorch, ")
        assert note.endswith(": it is not there")
        assert ("tens of times" in note) == (device == GPU)
    else:
        assert note is None


@pytest.mark.skipif(compiled.missing(CPU) is not None, reason="numba is not installed")
def test_the_version_is_that_of_the_installed_one() -> None:
    assert run_identity.solver(CPU) == f"solver in numba {version('numba')}"
