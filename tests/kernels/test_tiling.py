"""The CUDA layout, read back lane by lane as its description says: needs no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.sbmm_cases import Case, decode64, random_parts
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.errors import BackendError, FormatError
from deltacompress.kernels.cuda import tiling
from deltacompress.numerics.sparsity import Sparsity


def read_back(spec: PackedSpec, buffer: Tensor) -> Tensor:
    """f64 [rows, columns] by walking over lanes, words and bits."""
    raw = buffer.numpy()
    m_tiles, width = -(-spec.rows // 128), tiling.stage_columns(spec) // 2
    blocks = 2 * -(-spec.columns // (2 * width))
    scales_end = -(-m_tiles * spec.groups * 384 // 256) * 256
    out = torch.zeros(m_tiles * 128, blocks * width, dtype=torch.float64)
    word_count = 4 * spec.bits + (8 if spec.is_24 else 0)
    for m in range(m_tiles):
        for block in range(blocks):
            at = scales_end + (m * blocks + block) * word_count * 128
            words = raw[at : at + word_count * 128].view("<u4").reshape(-1, 32, 4)  # chunk, lane, word in chunk

            def word(lane: int, index: int, words: object = words) -> int:
                return int(words[index // 4, lane, index % 4])  # type: ignore[index]

            for lane in range(32):
                g, c = divmod(lane, 4)
                for t in range(8):
                    for s in range(2):
                        for p in range(2):
                            for h in range(2):
                                row, pair = m * 128 + 16 * t + 8 * h + g, []
                                for e in range(2):
                                    f, one = 4 * s + 2 * p + h, 8 * (t % 2) + 4 * s + 2 * h + p
                                    if spec.bits == 4:
                                        code = word(lane, 2 * t + s) >> (16 * e + 8 * p + 4 * h) & 15
                                    elif spec.bits == 1:
                                        code = word(lane, t // 2) >> (16 * e + one) & 1
                                    else:
                                        code = word(lane, t) >> (16 * e + 2 * f) & 3
                                        if spec.bits == 3:
                                            code |= (word(lane, 8 + t // 2) >> (16 * e + one) & 1) << 2
                                    pair.append(code)
                                kept = 16 * s + 8 * p + 2 * c
                                columns = [block * width + kept, block * width + kept + 1]
                                if spec.is_24:
                                    group = kept // 2  # of four columns, in the block
                                    lanes_word = word(4 * g + group // 4, word_count - 8 + t)
                                    nibble = lanes_word >> (16 * h + 4 * (group % 4)) & 15
                                    first = block * width + 4 * group
                                    columns = [first + (nibble & 3), first + (nibble >> 2)]
                                for column, code in zip(columns, pair, strict=True):
                                    out[row, column] = code
                                    if column < spec.columns:
                                        where = (m * spec.groups + column // spec.group) * 384
                                        order = g * 16 + t * 2 + h
                                        scale = torch.from_numpy(raw[where : where + 256].copy()).view(torch.bfloat16)
                                        zero = int(raw[where + 256 + order]) / 2
                                        out[row, column] = (code - zero) * float(scale[order])
    return out[: spec.rows, : spec.columns]


@settings(max_examples=12, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 3, 4]),
    pattern=st.sampled_from(["dense", "2:4"]),
    grid=st.sampled_from(["minmax", "symmetric", "midrise"]),
    rows=st.sampled_from([1, 17, 130]),
    columns=st.sampled_from([4, 20, 64, 132]),
    group=st.sampled_from([16, 32, 128, 10_000]),
    seed=st.integers(0, 1000),
)
def test_every_lane_finds_its_weights(
    bits: int, pattern: str, grid: str, rows: int, columns: int, group: int, seed: int
) -> None:
    case = Case(rows, columns, bits, pattern, min(group, columns) if group > columns else group, grid)
    parts = random_parts(case, torch.Generator().manual_seed(seed))
    spec = case.spec()
    if not tiling.supported(spec):
        return
    buffer = tiling.tile(spec, parts)
    assert buffer.numel() == tiling.tiled_bytes(spec)
    torch.testing.assert_close(read_back(spec, buffer), decode64(spec, parts), rtol=0, atol=0)


def _parts() -> tuple[PackedSpec, Parts]:
    case = Case(8, 64, 2, "2:4", 32, "minmax")
    return case.spec(), random_parts(case, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("part", "value"), [("pattern", 0), ("zeros", 4), ("scales", float("nan"))])
def test_what_no_writer_makes_is_refused(part: str, value: float) -> None:
    spec, parts = _parts()
    parts[part][3, 0] = value
    with pytest.raises(FormatError):
        tiling.tile(spec, parts)


def test_other_formats_are_refused_by_name() -> None:
    spec = PackedSpec(8, 64, 4, Sparsity.parse("1:4"), 64, "minmax")
    with pytest.raises(BackendError, match="1:4"):
        tiling.tile(spec, {})
