"""A part of a packed delta that is packed as the whole one is: its kernels take it as they take any.

A group of columns that a cut goes through has its scale on both sides. Where a part begins within a group, its groups
become as small as the way to the next one's beginning allows: 11008 columns over 4 ranks begin at 2752, in the middle
of a group of 128, so that groups of 64 have each scale twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.kernels import expand_rows
from deltacompress.numerics.bits import packing
from deltacompress.runtime.parallel.parts.cut import Cut


def part_of_packed(spec: PackedSpec, parts: Parts, cut: Cut) -> tuple[PackedSpec, Parts]:
    """Of a dense or 2:4 delta in the serving layout, with a row for each row of the base's weight.

    Raises:
        ValueError: the cut goes through a group of four.
    """
    if spec.bits == 16 or (spec.sparsity.kind != "dense" and not spec.is_24):
        raise ValueError(f"a part of {spec.bits} bits in pattern {spec.sparsity} cannot be told")
    return _rows(spec, parts, cut) if cut.dim == 0 else _columns(spec, parts, *cut.ranges[0])


def _rows(spec: PackedSpec, parts: Parts, cut: Cut) -> tuple[PackedSpec, Parts]:
    there = sum(min(end, spec.rows) - min(begin, spec.rows) for begin, end in cut.ranges)
    found = {name: replace(cut, size=there).of(part) for name, part in parts.items()}
    spec = replace(spec, rows=there)
    if there == cut.size:
        return spec, found
    mask = (torch.arange(cut.size) < there).to(torch.uint8)
    return expand_rows(spec, found, packing.pack_codes(mask[None], 1)[0], cut.size)


def _columns(spec: PackedSpec, parts: Parts, begin: int, end: int) -> tuple[PackedSpec, Parts]:
    if spec.is_24 and (begin % 4 or (end % 4 and end != spec.columns)):
        raise ValueError(f"columns {begin} to {end} are no whole groups of four")
    fours = begin // 4, -(-end // 4)
    found = {
        "codes": _fields(parts["codes"], spec.bits, *((2 * fours[0], 2 * fours[1]) if spec.is_24 else (begin, end)))
    }
    if spec.is_24:
        found["pattern"] = _fields(parts["pattern"], 4, *fours)
    group = end - begin if spec.groups == 1 else math.gcd(spec.group, begin)  # of 0 it is the whole group
    for name in ("scales", "zeros"):
        if name in parts:
            found[name] = _of_groups(parts[name], spec.group, group, begin, end)
    return replace(spec, columns=end - begin, group=group), found


def _fields(packed: Tensor, bits: int, begin: int, end: int) -> Tensor:
    """Of rows of so many bits each, those from begin to end (numerics/bits/packing.py)."""
    if begin * bits % 8 == 0 and (end * bits % 8 == 0 or -(-end * bits // 8) == packed.shape[1]):
        return packed[:, begin * bits // 8 : -(-end * bits // 8)].contiguous()  # whole bytes
    codes = packing.unpack_codes(packed, bits, packed.shape[1] * 8 // bits)
    return packing.pack_codes(codes[:, begin:end].contiguous(), bits)


def _of_groups(part: Tensor, whole: int, group: int, begin: int, end: int) -> Tensor:
    """[rows, groups of the columns from begin to end]; whole: columns of a group that there was."""
    starts = begin + group * torch.arange(-(-(end - begin) // group), device=part.device)
    return part[:, starts // whole].contiguous()
