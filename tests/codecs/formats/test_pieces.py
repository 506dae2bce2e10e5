"""Piece by piece gives the same bits as all at once, for every layout, and refuses whatever that refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.checkpoints.rows import InMemory
from deltacompress.codecs.encoded import restore_pieces, restore_tensor
from deltacompress.codecs.formats import exact, packed, pieces
from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.codecs.formats.pieces import PartInMemory
from deltacompress.codecs.rtn import magnitude_mask
from deltacompress.errors import FormatError
from deltacompress.numerics.bits import packing
from deltacompress.numerics.grid import GridKind, fit_grid, quantize
from deltacompress.numerics.sparsity import Sparsity

PATTERNS = ["dense", "2:4", "1:4", "3:4", "4:8", "2:3", "5:16", "unstructured:0.5"]
DRAWN = ["drawn:1:4", "drawn:3:8", "drawn:5:16"]
"""Of one bit only."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of these tests takes several."""
    monkeypatch.setattr("deltacompress.checkpoints.rows.PIECE", 24)


class Part(PartInMemory):
    """A part in memory that is not read beyond its end."""

    def read(self, begin: int, end: int) -> bytearray:
        assert 0 <= begin <= end <= self.nbytes
        return super().read(begin, end)


class Rows(InMemory):
    """The base's rows in memory, not read beyond their end."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        assert 0 <= begin <= end <= math.prod(self.shape)
        return super().read(begin, end)


def in_pieces(format_: str, params: Any, parts: Parts, base: Any, like: torch.Tensor, **options: Any) -> torch.Tensor:
    sources = {name: Part(part) for name, part in parts.items()}
    rows = None if base is None else Rows(base)
    found = list(restore_pieces(format_, params, sources, rows, like, "t", **options))
    assert all(piece.dim() == 1 and piece.dtype == like.dtype for piece in found)
    return torch.cat([torch.empty(0, dtype=like.dtype), *found]).reshape(like.shape)


def encoded(
    bits: int, pattern: str, kind: GridKind, weight: torch.Tensor, group: int, *, keep_zeros: bool = True
) -> tuple[PackedSpec, Parts]:
    """Spec and parts (serving layout) of a weight; rows that are zero are left out unless `keep_zeros`."""
    stored = weight if keep_zeros else weight[(weight != 0).any(1)]
    spec = PackedSpec(len(stored), weight.shape[1], bits, Sparsity.parse(pattern), group, kind)
    if pattern in DRAWN:
        spec = replace(spec, seed=len(stored))
        mask = packed.drawn_pattern(spec, stored.device)[:, : spec.columns]
    else:
        mask = magnitude_mask(stored, spec.sparsity)
    if bits == 16:
        parts = packed.pack_values(spec, values=stored, mask=mask)
    else:
        grid = fit_grid(stored, bits=bits, group=group, kind=kind)
        parts = packed.pack(spec, codes=quantize(stored, grid), mask=mask, grid=grid)
    if not keep_zeros:
        changed = (weight != 0).any(1).to(torch.uint8)
        parts["row_mask"] = packing.pack_codes(changed.unsqueeze(0), 1).squeeze(0)
    return spec, parts


@st.composite
def cases(draw: st.DrawFn) -> tuple[PackedSpec, Parts, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(spec, parts, like, base, added rows)"""
    bits = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    kind = cast(GridKind, draw(st.sampled_from(["midrise"] if bits == 1 else ["minmax", "symmetric", "midrise"])))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 30) | st.integers(31, 400))
    group = draw(st.sampled_from([columns, 16, 7, 32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, columns, generator=generator)
    keep_zeros = draw(st.booleans())
    if not keep_zeros:
        weight[torch.rand(rows, generator=generator) < draw(st.sampled_from([0.3, 0.9, 1.1]))] = 0
        weight[0] = 0
    pattern = draw(st.sampled_from(PATTERNS + DRAWN if bits == 1 else PATTERNS))
    spec, parts = encoded(bits, pattern, kind, weight, group, keep_zeros=keep_zeros)
    if spec.sparsity.kind == "dense" and spec.has_zero_code:
        spec = replace(spec, masked=draw(st.booleans()))
    base = torch.randn(rows, columns, generator=generator) if draw(st.booleans()) else None
    added = None
    if base is not None and draw(st.booleans()):
        added = torch.randn(draw(st.integers(1, 5)), columns, generator=generator).bfloat16()
    like = torch.empty(rows + (0 if added is None else len(added)), columns, dtype=torch.bfloat16, device="meta")
    return spec, parts, like, base, added


@given(cases(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_packed_tensors(case: Any, storage: bool) -> None:
    spec, parts, like, base, added = case
    parts = parts | ({} if added is None else {"added_rows": added})
    params = spec.to_json()
    wanted = restore_tensor("packed", params, parts, base, like, "t")
    stored = packed.to_storage(spec, parts) if storage else parts
    found = in_pieces("packed", params, stored, base, like, storage=storage)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    sources = {name: Part(part) for name, part in stored.items()}
    rows = like.shape[0] - (0 if added is None else len(added))
    pieces.PackedPieces(spec, sources, storage=storage, where="t").check(rows)


@given(cases(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_transposed_packed_tensors(case: Any, storage: bool) -> None:
    """The codes of a matrix [out, in] for a tensor that lies as [in, out]: its transpose, whole and in pieces."""
    spec, parts, like, base, _ = case
    rows, columns = (len(base), spec.columns) if base is not None else (like.shape[0], spec.columns)
    straight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    lying = torch.empty(columns, rows, dtype=torch.bfloat16, device="meta")
    wanted = restore_tensor("packed", spec.to_json(), parts, base, straight, "t").t()
    params = spec.to_json() | {"transposed": 1}
    below = None if base is None else base.t().contiguous()
    assert torch.equal(restore_tensor("packed", params, parts, below, lying, "t"), wanted)
    stored = packed.to_storage(spec, parts) if storage else parts
    assert torch.equal(in_pieces("packed", params, stored, below, lying, storage=storage), wanted)


def test_masked_codes_are_checked_without_their_values() -> None:
    spec, parts = encoded(2, "dense", "symmetric", torch.randn(5, 40), 40)
    spec = replace(spec, masked=True)
    stored = packed.to_storage(spec, parts)
    for wrong in (stored["nonzero"][:-1], torch.cat([stored["nonzero"], stored["nonzero"][:1]])):
        sources = {name: PartInMemory(part) for name, part in (stored | {"nonzero": wrong}).items()}
        with pytest.raises(FormatError, match=r"part nonzero is (short|long)er than the others say"):
            pieces.PackedPieces(spec, sources, storage=True, where="t").check(5)


@pytest.mark.parametrize("shape", [(64,), (4, 4, 4), (8, 8, 1)])
def test_only_a_matrix_is_transposed(shape: tuple[int, ...]) -> None:
    weight = torch.randn(8, 8)
    spec, parts = encoded(4, "dense", "minmax", weight, 8)
    params = spec.to_json() | {"transposed": 1}
    for base in (None, torch.zeros(shape)):
        with pytest.raises(FormatError):
            restore_tensor("packed", params, parts, base, torch.empty(shape, device="meta"), "t")


@pytest.mark.parametrize("value", [0, 2, "yes", -1])
def test_transposed_is_one_or_absent(value: Any) -> None:
    spec, _ = encoded(4, "dense", "minmax", torch.randn(8, 8), 8)
    with pytest.raises(FormatError, match="out of range"):
        PackedSpec.from_json(spec.to_json() | {"transposed": value}, "t")
    assert PackedSpec.from_json(spec.to_json() | {"transposed": 1}, "t") == replace(spec, transposed=True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (100,), (7, 11), (0, 5), (3, 4, 9)])
@pytest.mark.parametrize("shared", [None, 0, 1, 100])
def test_exact_tensors(dtype: torch.dtype, shape: tuple[int, ...], shared: int | None) -> None:
    whole = (torch.randn(shape) * 9).to(dtype)
    base = None if shared is None else (torch.randn(shape) * 9).to(torch.float32 if dtype.is_floating_point else dtype)
    if base is not None and base.dim():
        base = base[:shared]
    params, parts = exact.encode(InMemory(whole), None if base is None else InMemory(base))
    like = torch.empty(shape, dtype=dtype, device="meta")
    found = in_pieces("exact", params, parts, base, like, storage=True)
    assert torch.equal(found, whole)


def test_tensors_of_the_base() -> None:
    base = torch.randn(9, 11)
    like = torch.empty(9, 11, dtype=torch.bfloat16, device="meta")
    assert torch.equal(in_pieces("none", {}, {}, base, like, storage=False), base.bfloat16())


@pytest.mark.parametrize("columns", [20, 70])
@pytest.mark.parametrize("storage", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 16])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "unstructured:0.5"])
def test_damaged_parts_are_refused_alike(pattern: str, bits: int, storage: bool, columns: int) -> None:
    """A flipped bit of a pattern, a part cut or made longer: refused by both ways to decode, or by neither.

    Of few columns three bits of every byte; of many, one of every other byte, or of every byte where there are few.
    """
    torch.manual_seed(0)
    spec, serving = encoded(bits, pattern, "minmax", torch.randn(5, columns), columns)
    parts = packed.to_storage(spec, serving) if storage else serving
    like = torch.empty(5, columns, dtype=torch.float32, device="meta")
    refused, step = 0, 1 if columns < 70 or bits == 2 else 2
    for name, part in parts.items():
        free = part.dim() == 1
        for at in range(0, part.numel(), step) if part.dtype == torch.uint8 else ():
            for change in (1, 8, 128) if columns < 70 else ((1, 8, 128)[at % 3],):
                odd = part.clone()
                odd.view(-1)[at] ^= change
                refused += _alike(spec, parts | {name: odd}, like, storage)
        if free:
            for odd in (part[:-1], part[:0], torch.cat([part, part[:1]])):
                refused += _alike(spec, parts | {name: odd}, like, storage)
    assert refused > 5


def _alike(spec: PackedSpec, parts: Parts, like: torch.Tensor, storage: bool) -> bool:
    outcomes = []
    for way in ("whole", "pieces", "check"):
        try:
            if way == "whole":
                serving = packed.to_serving(spec, parts, "t") if storage else parts
                outcomes.append(restore_tensor("packed", spec.to_json(), serving, None, like, "t"))
            elif way == "pieces":
                outcomes.append(in_pieces("packed", spec.to_json(), parts, None, like, storage=storage))
            else:
                sources = {name: Part(part) for name, part in parts.items()}
                pieces.PackedPieces(spec, sources, storage=storage, where="t").check(like.shape[0])
        except FormatError:
            outcomes.append(None)
    if outcomes[0] is not None:
        assert len(outcomes) == 2
        assert torch.equal(*outcomes)
        return False
    assert outcomes == [None, None, None]
    return True


def test_a_row_mask_that_names_other_rows_than_are_stored() -> None:
    weight = torch.randn(20, 8)
    weight[::3] = 0
    spec, parts = encoded(4, "dense", "minmax", weight, 8, keep_zeros=False)
    for at in range(20):
        odd = parts["row_mask"].clone()
        odd[at // 8] ^= 1 << at % 8
        sources = {name: Part(part) for name, part in (parts | {"row_mask": odd}).items()}
        for use in (lambda made: list(made.deltas(20)), lambda made: made.check(20)):
            with pytest.raises(FormatError, match=r"^t: .*rows"):
                use(pieces.PackedPieces(spec, sources, storage=False, where="t"))


def test_memory_does_not_grow_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is larger than it may be, of many short rows or of one long one."""
    monkeypatch.setattr("deltacompress.checkpoints.rows.PIECE", 4096)
    for rows, columns in ((3000, 7), (1, 90_000), (2, 50_000)):
        for pattern in PATTERNS:
            spec, parts = encoded(4, pattern, "minmax", torch.randn(rows, columns), columns)
            sources = {name: Part(part) for name, part in parts.items()}
            sizes = [len(one) for one in pieces.PackedPieces(spec, sources, storage=False, where="t").deltas(rows)]
            assert sum(sizes) == rows * columns
            assert max(sizes) <= 4096
            assert len(sizes) < 3 * rows * columns / 4096 + 6
    assert replace(spec, rows=0).rows == 0
