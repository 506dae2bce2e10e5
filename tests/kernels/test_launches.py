"""Which kernel of the CUDA backend takes which rows of which linears."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels.cuda.sbmm import NARROW, CudaBackend, _decode_layouts, _scale_step
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.table import Table
from deltacompress.numerics.sparsity import Sparsity

WIDE = 2 * NARROW


@pytest.mark.parametrize(
    ("runs", "launched"),
    [
        ([1, 1], [("decode", [0, NARROW, 2 * NARROW, 2 * NARROW + WIDE])]),
        ([300, 2], [("prefill", [0]), ("prefill", [NARROW]), ("decode", [0, NARROW]), *[("prefill", [at]) for at in
            (2 * NARROW, 2 * NARROW + WIDE)], ("decode", [2 * NARROW, 2 * NARROW + WIDE])]),
        ([200], [("decode", [0, NARROW]), ("prefill", [2 * NARROW]), ("prefill", [2 * NARROW + WIDE])]),
    ],
    ids=["one row each", "long and short", "narrow ones take longer runs"],
)  # fmt: skip
def test_linears_of_one_format(runs: list[int], launched: list[tuple[str, list[int]]]) -> None:
    """Two narrow and two wide linears over one input; launches by kernel and by the columns where linears begin."""
    tables = [Table(2, rows, 64, "cpu") for rows in (NARROW, NARROW, WIDE, WIDE)]
    for table in tables:
        table.reserve(PackedSpec(table.out_features, 64, 2, "2:4", 64, "minmax"))
    backend, found = object.__new__(CudaBackend), list[tuple[str, list[int]]]()
    backend._launch = Mock(  # type: ignore[method-assign]
        side_effect=lambda name, wide, members, *_: found.append((name, [one.first for one in members]))
    )
    offsets = [sum(runs[:at]) for at in range(len(runs) + 1)]
    x, y = (torch.zeros(offsets[-1], size, dtype=torch.bfloat16) for size in (64, 2 * NARROW + 2 * WIDE))
    backend.sbmm_group(x, y, Segments.build(offsets, [*range(len(runs))], "cpu"), tables)
    assert found == launched


@pytest.mark.parametrize(
    ("pattern", "bits", "group", "rows", "dtype", "first"),
    [
        *[("2:4", bits, 256, 1, torch.bfloat16, (4, 2)) for bits in (1, 2, 3)],
        *[("dense", bits, 256, 1, torch.float16, (4, 2)) for bits in (1, 2)],
        ("2:4", 4, 256, 1, torch.bfloat16, (2, 3)),
        *[("dense", bits, 256, 1, torch.bfloat16, (2, 3)) for bits in (3, 4)],
        ("2:4", 2, 256, 8, torch.bfloat16, (2, 3)),
        ("2:4", 2, 256, 1, torch.float32, (2, 3)),
        ("2:4", 2, 128, 1, torch.bfloat16, (2, 3)),
    ],
)
def test_how_many_blocks_share_a_multiprocessor(
    pattern: str, bits: int, group: int, rows: int, dtype: torch.dtype, first: tuple[int, int]
) -> None:
    spec = PackedSpec(128, 256, bits, Sparsity.parse(pattern), group, "minmax")
    layouts = _decode_layouts(spec, _scale_step(spec, 128), rows, dtype)
    assert layouts[0] == first
    assert layouts[-2:] == [(2, 3), (1, 6)]
