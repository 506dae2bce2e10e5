"""The fused operations between linears against what they stand for in PyTorch.

Without a GPU they run under Triton's interpreter, in a process of their own and in fp32 (bf16 is truncated there).
"""

from __future__ import annotations

import pytest
import torch
from interpreted import inside
from torch import Tensor
from torch.nn import functional

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels.triton import fused
from deltacompress.numerics.grid import GridKind
from deltacompress.numerics.sparsity import Sparsity

PLACES = [
    pytest.param(("cpu", torch.float32), marks=inside),
    pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu),
]
Place = tuple[str, torch.dtype]


def drawn(place: Place, *shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(place[0], place[1])


def close(found: Tensor, wanted: Tensor) -> None:
    """fp32 up to the order of sums; bf16 up to one unit in the last place."""
    few = 2e-6 if wanted.dtype == torch.float32 else 2**-7
    assert float((found.float() - wanted.float()).abs().max()) <= few * float(wanted.float().abs().max())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "unit offset"])
def test_rms_norm(place: Place, kind: fused.NormKind) -> None:
    x, vectors = drawn(place, 5, 3, 40), drawn(place, 4, 40)
    index = torch.tensor([0, 1, 1, 3, 9], device=place[0])
    wanted = fused.norm_formula(x, vectors[index.clamp(max=3), None], 1e-5, kind)
    close(fused.rms_norm(x, vectors, index, 1e-5, kind), wanted)
    one = fused.rms_norm(x, vectors[2:3], index[3:4], 1e-5, kind)  # one request, whatever the rows are
    close(one, fused.norm_formula(x, vectors[2], 1e-5, kind))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("angles", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rotate(place: Place, tokens: int, angles: int) -> None:
    q = drawn(place, 4, tokens, 160)[..., 10:106].view(4, tokens, 6, 16).transpose(1, 2)
    k = drawn(place, 4, 11, tokens, 16)
    cos, sin = (drawn(place, angles, tokens, 20, seed=seed)[..., 2:18] for seed in (0, 1))
    assert fused.rotates(q, k, cos)
    for found, wanted in zip(fused.rotate(q, k, cos, sin), fused.rotate_formula(q, k, cos, sin), strict=True):
        assert torch.equal(found, wanted)


def laid(place: Place, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of two heads in pages of ten tokens, and a table of so many pages for each of five rows."""
    keys, values = (drawn(place, 2, 5 * each + 5, 10, 24, seed=seed) for seed in (0, 1))
    order = torch.randperm(5 * each + 5, generator=torch.Generator().manual_seed(0))
    return keys, values, order.to(place[0]).view(5, each + 1)[:, :each]


def masked(positions: Tensor, columns: int, window: int | None) -> Tensor:
    """Columns up to each position, within the window: [rows, 1, tokens, columns]."""
    column = torch.arange(columns, device=positions.device)
    mask = column <= positions[..., None]
    if window is not None:
        mask &= column > positions[..., None] - window
    return mask[:, None]


def attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """In float64, over keys and values laid out for each row; heads in groups of three."""
    rows = (one[:, table].flatten(2, 3).transpose(0, 1).repeat_interleave(3, 1).double() for one in (keys, values))
    return functional.scaled_dot_product_attention(q.double(), *rows, mask, scale=0.3).transpose(1, 2).to(q.dtype)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("each", "positions"),
    [(9, [0, 3, 89, 63, 64]), (150, [127, 128, 1023, 1024, 1499])],  # pieces of 128 columns; of 128 and of 256
)
def test_store_and_attend(place: Place, window: int | None, each: int, positions: list[int]) -> None:
    keys, values, table = laid(place, each)
    k, v, q = drawn(place, 5, 2, 1, 24), drawn(place, 5, 2, 1, 24, seed=1), drawn(place, 5, 6, 1, 24)
    at = torch.tensor(positions, device=place[0])
    page = table[torch.arange(5, device=place[0]), at // 10]
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[:, page, at % 10] = k[:, :, 0].transpose(0, 1)
    wanted_values[:, page, at % 10] = v[:, :, 0].transpose(0, 1)
    fused.store(k, v, keys, values, at[:, None], table)
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
    mask = masked(at[:, None], 10 * each, window)
    assert fused.attends(q, keys, values, mask)
    found = fused.attend(q, keys, values, table, mask, at, 0.3)
    close(found, attention(q, keys, values, table, mask))
    assert fused.attend(1e3 * q, keys, values, table, mask, at, 0.3).isfinite().all()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_store_a_prompt(place: Place) -> None:
    """Places count through all pages; heads lie as a linear leaves them, and as a rotation does."""
    keys, values, _ = laid(place, 4)
    k, v = drawn(place, 3, 7, 2, 24).transpose(1, 2), drawn(place, 3, 2, 7, 24, seed=1)
    at = torch.randperm(250, generator=torch.Generator().manual_seed(0))[:21].view(3, 7).to(place[0])
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys.view(2, -1, 24)[:, at] = k.transpose(0, 1)
    wanted_values.view(2, -1, 24)[:, at] = v.transpose(0, 1)
    assert fused.stores(k, v)
    assert not fused.stores(k, v[:, :, :3])
    assert not fused.stores(k[..., ::2], v[..., ::2])
    fused.store(k, v, keys, values, at)
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("rows", [8, 9, 33, 129])
def test_columns_are_cut_otherwise_for_more_rows(place: Place, rows: int) -> None:
    """Of one column, and of more than a step takes; each row has the same 20 pages, in an order of its own."""
    keys, values = (drawn(place, 1, 20, 10, 24, seed=seed) for seed in (0, 1))
    draw = torch.Generator().manual_seed(rows)
    table = torch.stack([torch.randperm(20, generator=draw) for _ in range(rows)]).to(place[0])
    at = torch.randint(0, 200, (rows,), generator=draw).to(place[0])
    at[:3] = torch.tensor([0, 63, 199])
    q = drawn(place, rows, 3, 1, 24)
    mask = masked(at[:, None], 200, None)
    found = fused.attend(q, keys, values, table, mask, at, 0.3)
    close(found, attention(q, keys, values, table, mask))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("tokens", [1, 70])
def test_attend_to_pages_of_a_prompt(place: Place, window: int | None, tokens: int) -> None:
    """Pieces that begin anywhere; of shorter ones the rest stands at their last position."""
    keys, values, table = laid(place, 20)
    q = drawn(place, 5, tokens, 6, 24).transpose(1, 2)
    at = torch.tensor([0, 3, 60, 64, 130], device=place[0])[:, None] + torch.arange(tokens, device=place[0])
    at[1, 30:] = at[1, min(29, tokens - 1)]
    mask = masked(at, 200, window)
    assert fused.attends(q, keys, values, mask)
    found = fused.attend(q, keys, values, table, mask, at, 0.3)
    assert found.shape == (5, tokens, 6, 24)
    assert fused.attend(1e3 * q, keys, values, table, mask, at, 0.3).isfinite().all()
    close(found, attention(q, keys, values, table, mask))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "grid"), [(2, 40, "minmax"), (3, 8, "symmetric"), (4, 16, "midrise"), (1, 40, "minmax")]
)
def test_lookup(place: Place, bits: int, group: int, grid: GridKind) -> None:
    vocabulary, size, slots = 20, 40, 3
    weight = drawn(place, vocabulary, size)
    tables, address = [], [[0] * 4]
    for slot in range(1, slots):
        spec = PackedSpec(7 + slot, size, bits, Sparsity.parse("dense"), group, grid)
        draw = torch.Generator().manual_seed(slot)
        parts = {}
        for name, (dtype, shape) in packed.part_shapes(spec, storage=False).items():
            high = 1 << bits if name == "zeros" else 256
            made = torch.rand(shape, generator=draw) if name == "scales" else torch.randint(high, shape, generator=draw)
            parts[name] = made.to(dtype).to(place[0])
        rank = torch.full((vocabulary,), -1, dtype=torch.int32)
        rank[torch.randperm(vocabulary, generator=draw)[: spec.rows]] = torch.arange(spec.rows, dtype=torch.int32)
        tables.append((spec, parts, rank.to(place[0])))
        held = parts | {"rank": tables[-1][2]}
        address.append([held[n].data_ptr() if n in held else 0 for n in ("codes", "scales", "zeros", "rank")])
    pointers = torch.tensor(address, device=place[0])
    ids = torch.arange(15, device=place[0])
    index = torch.tensor([0, 1, 2], device=place[0])
    found = fused.lookup(ids, index, weight, pointers, tables[0][0], torch.bfloat16)
    wanted = weight[ids].clone()
    for slot, (spec, parts, rank) in enumerate(tables, start=1):
        delta = packed.decode(spec, parts)
        for row in range(5 * slot, 5 * slot + 5):
            if (at := int(rank[ids[row]])) >= 0:
                wanted[row] = (wanted[row].float() + delta[at]).to(torch.bfloat16).to(place[1])
    if place[0] == "cuda":
        assert torch.equal(found, wanted)
    else:  # the interpreter cuts bf16 off instead of rounding
        assert float((found - wanted).abs().max()) <= 2**-7 * float(wanted.abs().max())
