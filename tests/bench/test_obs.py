"""`bench obs`: what its rows are, and that the baseline it compares with does the same work."""

from __future__ import annotations

import pytest

from deltacompress.bench import obs
from deltacompress.errors import InputError
from deltacompress.recipe import Recipe


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
    with pytest.raises(InputError, match=f"--size {size}: must be a multiple of 4"):
        obs.run(size=size)
