"""Products in panels against the plain ones in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tolerances import FLOAT32_CHAIN

from deltacompress.numerics import products

SIZES = [1, 5, 256, 257, 600, 2100]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    assert np.abs(found.double().numpy() - wanted.numpy()).max() <= FLOAT32_CHAIN.value * float(wanted.abs().max())


@pytest.mark.parametrize("size", [*SIZES, 4096, 4100])
def test_panels_are_all_columns_once_and_eight_where_they_are_many(size: int) -> None:
    found = products.panels(size)
    assert [c for part in found for c in range(part.start, part.stop)] == list(range(size))
    assert len(found) == min(-(-size // 256), 8)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_left_out_is_zero_or_known(size: int) -> None:
    """The other triangle holds NaN where it must not be read."""
    left, upper = normal(3, size), normal(size, size, seed=1).triu()
    exact = upper.double()
    same(products.times_upper(left, upper), left.double() @ exact)
    same(products.times_lower(left, upper), left.double() @ exact.T)
    symmetric = upper.double() + upper.double().triu(1).T
    read = symmetric.float()
    for part in products.panels(size):
        read[part, : part.start] = torch.nan
    same(products.quadratic(left, read), ((left.double() @ symmetric) * left.double()).sum(1))
    half = upper + normal(size, size, seed=2).tril(-1)
    assert products.mirror(half) is half
    assert torch.equal(half, symmetric.float())


@pytest.mark.parametrize("size", SIZES)
def test_the_inverse_of_an_upper_triangle(size: int) -> None:
    triangle = (normal(size, size) / size**0.5).triu(1) + torch.diag(1 + torch.rand(size))
    kept = triangle.clone()
    found = products.inverse_of_upper(triangle)
    assert torch.equal(triangle, kept)
    assert not found.tril(-1).any()
    same(found, torch.linalg.inv(triangle.double()))


@pytest.fixture(params=["cpu", "halves", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """halves: on a CPU, what a GPU multiplies."""
    if request.param != "halves":
        return str(request.param)

    def addmm(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor, **given: Any) -> torch.Tensor:
        assert one.dtype == other.dtype == torch.bfloat16
        assert (given["out_dtype"], given["out"]) == (torch.float32, total)
        return total.add_(one.float() @ other.float(), alpha=given.get("alpha", 1))

    monkeypatch.setattr(products, "_splits", lambda _matrix: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    return "cpu"


def sixteen_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    assert float((found.cpu() - wanted).norm() / wanted.norm()) <= 2.0**-16


def test_a_product_keeps_sixteen_bits(device: str) -> None:
    left, right = normal(70, 5000), normal(5000, 90, seed=1)
    sixteen_bits(products.product(left.to(device), right.to(device)), left.double() @ right.double())
    turned = right.T.contiguous().to(device).T
    sixteen_bits(products.product(left.to(device), turned), left.double() @ right.double())


def test_a_product_is_added_in_place(device: str) -> None:
    left, right, total = normal(1300, 70), normal(1300, 90, seed=1), normal(100, 90, seed=2)
    wanted, found = total.double(), total.to(device)
    assert (
        products.add_product(found[30:], left.to(device).T, right.to(device), alpha=-1).data_ptr()
        == found[30:].data_ptr()
    )
    wanted[30:] -= left.double().T @ right.double()
    sixteen_bits(found, wanted)


def test_what_grows_is_multiplied_as_far_as_asked(device: str) -> None:
    like, left = torch.ones(4000, 30), normal(20, 4000)
    growing, wanted = products.Growing(like.to(device)), torch.zeros(4000, 30).double()
    assert not growing.under(left[:, :0].to(device)).any()
    for k, rows in enumerate((slice(0, 2000), slice(2000, 4000), slice(1000, 3000))):
        change = normal(2000, 30, seed=k)
        growing.add(rows, change.to(device))
        wanted[rows] += change
        for reach in (1500, 4000):
            if wanted[:reach].any():
                found = growing.under(left[:, :reach].to(device))
                sixteen_bits(found, left[:, :reach].double() @ wanted[:reach])


def test_triangles_and_symmetric_matrices_too(device: str) -> None:
    left, upper = normal(9, 2100), normal(2100, 2100, seed=1).triu()
    exact = upper.double()
    sixteen_bits(products.times_upper(left.to(device), upper.to(device)), left.double() @ exact)
    sixteen_bits(products.times_lower(left.to(device), upper.to(device)), left.double() @ exact.T)
    symmetric = exact @ exact.T
    wanted = ((left.double() @ symmetric) * left.double()).sum(1)
    sixteen_bits(products.quadratic(left.to(device), symmetric.float().to(device), rough=True), wanted)


def test_what_is_inverted_is_not_rounded_to_sixteen_bits(device: str) -> None:
    triangle = (normal(2100, 2100) / 2100**0.5).triu(1) + torch.diag(1 + torch.rand(2100))
    same(products.inverse_of_upper(triangle.to(device)).cpu(), torch.linalg.inv(triangle.double()))


def test_halves_are_the_matrix_to_sixteen_bits() -> None:
    matrix = normal(50, 50) * 1e-3
    high, low = products._halves(matrix)
    assert high.dtype == low.dtype == torch.bfloat16
    assert float(((high.double() + low.double() - matrix.double()) / matrix.double()).abs().max()) <= 2.0**-16


def test_sums_over_a_rough_product_are_those_of_the_product() -> None:
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    exact = (left @ right).square().sum()
    assert float((products.rough_product(left, right).square().sum() / exact - 1).abs()) < 1e-3
    assert torch.equal(products.rough_product(left[:8], right), left[:8] @ right)  # few values: no rounding
    assert torch.get_float32_matmul_precision() == before
