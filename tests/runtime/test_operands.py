"""What operands say of themselves where only a GPU asks: what one launch can serve together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels import get_backend
from deltacompress.kernels.adapters.select import ReferenceAdapters
from deltacompress.numerics.grid import fit_grid, quantize
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.runtime.batch import Batch, ForwardContext
from deltacompress.runtime.modules.embedding import Embeddings
from deltacompress.runtime.modules.linear import DecoupledLinear
from deltacompress.runtime.operands.embedding_rows import EmbeddingTable, PackedRows
from deltacompress.runtime.operands.low_rank import LowRank
from deltacompress.runtime.operands.packed_delta import PackedDelta, PackedProduct
from deltacompress.runtime.operands.product import Site

SPEC = PackedSpec(4, 8, 4, Sparsity.parse("dense"), 8, "minmax")
CPU = torch.device("cpu")


def parts(spec: PackedSpec = SPEC) -> dict[str, torch.Tensor]:
    delta = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    grid = fit_grid(delta, bits=spec.bits, group=8, kind="minmax")
    return packed.pack(spec, codes=quantize(delta, grid), mask=torch.ones(4, 8, dtype=torch.bool), grid=grid)


def test_rows_of_added_tokens_are_no_part_of_a_group() -> None:
    kernels = get_backend("reference", CPU)
    product = PackedProduct(Site(8, 4, kernels))
    product.set(1, PackedDelta(parts(), SPEC, 4).placed(CPU, kernels))
    grown = PackedDelta(parts() | {"added": torch.ones(2, 8)}, SPEC, 6)
    assert grown.placed_bytes(kernels) == kernels.nbytes(SPEC) + 2 * 8 * 4
    product.set(2, grown.placed(CPU, kernels))
    assert product.joins([0, 1, 3])
    assert not product.joins([1, 2])
    assert [product.width(slot) for slot in (1, 2)] == [4, 6]
    product.set(2, None)
    assert product.joins([1, 2])


def test_what_is_launched_for_some_slots() -> None:
    """Products that these slots have, and no others; of packed deltas all formats that were ever there."""
    kernels = get_backend("reference", CPU)
    made = DecoupledLinear(
        nn.Linear(8, 4, bias=False), ForwardContext(), kernels, ReferenceAdapters(CPU, "a test"), is_head=False
    )
    specs = [replace(SPEC, bits=bits) for bits in (2, 4)]
    for slot, spec in enumerate(specs, start=1):
        made.set(slot, PackedDelta(parts(spec), spec, 4).placed(CPU, kernels))
    made.set(3, LowRank({"a": torch.ones(2, 8), "b": torch.ones(4, 2)}))
    [table] = made.traits(3) or ()
    assert made.launched([1]) == made.launched([1, 2]) == {*specs}
    assert made.launched([3]) == {table}
    assert made.launched([0, 2, 3]) == {*specs, table}
    made.set(1, None)
    assert made.launched([1]) == made.launched([0]) == set()
    assert made.launched([2]) == {*specs}


def test_the_fused_lookup_reads_tables_of_one_format() -> None:
    rank = {"rank": torch.arange(4, dtype=torch.int32)}
    plain = PackedRows(parts() | rank, SPEC, torch.bfloat16)
    fewer = PackedRows(parts() | rank, PackedSpec(2, 8, 4, SPEC.sparsity, 8, "minmax"), torch.bfloat16)
    assert plain.format == fewer.format is not None
    assert plain.format != PackedRows(parts() | rank, SPEC, torch.float16).format
    assert PackedRows(parts() | rank | {"added": torch.ones(1, 8)}, SPEC, torch.bfloat16).format is None


def test_one_launch_for_each_format_looks_tables_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def lookup(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(rest)
        return torch.full((len(ids), 8), 2.0 if rest[-1] == torch.float16 else 3.0)

    monkeypatch.setattr("deltacompress.kernels.triton.fused.lookup", lookup)
    rank = {"rank": torch.arange(4, dtype=torch.int32)}
    own = Embeddings(torch.zeros(4, 8), fuse=True)
    own.set(1, PackedRows(parts() | rank, SPEC, torch.bfloat16))
    own.set(2, PackedRows(parts() | rank, SPEC, torch.bfloat16))
    own.set(3, PackedRows(parts() | rank, SPEC, torch.float16))
    own.set(4, EmbeddingTable({"table": torch.ones(4, 8)}))
    ids = torch.tensor([0, 1, 2])
    for slots, launches in (([0, 1, 2], 1), ([1, 2, 3], 2), ([3, 3, 3], 1)):
        calls.clear()
        rows = own.rows(ids, Batch(slots, CPU))
        assert len(calls) == launches
        assert rows[-1].tolist() == [2.0 if slots[-1] == 3 else 3.0] * 8
        assert rows[1].tolist() == [2.0 if slots[1] == 3 else 3.0] * 8
    calls.clear()
    assert own.rows(ids, Batch([1, 1, 4], CPU))[-1].eq(1).all()  # a table as it is stored: no launch at all
    assert not calls
    assert [own.traits(slot) for slot in (0, 1, 3, 4)] == [set(), {own._formats[1]}, {own._formats[3]}, None]
    assert own.launched([0]) == set()
    assert own.launched([0, 1]) == {own._formats[1], own._formats[3]}
    own.set(3, PackedRows(parts() | rank, SPEC, torch.bfloat16))
    own.set(2, None)
    own.rows(ids, Batch([1, 2, 3], CPU))
    [(_, _, addresses, spec, dtype)] = calls
    assert isinstance(addresses, torch.Tensor)
    assert [bool(row.any()) for row in addresses[:5]] == [False, True, False, True, False]
    assert (spec, dtype) == own._formats[1]
