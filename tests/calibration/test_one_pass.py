"""Norms and rotations in one pass, against the library's: where they agree they take its place, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import inside
from plain_layers import loaded
from transformers.models.llama import modeling_llama
from turns_of_a_layer import walk_of

from deltacompress.calibration.forwards import one_pass
from deltacompress.calibration.forwards.one_pass import in_one_pass
from deltacompress.calibration.forwards.recording import capture_calls
from deltacompress.calibration.forwards.turns import taking_turns

CPU = torch.device("cpu")
RUNS = [pytest.param("cpu", marks=inside), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many features each norm had that ran in one pass."""
    seen: list[int] = []
    fused = torch.nn.functional.rms_norm

    def count(x: torch.Tensor, shape: Any, *rest: Any) -> torch.Tensor:
        seen.append(shape[0])
        return fused(x, shape, *rest)

    monkeypatch.setattr(one_pass, "rms_norm", count)
    return seen


def runs_of(checkpoint: Any, ids: torch.Tensor) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The first layer of a model, and what makes its output anew."""
    skeleton = loaded(checkpoint)
    stream, calls = capture_calls(skeleton, ids, 2)
    return skeleton.layer(0), lambda: skeleton.run_layer(0, stream[0], calls[2][0])


def test_a_norm_is_the_librarys(tiny: Callable[..., Any], ids: torch.Tensor, norms: list[int]) -> None:
    layer, run = runs_of(tiny("llama"), ids)
    expected = run()
    with in_one_pass(layer, CPU):
        first, second = run(), run()
    assert norms == [32] * 4  # two in each forward
    for found in (first, second):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(run(), expected)
    assert len(norms) == 4


def test_a_norm_of_another_meaning_stays(tiny: Callable[..., Any], ids: torch.Tensor, norms: list[int]) -> None:
    """Gemma's weight is what is added to 1."""
    layer, run = runs_of(tiny("gemma2"), ids)
    expected = run()
    with in_one_pass(layer, CPU):
        assert torch.equal(run(), expected)
        tried = len(norms)
        assert torch.equal(run(), expected)
    assert tried == len(norms) == 4


@pytest.mark.parametrize("wrong", ["value", "shape", "dtype", "nan"])
def test_a_rotation_that_is_not_the_librarys_is_not_used(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    library, tries = modeling_llama.apply_rotary_pos_emb, []
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "value": lambda x: x * 1.001,
        "shape": lambda x: x[:1],
        "dtype": lambda x: x.double(),
        "nan": lambda x: x * float("nan"),
    }

    def other(*args: Any) -> Any:
        tries.append(1)
        query, key = library(*args)
        return query, ways[wrong](key)

    monkeypatch.setattr(one_pass, "_rotated", other)
    monkeypatch.setattr("deltacompress.numerics.triton.fused.usable", lambda _device: True)
    layer, run = runs_of(tiny("llama"), ids)
    expected = run()
    with in_one_pass(layer, CPU):
        for _ in range(2):
            assert torch.allclose(run(), expected, rtol=1e-5, atol=1e-6)
    assert len(tries) == 1
    assert modeling_llama.apply_rotary_pos_emb is library


def problem(device: str, heads: int, tables: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [2, heads, 5, 12] as a transposed view, as attention has it; cos, sin [tables, 5, 12], halves that differ."""
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(2, 5, heads, 12, generator=generator).transpose(1, 2)
    cos, sin = (torch.randn(tables, 5, 12, generator=generator) for _ in range(2))
    return query.to(device), cos.to(device), sin.to(device)


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize(("heads", "tables", "dtype"), [(3, 1, "float32"), (4, 2, "float32"), (1, 1, "float16")])
def test_a_rotation_is_that_of_its_formula(device: str, heads: int, tables: int, dtype: str) -> None:
    from deltacompress.numerics.triton.rotary import rotate

    kind = getattr(torch, dtype)
    query, cos, sin = (one.to(kind) for one in problem(device, heads, tables))
    found = rotate(query, cos, sin)
    expected, _ = modeling_llama.apply_rotary_pos_emb(query.double(), query.double(), cos.double(), sin.double())
    assert (found.dtype, found.stride()) == (kind, query.stride())
    assert torch.allclose(found.double(), expected, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-3)


@pytest.mark.parametrize("device", RUNS)
def test_what_a_rotation_takes(device: str) -> None:
    query, cos, sin = problem(device, 4, 1)
    assert one_pass._rotated(query, query, cos, sin) is not None
    bad = [
        (query, query, cos, sin[..., :8]),
        (query, query, cos[..., :6], sin[..., :6]),
        (query, query, cos, sin.half()),
        (query, query.mT, cos, sin),
        (query, query, cos.expand(3, -1, -1), sin.expand(3, -1, -1)),
        (query[..., :11], query[..., :11], cos[..., :11], sin[..., :11]),
        (query, query, cos[0], sin[0]),
        (query, query, cos, sin, None),
        (query, query, cos, None),
    ]
    assert [one_pass._rotated(*one) for one in bad] == [None] * len(bad)


def test_norms_of_forwards_that_take_turns_run_so_on_a_cpu(
    tiny: Callable[..., Any], ids: torch.Tensor, norms: list[int]
) -> None:
    walk = walk_of(tiny("llama"), ids)
    with taking_turns(walk.skeleton, [], [walk.turns]):
        walk.turns.finish_all()
    assert norms == [32] * 2 * len(walk.turns)
    norms.clear()
    walk.skeleton.run_layer(0, walk.batches[0], walk.calls[len(walk.batches[0])][0])
    assert not norms
