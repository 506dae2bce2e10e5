"""What is whose: cuts together are the whole, and a part of a packed delta decodes to that part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import Pair

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.errors import InputError, UnsupportedModelError
from deltacompress.numerics.grid import Grid
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.runtime.parallel.parts.checkpoint import PartOfCheckpoint
from deltacompress.runtime.parallel.parts.cut import Cut
from deltacompress.runtime.parallel.parts.packed import part_of_packed
from deltacompress.runtime.parallel.parts.split import Split
from deltacompress.runtime.variants.layout import read_layout

LAYERS = ["llama", "qwen2", "qwen2-tied", "qwen3", "phi3", "mistral", "gemma2", "gemma3"]
CUTS = [(176, 32, (32, 4, 8, 4)), (128, 32, (32,) * 4), (64, 64, (16,) * 4)]
"""Columns, of a group, and of a group of each rank."""
TWO_OF_FOUR, DENSE = Sparsity("n:m", 2, 4), Sparsity("dense")


def random_packed(spec: PackedSpec) -> packed.Parts:
    draw = torch.Generator().manual_seed(spec.bits)
    shape = (spec.rows, spec.columns)
    codes = torch.randint(1 << spec.bits, shape, generator=draw).to(torch.uint8)
    mask = torch.ones(shape, dtype=torch.bool)
    if spec.is_24:
        order = torch.rand(spec.rows, spec.columns // 4, 4, generator=draw).argsort(-1)
        mask = (order < 2).view(shape)
    scale = torch.rand(spec.rows, spec.groups, generator=draw).bfloat16().float() + 0.5
    zero = torch.randint(1 << spec.bits, (spec.rows, spec.groups), generator=draw).float()
    return packed.pack(spec, codes=codes, mask=mask, grid=Grid(spec.bits, spec.group, scale, zero))


@pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, DENSE], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("grid", ["symmetric", "minmax"])
@pytest.mark.parametrize(("columns", "group", "groups"), CUTS)
def test_columns_of_a_packed_delta(
    sparsity: Sparsity, bits: int, grid: str, columns: int, group: int, groups: tuple[int, ...]
) -> None:
    """A quarter of 176 columns begins at 44, amid a group of 32, as a quarter of 11008 does at 2752 amid one of 128."""
    spec = PackedSpec(6, columns, bits, sparsity, group, grid)  # type: ignore[arg-type]
    parts = random_packed(spec)
    whole = packed.decode(spec, parts)
    for rank in range(4):
        begin, end = columns * rank // 4, columns * (rank + 1) // 4
        own, found = part_of_packed(spec, parts, Cut(1, ((begin, end),), end - begin))
        packed.check_parts(own, found, storage=False, where="part")
        assert (own.rows, own.columns, own.group) == (6, end - begin, groups[rank])
        assert torch.equal(packed.decode(own, found), whole[:, begin:end])


def test_the_mlp_of_a_7b_llama() -> None:
    spec = PackedSpec(2, 11008, 2, TWO_OF_FOUR, 128, "symmetric")
    parts = random_packed(spec)
    whole, sizes = packed.decode(spec, parts), []
    for rank in range(4):
        begin = 2752 * rank
        own, found = part_of_packed(spec, parts, Cut(1, ((begin, begin + 2752),), 2752))
        assert torch.equal(packed.decode(own, found), whole[:, begin : begin + 2752])
        sizes.append(own.group)
    assert sizes == [128, 64, 128, 64]  # 64 is what kernels take, and doubles scales alone


@pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, DENSE], ids=str)
def test_rows_of_a_packed_delta(sparsity: Sparsity) -> None:
    """Of several ranges; rows that are not there decode to zero, in patterns that kernels can read."""
    spec = PackedSpec(10, 16, 4, sparsity, 8, "symmetric")
    parts = random_packed(spec)
    whole = packed.decode(spec, parts)
    own, found = part_of_packed(spec, parts, Cut(0, ((1, 3), (6, 9)), 5))
    assert torch.equal(packed.decode(own, found), torch.cat([whole[1:3], whole[6:9]]))
    own, found = part_of_packed(spec, parts, Cut(0, ((8, 12),), 4))
    packed.check_parts(own, found, storage=False, where="part")
    assert torch.equal(packed.decode(own, found), torch.cat([whole[8:], torch.zeros(2, 16)]))


def test_groups_of_four_stay_whole() -> None:
    spec = PackedSpec(2, 24, 4, TWO_OF_FOUR, 8, "symmetric")
    with pytest.raises(ValueError, match="columns 6 to 12 are no whole groups of four"):
        part_of_packed(spec, random_packed(spec), Cut(1, ((6, 12),), 6))
    with pytest.raises(ValueError, match="pattern"):
        part_of_packed(replace(spec, sparsity=Sparsity("unstructured", 0, 0, 0.5)), {}, Cut(0, ((0, 1),), 1))


def test_a_cut() -> None:
    matrix = torch.arange(12).view(4, 3)
    assert Cut(0, ((1, 2), (3, 9)), 3).of(matrix).tolist() == [[3, 4, 5], [9, 10, 11], [0, 0, 0]]
    assert Cut(1, ((1, 3),), 3).of(matrix)[0].tolist() == [1, 2, 0]
    assert Cut(0, (), 2).of(matrix).tolist() == [[0] * 3] * 2
    assert Cut(0, ((2, 4), (6, 7)), 5).places(torch.tensor([1, 2, 3, 4, 6])).tolist() == [-1, 0, 1, -1, 2]
    assert Cut(1, ((1, 3),), 2).shape((4, 3)) == (4, 2)


@pytest.mark.parametrize("architecture", LAYERS)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_are_the_whole(make_pair: Callable[..., Pair], architecture: str, size: int) -> None:
    """Each weight is with some rank, once (keys and values of few heads more often), and sizes are equal."""
    checkpoint = Checkpoint.open(make_pair(architecture).base)
    layout = read_layout(checkpoint.path, checkpoint.tensors)
    splits = [Split.of(layout, rank, size, checkpoint.path) for rank in range(size)]
    parts = [PartOfCheckpoint(checkpoint, layout, split) for split in splits]
    for path, place in layout.places.items():
        whole, cut = checkpoint.read(place.name), splits[0].cut(path)
        pieces = [part.read(place.name) for part in parts]
        assert len({tuple(piece.shape) for piece in pieces}) == 1
        assert all(parts[0].tensors[place.name].shape == piece.shape for piece in pieces)
        assert parts[0].tensors[place.name].nbytes == pieces[0].nbytes
        if cut is None:
            assert place.kind == "norm"
            assert all(torch.equal(piece, whole) for piece in pieces)
        elif path.endswith((".o_proj.bias", ".down_proj.bias")):
            assert torch.equal(torch.stack(pieces).sum(0), whole)
        elif "qkv_proj" in path or "gate_up_proj" in path or (size == 4 and {"k_proj", "v_proj"} & {*path.split(".")}):
            assert rows_of(*pieces) == rows_of(whole)
        else:
            joined = torch.cat(pieces, cut.dim)
            assert torch.equal(joined[: whole.shape[0]], whole)
            assert not joined[whole.shape[0] :].any()


def rows_of(*tensors: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row.tolist()) for one in tensors for row in one.view(one.shape[0], -1)}


def test_heads_and_their_keys_are_with_one_rank() -> None:
    """4 heads over 2 key-value heads: ranks 0 and 1 have the first of these, 2 and 3 the second."""
    for rank in range(4):
        split = Split(rank, 4, heads=4, kv_heads=2, head_dim=8, width=48, vocabulary=97, hidden=32)
        queries, keys = split.cut("x.q_proj.weight"), split.cut("x.k_proj.weight")
        assert queries is not None
        assert keys is not None
        assert queries.ranges == ((8 * rank, 8 * rank + 8),)
        assert keys.ranges == ((8 * (rank // 2), 8 * (rank // 2) + 8),)
        tokens = split.cut("lm_head.weight")
        assert tokens is not None
        assert (tokens.ranges, tokens.size) == (((25 * rank, min(25 * rank + 25, 97)),), 25)
    fused = split.cut("x.qkv_proj.weight")
    assert fused is not None
    assert (fused.ranges, fused.size) == (((24, 32), (32 + 8, 32 + 16), (48 + 8, 48 + 16)), 24)


def test_what_does_not_divide(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    base = Checkpoint.open(make_pair("llama").base)
    layout = read_layout(base.path, base.tensors)
    told = "tp 3: 4 heads, 2 key-value heads and an MLP of 48 do not divide by it; give one of 1, 2, 4"
    with pytest.raises(InputError, match=told):
        Split.of(layout, 0, 3, base.path)
    other = Checkpoint.open(make_pair("gpt-neox").base)
    with pytest.raises(UnsupportedModelError, match=r"split model type 'gpt_neox' is not known .*; leave out tp"):
        Split.of(read_layout(other.path, other.tensors), 0, 2, other.path)
    assert [size for size in range(1, 13) if Split(0, 1, 12, 3, 8, 48, 96, 32).divides(size)] == [1, 3, 6, 12]
    assert not Split(0, 1, 12, 12, 8, 50, 96, 32).divides(4)
    split = Split(0, 2, 4, 2, 8, 48, 96, 32)
    with pytest.raises(UnsupportedModelError, match=r"how to split x\.c_fc\.weight is not known"):
        split.cut("x.c_fc.weight")
