"""Rows that make up for each other, against minima in fp64."""

from __future__ import annotations

import pytest
import torch

from deltacompress.errors import NumericsError
from deltacompress.numerics.coupling import BLOCKS, DAMP_FRACTION, Coupling


def fisher(rows: int, seed: int = 0) -> torch.Tensor:
    gradients = torch.randn(4 * rows, rows, generator=torch.Generator().manual_seed(seed))
    gradients += gradients[:, :1]
    return gradients.T @ gradients / len(gradients)


def damped(one: torch.Tensor) -> torch.Tensor:
    return one.double() + DAMP_FRACTION * one.diagonal().double().mean() * torch.eye(len(one), dtype=torch.float64)


@pytest.mark.parametrize("rows", [(40,), (40, 33), (7,), (1, 20)])
def test_blocks_hold_each_row_once(rows: tuple[int, ...]) -> None:
    coupling = Coupling([fisher(one) for one in rows], ["q"] * len(rows))
    found = [block for _, block in coupling.blocks()]
    assert sorted(torch.cat(found).tolist()) == list(range(sum(rows)))
    assert len(found) == min(max(rows), BLOCKS)
    assert max(map(len, found)) - min(map(len, found)) <= len(rows)


def test_a_target_is_the_best_that_the_rows_left_can_do() -> None:
    """After each block the targets of all rows left are the minimum of tr G E H E^T, whatever H, given those fixed."""
    rows, columns = 40, 6
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(rows, columns, generator=generator)
    one = fisher(rows)
    coupling, shifted = Coupling([one], ["q"]), target.clone()
    error = torch.zeros(rows, columns, dtype=torch.float64)  # Q - T
    fixed: list[int] = []
    for number, block in coupling.blocks():
        coded = shifted[block] + 0.3 * torch.randn(len(block), columns, generator=generator)
        coupling.pass_on(number, shifted[block] - coded, shifted)
        error[block] = coded.double() - target[block].double()
        fixed += block.tolist()
        left = [row for row in range(rows) if row not in fixed]
        weights = damped(one)
        best = -torch.linalg.solve(weights[left][:, left], weights[left][:, fixed] @ error[fixed])
        torch.testing.assert_close(shifted[left], (target[left] + best).float(), rtol=1e-3, atol=1e-4)


def test_rows_of_other_linears_are_left_alone() -> None:
    target = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    coupling, shifted = Coupling([fisher(20), fisher(30, seed=1)], ["q", "k"]), target.clone()
    number, block = next(coupling.blocks())
    lost = torch.randn(len(block), 4)
    lost[block >= 20] = 0
    coupling.pass_on(number, lost, shifted)
    assert torch.equal(shifted[20:], target[20:])
    assert not torch.equal(shifted[:20], target[:20])


def test_rows_that_are_worth_nothing_to_each_other_stay() -> None:
    target = torch.randn(32, 4)
    coupling, shifted = Coupling([torch.eye(32)], ["q"]), target.clone()
    for number, block in coupling.blocks():
        coupling.pass_on(number, torch.randn(len(block), 4), shifted)
    assert torch.equal(shifted, target)


def test_what_has_no_factor_is_named() -> None:
    with pytest.raises(NumericsError, match="q_proj"):
        Coupling([torch.full((4, 4), float("nan"))], ["q_proj"])
