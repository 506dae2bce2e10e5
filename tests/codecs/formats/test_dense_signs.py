"""Signs by a drawn pattern, as kernels read them: the same values to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.dense_signs import dense_signs, dense_spec
from deltacompress.codecs.formats.packed import PackedSpec, Parts, part_shapes
from deltacompress.numerics.sparsity import Sparsity


def drawn(pattern: str = "drawn:3:8", rows: int = 7, columns: int = 45) -> tuple[PackedSpec, Parts]:
    """Random signs, of a matrix that is no whole number of groups wide; its last row has none."""
    spec = PackedSpec(rows, columns, 1, Sparsity.parse(pattern), columns, "midrise", seed=5)
    draw = torch.Generator().manual_seed(0)
    _, codes = part_shapes(spec, storage=False)["codes"]
    scales = torch.rand(rows, 1, generator=draw).to(torch.bfloat16)
    scales[-1] = 0
    return spec, {"codes": torch.randint(0, 256, codes, generator=draw, dtype=torch.uint8), "scales": scales}


@pytest.mark.parametrize("pattern", ["drawn:3:8", "drawn:1:8", "drawn:1:2"])
def test_values_are_the_same(pattern: str) -> None:
    spec, parts = drawn(pattern)
    found = dense_signs(spec, parts)
    assert found is not None
    wanted, values = packed.decode(spec, parts), packed.decode(dense_spec(spec), found)
    assert torch.equal(values.view(torch.int32), wanted.view(torch.int32))
    assert (wanted != 0).any()
    assert {name: (one.dtype, tuple(one.shape)) for name, one in found.items()} == part_shapes(
        dense_spec(spec), storage=False
    )


def test_what_lies_beside_them_stays() -> None:
    spec, parts = drawn()
    more = {"row_mask": torch.ones(1, dtype=torch.uint8), "added_rows": torch.ones(2, 45)}
    found = dense_signs(spec, parts | more)
    assert found is not None
    assert all(found[name] is one for name, one in more.items())
    assert parts.keys() == {"codes", "scales"}


def test_half_of_the_smallest_scale_is_none() -> None:
    spec, parts = drawn()
    parts["scales"][2] = torch.finfo(torch.bfloat16).smallest_normal / 128  # the smallest there is
    assert dense_signs(spec, parts) is None


def test_other_patterns_are_left_as_they_are() -> None:
    spec, parts = drawn()
    other = replace(spec, sparsity=Sparsity.parse("2:4"), seed=0)
    assert dense_spec(other) is other
    assert dense_signs(other, parts) is parts
