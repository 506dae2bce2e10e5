"""`bench obs`: what its rows are, and that the baseline it compares with does the same work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltacompress.bench import clock, obs
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import InputError


def test_the_headline_has_the_shipped_speed_beside_the_plain_one() -> None:
    found = obs.run(size=128, repeats=1)
    data = found.to_json()
    plain, ours, shipped = data["rows"]
    rule = Recipe.load(data["as_shipped_recipe"]).rules[0]
    assert [row["implementation"] for row in data["rows"]] == [
        "plain",
        "obs",
        f"int4-24 as shipped, {rule.refine_sweeps} refinement sweeps",  # type: ignore[union-attr]
    ]
    assert data["seconds"] == ours["seconds"]
    assert data["speedup"] == plain["seconds"] / ours["seconds"]
    assert data["as_shipped_seconds"] == shipped["seconds"]
    assert data["as_shipped_speedup"] == plain["seconds"] / shipped["seconds"]
    # One problem, one measure of loss: the solver is as good as the baseline, refinement is better.
    assert ours["relative_loss"] == pytest.approx(plain["relative_loss"], rel=0.1)
    assert 0 < shipped["relative_loss"] < 0.9 * ours["relative_loss"]


@pytest.mark.parametrize("size", [0, 2, 66])
def test_sizes_without_whole_groups(size: int) -> None:
    with pytest.raises(InputError, match=f"size {size}: must be a multiple of 4"):
        obs.run(size=size)


def test_every_case_is_run_as_often_and_timed_by_the_same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clocks that are known: the figures are theirs, and nobody's work is done more often than another's."""
    readings, calls = [0.0], []

    def taking(seconds: float, name: str) -> None:
        original = getattr(obs, name)

        def work(*given: object) -> object:
            calls.append(name)
            readings[0] += seconds
            return original(*given)

        monkeypatch.setattr(obs, name, work)

    for seconds, name in ((6.0, "plain_column_by_column"), (2.0, "_solved"), (3.0, "encode")):
        taking(seconds, name)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: readings[0])
    found = obs.run(size=64, repeats=3, device="cpu").to_json()
    assert [row["seconds"] for row in found["rows"]] == [6, 2, 3]
    assert (found["baseline_seconds"], found["speedup"], found["as_shipped_speedup"]) == (6, 3, 2)
    assert calls == ["plain_column_by_column"] * 3 + ["_solved"] * 3 + ["encode"] * 3


def test_the_loss_is_the_share_of_the_energy() -> None:
    """H = [[2, 1], [1, 3]]: the weight (1, 2) has 2 + 4 + 12 = 18, an error (0, 1) has 3."""
    weight, hessian = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    assert obs._relative_loss(weight, weight, hessian) == 0
    assert obs._relative_loss(torch.zeros(1, 2), weight, hessian) == 1
    assert obs._relative_loss(torch.tensor([[1.0, 3.0]]), weight, hessian) == pytest.approx(3 / 18)


def test_the_baseline_does_no_more_than_the_algorithm_says() -> None:
    """One factorization, inverse and factorization; a column is quantized and its error pushed on once."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[str(func).split(".")[1]] += 1
            return func(*args, **(kwargs or {}))

    seen: Counter[str] = Counter()
    weight, statistics = obs._problem(256, "cpu")
    hessian, _ = statistics.finish()
    with Counted():
        obs.plain_column_by_column(weight, hessian)
    assert seen["linalg_cholesky_ex"] == 2
    assert seen["cholesky_inverse"] == 1
    assert seen["round"] == 256 + 1  # a column each, and the zero points
    assert seen["topk"] == 256 // 4
    assert seen["mm"] == 256 // obs.BLOCK
    assert sum(seen.values()) < 32 * 256  # all else, views included
