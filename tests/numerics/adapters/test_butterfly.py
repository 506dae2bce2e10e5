from __future__ import annotations

import pytest
import torch
from butterflies import dense, order_of

from deltacompress.numerics.adapters.butterfly import MERGED, cayley, rotate, rotations

SHAPES = [
    (1, 4, 8),
    (1, 3, 5),
    (2, 4, 8),
    (3, 4, 8),
    (3, 8, 4),
    (4, 2, 8),
    (4, 6, 24),
    (5, 2, 16),
    (6, 4, 32),
    (9, 2, 256),
]


def parameters(factors: int, block: int, number: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(factors, number, block, block, generator=generator)


@pytest.mark.parametrize(("factors", "block", "number"), SHAPES)
def test_rotations_do_what_the_factors_do(factors: int, block: int, number: int) -> None:
    raw = parameters(factors, block, number)
    found = rotations(raw)
    assert all(one.blocks.dtype == torch.float32 for one in found)
    x = torch.randn(7, block * number, dtype=torch.float64)
    y = x
    for one in found:
        y = rotate(y, one.blocks.double(), one.stride, one.chunk)
    torch.testing.assert_close(y, x @ dense(raw), rtol=0, atol=2e-6)  # blocks are float32


@pytest.mark.parametrize(("factors", "block", "number"), [shape for shape in SHAPES if shape[0] <= MERGED])
def test_few_factors_are_one_rotation_of_neighbours(factors: int, block: int, number: int) -> None:
    """Block-diagonal as it stands: no feature changes its place."""
    raw = parameters(factors, block, number, seed=1)
    (one,) = rotations(raw)
    size = block << (factors - 1)
    assert (one.blocks.shape, one.stride) == ((number * block // size, size, size), 1)
    torch.testing.assert_close(torch.block_diag(*one.blocks.double()), dense(raw), rtol=0, atol=1e-7)


def test_many_factors_stay_a_chain_that_is_smaller() -> None:
    for factors, sizes in ((5, [3, 2]), (6, [3, 3]), (8, [4, 4]), (9, [3, 3, 3])):
        block, number = 2, 1 << factors
        raw = parameters(factors, block, number)
        found = rotations(raw)
        assert [one.blocks.shape[-1] for one in found] == [block << (k - 1) for k in sizes]
        whole = block * number * (block << (factors - 1))
        assert sum(one.blocks.numel() for one in found) <= min(2 * raw.numel(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cayley_is_orthogonal_at_any_size(dtype: torch.dtype) -> None:
    raw = (torch.randn(3, 5, 6, 6) * torch.tensor([1e-3, 1.0, 300.0]).view(3, 1, 1, 1)).to(dtype)
    q = cayley(raw)
    assert q.dtype == torch.float64
    torch.testing.assert_close(q @ q.mT, torch.eye(6, dtype=torch.float64).expand_as(q), rtol=0, atol=1e-12)
    torch.testing.assert_close(cayley(torch.zeros(1, 4, 4)), torch.eye(4, dtype=torch.float64)[None])


@pytest.mark.parametrize(("factors", "block", "number"), [(2, 3, 4), (2, 4, 3), (3, 4, 6), (4, 2, 4)])
def test_shapes_without_a_butterfly_are_refused(factors: int, block: int, number: int) -> None:
    with pytest.raises(ValueError, match=f"{factors} butterfly factors need .* found {number} of {block}"):
        rotations(parameters(factors, block, number))


def test_a_rotation_keeps_dtype_and_leaves_its_input() -> None:
    (one,) = rotations(parameters(2, 4, 4))
    x = torch.randn(3, 16).bfloat16()
    before = x.clone()
    y = rotate(x, one.blocks.bfloat16(), one.stride, one.chunk)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert torch.equal(x, before)
    assert rotate(x[:0], one.blocks.bfloat16(), one.stride, one.chunk).shape == (0, 16)


@pytest.mark.parametrize(("factors", "block", "number"), [shape for shape in SHAPES if shape[0] > 1])
def test_the_order_of_features_is_that_of_peft(factors: int, block: int, number: int) -> None:
    """The oracle of these tests, too, is held against what trained the adapters."""
    from peft.tuners.boft.layer import BOFTLayer as layer  # noqa: N813

    for i in range(factors):
        theirs = layer.block_butterfly_perm(None, block * number, number >> i, block // 2, factors - 1)
        assert order_of(block * number, block, i) == theirs.tolist()
