"""The kernel layout of the CUDA backend: serving parts, re-tiled so that a warp's lanes load 16 bytes each and hold,
without any exchange, the operand that the matrix instruction wants.

A matrix is cut into 128 rows (m) and blocks of 64 columns (2:4) or 32 (dense); of 2:4 rows only the kept half
counts, so a block always has 32 codes in a row. Padding decodes to values that meet zeros. The buffer, every section on
256 bytes:

    scales   [m][set][384]  for each group of columns (one `set` for whole rows): 128 bf16 scales, then 128 doubled zero
             points u8, both in the order [g 8][t 8][h 2] of row 16 t + 8 h + g
    blocks   [m][block][chunk][lane 32][16 bytes]; lane 4 g + c holds, of tile t, rows g and g + 8 (h = 0, 1), in step s
             the kept columns 16 s + 8 p + 2 c + e. The words of a lane, four to a chunk:
               4 bits  word 2 t + s, bit 16 e + 8 p + 4 h
               2 bits  word t, bit 16 e + 8 s + 4 p + 2 h
               1 bit   word t // 2, bit 16 e + 8 (t % 2) + 4 s + 2 h + p
               3 bits  the words of the low two bits, then those of the third bit
               2:4     then word t of the pattern: 16 bits of row g, 16 of row g + 8, of columns 16 c .. 16 c + 15
Blocks come in pairs: a pair is one pipeline stage.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.errors import BackendError, FormatError
from deltacompress.kernels.parts import align
from deltacompress.numerics.bits import packing

ROWS = 128
SET_BYTES = 384
BAD_PATTERN, BAD_SCALE, BAD_ZERO = 1, 2, 3
FAULTS = {
    BAD_PATTERN: "a 2:4 pattern holds a nibble that is not two rising positions",
    BAD_SCALE: "a packed scale is not a finite number",
    BAD_ZERO: "a zero point is not a code of its number of bits",
}
"""What can be wrong in parts of the right shapes."""
_CODES = 32  # of one row in one block
_EMPTY = 0x44  # two groups of four that keep columns 0 and 1


def supported(spec: PackedSpec) -> bool:
    """1 to 4 bits, dense or 2:4, scales of whole rows or of groups of a multiple of 16 columns."""
    pattern = spec.sparsity.kind == "dense" or spec.is_24
    return spec.bits <= 4 and pattern and (spec.groups == 1 or spec.group % 16 == 0)


def stage_columns(spec: PackedSpec) -> int:
    """Columns of a pair of blocks."""
    return 128 if spec.is_24 else 64


def block_bytes(spec: PackedSpec) -> int:
    """Bytes of one block."""
    return (4 * spec.bits + (8 if spec.is_24 else 0)) * 4 * 32


def tiled_bytes(spec: PackedSpec) -> int:
    """Bytes of the buffer."""
    m, blocks = counts(spec)
    return align(m * spec.groups * SET_BYTES) + align(m * blocks * block_bytes(spec))


def tile(spec: PackedSpec, parts: Parts) -> Tensor:
    """Serving parts -> u8 [tiled_bytes(spec)], on the device that the parts are on.

    Raises:
        BackendError: a format that the kernels do not read.
        FormatError: a pattern, zero point or scale that no writer of the format makes.
    """
    if not supported(spec):
        raise BackendError(f"the cuda backend does not read {spec.to_json()}: use the reference backend for it")
    m, blocks = counts(spec)
    codes = packing.unpack_codes(parts["codes"], spec.bits, spec.kept)
    codes = pad(codes, (0, blocks * _CODES - spec.kept, 0, m * ROWS - spec.rows))
    #            m  t  h  g  block   s  p  c  e
    codes = codes.view(m, 8, 2, 8, blocks, 2, 2, 4, 2)
    words = [_three_bits(codes) if spec.bits == 3 else _words(codes, spec.bits)]
    if spec.is_24:
        words.append(_pattern_words(spec, parts["pattern"], m, blocks))
    flat = torch.cat(words, 2)  # [m, block, word, lane, 4 bytes]
    flat = flat.view(m, blocks, -1, 4, 32, 4).transpose(3, 4).reshape(-1)
    out = flat.new_zeros(tiled_bytes(spec))
    scales = _scale_sets(spec, parts, m).flatten()
    out[: scales.numel()] = scales
    at = align(scales.numel())
    out[at : at + flat.numel()] = flat
    return out


def counts(spec: PackedSpec) -> tuple[int, int]:
    """(tiles of 128 rows, blocks of columns: an even number)."""
    return -(-spec.rows // ROWS), 2 * -(-spec.columns // stage_columns(spec))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes u8 [m, t, h, g, block, s, p, c, e] -> [m, block, word, lane, 4 bytes]; see the module."""
    m, _, _, _, blocks, *_ = codes.shape
    if bits == 4:
        order = codes.permute(0, 4, 1, 5, 3, 7, 8, 6, 2)  # [m, block, t, s, g, c, e, p | h]
    elif bits == 2:
        order = codes.permute(0, 4, 1, 3, 7, 8, 5, 6, 2)  # [m, block, t, g, c, e, s | p, h]
    else:
        split = codes.view(m, 4, 2, *codes.shape[2:])  # t = 2 t2 + t1
        order = split.permute(0, 5, 1, 4, 8, 9, 2, 6, 3, 7)  # [m, block, t2, g, c, e, t1 | s, h, p]
    fields = order.reshape(m, blocks, 4 * bits, 32, 4, 8 // bits)
    out = fields[..., 0].clone()
    for i in range(1, 8 // bits):
        out |= fields[..., i] << (bits * i)
    return out


def _three_bits(codes: Tensor) -> Tensor:
    return torch.cat([_words(codes & 3, 2), _words(codes >> 2, 1)], 2)


def _pattern_words(spec: PackedSpec, pattern: Tensor, m: int, blocks: int) -> Tensor:
    if spec.padded % 8:
        # the unused half of the last byte stands for a group that is not there
        pattern = torch.cat([pattern[:, :-1], pattern[:, -1:] | (_EMPTY & 0xF0)], 1)
    if bool((~_valid_bytes(pattern.device)[pattern.long()]).any()):
        raise FormatError(FAULTS[BAD_PATTERN])
    pattern = pad(pattern, (0, blocks * 8 - pattern.shape[1], 0, m * ROWS - spec.rows), value=_EMPTY)
    order = pattern.view(m, 8, 2, 8, blocks, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)  # [m, block, t, g, c, h, byte]
    return order.reshape(m, blocks, 8, 32, 4)


def _valid_bytes(device: torch.device) -> Tensor:
    """bool [256]: both nibbles are two rising positions."""
    nibble = torch.arange(16, device=device)
    rising = (nibble & 3) < (nibble >> 2)
    return (rising.unsqueeze(1) & rising).flatten()


def _scale_sets(spec: PackedSpec, parts: Parts, m: int) -> Tensor:
    """u8 [m, set, 384]."""
    scales = parts["scales"]
    if not bool(torch.isfinite(scales).all()):
        raise FormatError(FAULTS[BAD_SCALE])
    if spec.grid == "minmax":
        zeros = parts["zeros"]
        if bool((zeros >= 1 << spec.bits).any()):
            raise FormatError(FAULTS[BAD_ZERO])
        doubled = zeros * 2
    else:
        doubled = torch.full_like(scales, (1 << spec.bits) - (spec.grid == "midrise"), dtype=torch.uint8)
    extra = (0, 0, 0, m * ROWS - spec.rows)

    def arrange(part: Tensor) -> Tensor:
        ordered = pad(part, extra).view(m, 8, 2, 8, spec.groups).permute(0, 4, 3, 1, 2)  # [m, set, g, t, h]
        return ordered.reshape(m, spec.groups, 128).contiguous().view(torch.uint8)

    return torch.cat([arrange(scales), arrange(doubled)], 2)
