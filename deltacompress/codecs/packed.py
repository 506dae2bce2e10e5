"""The packed format: what obs and rtn write, and what kernels read. docs/formats.md shows it bit by bit.

Serving layout, one set of parts per tensor [rows, columns]:
    codes    u8 [rows, ...]  b-bit codes of the kept weights, rows start on a byte (flat for unstructured patterns)
    pattern  u8 [rows, ...]  which weights are kept; absent when dense
    scales   bf16 [rows, groups]
    zeros    u8 [rows, groups]  zero points, grid minmax only
    values   bf16 instead of codes, scales and zeros when bits is 16
    row_mask u8 [ceil(rows / 8)]  optional: bit r set = row r is stored; the others decode to zero
Storage layout (an entropy coder follows): codes and pattern become the symbols of numerics/symbols.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltacompress.errors import FormatError
from deltacompress.numerics import packing, ragged, symbols
from deltacompress.numerics.grid import Grid, GridKind, constant_zero
from deltacompress.numerics.sparsity import Sparsity

Parts = dict[str, Tensor]
FREE = -1


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """How to read the parts of one tensor. rows: the stored rows, all of them unless row_mask says otherwise."""

    rows: int
    columns: int
    bits: int
    sparsity: Sparsity
    group: int
    grid: GridKind

    def to_json(self) -> dict[str, Any]:
        """The `params` of the manifest."""
        return {"bits": self.bits, "sparsity": str(self.sparsity), "group_size": self.group, "grid": self.grid,
                "rows": self.rows, "columns": self.columns}  # fmt: skip

    @classmethod
    def from_json(cls, params: dict[str, Any], where: str) -> PackedSpec:
        """Inverse of to_json, checked.

        Raises:
            FormatError: a field is missing, unknown or out of range.
        """
        try:
            spec = cls(
                rows=int(params["rows"]),
                columns=int(params["columns"]),
                bits=int(params["bits"]),
                sparsity=Sparsity.parse(params["sparsity"]),
                group=int(params["group_size"]),
                grid=params["grid"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{where}: bad parameters of the packed format ({error})") from error
        sane = spec.rows >= 0 and spec.columns > 0 and spec.group > 0 and spec.bits in (1, 2, 3, 4, 8, 16)
        if not sane or spec.grid not in ("minmax", "symmetric", "midrise"):
            raise FormatError(f"{where}: parameters of the packed format out of range: {params}")
        return spec

    @property
    def groups(self) -> int:
        """Column groups that have a scale of their own."""
        return -(-self.columns // self.group)

    @property
    def padded(self) -> int:
        """Columns up to a whole number of n:m groups; the extra ones are never kept weights with a value."""
        return -(-self.columns // self.sparsity.m) * self.sparsity.m if self.sparsity.kind == "n:m" else self.columns

    @property
    def kept(self) -> int:
        """Weights kept in each row: of a dense or n:m pattern."""
        return self.padded * self.sparsity.n // self.sparsity.m if self.sparsity.kind == "n:m" else self.columns

    @property
    def is_24(self) -> bool:
        """Whether the pattern is stored as 2-bit positions."""
        return (self.sparsity.n, self.sparsity.m) == (2, 4)

    @property
    def has_zero_code(self) -> bool:
        """Whether some code means exactly zero (so that a kept zero can be told from others)."""
        return self.bits != 16 and self.grid != "midrise"


def pack(spec: PackedSpec, *, codes: Tensor, mask: Tensor, grid: Grid) -> Parts:
    """Parts in the serving layout of codes u8 and mask bool [rows, columns]."""
    parts: Parts = {"scales": grid.scale.to(torch.bfloat16)}
    if spec.grid == "minmax":
        parts["zeros"] = grid.zero.to(torch.uint8)
    if spec.sparsity.kind == "dense":
        return parts | {"codes": packing.pack_codes(codes, spec.bits)}
    pad = (0, spec.padded - spec.columns)
    zero = torch.nn.functional.pad(_zero_codes(spec, parts), pad)
    codes, mask = torch.nn.functional.pad(codes, pad), torch.nn.functional.pad(mask, pad)
    if spec.has_zero_code and spec.is_24:
        # a kept zero may stand anywhere: choosing its place by rule is what makes the storage layout exact
        mask, codes = symbols.canonical_pairs(mask & (codes != zero)), torch.where(mask, codes, zero)
    elif spec.has_zero_code and spec.sparsity.kind == "unstructured":
        mask = mask & (codes != zero)
    elif spec.padded != spec.columns:
        mask = _complete(mask, spec)
    return parts | _with_pattern(spec, mask, lambda kept: packing.pack_codes(kept, spec.bits), codes)


def pack_values(spec: PackedSpec, *, values: Tensor, mask: Tensor) -> Parts:
    """Parts of 16-bit values f32 [rows, columns]."""
    half = values.to(torch.bfloat16)
    if spec.sparsity.kind == "dense":
        return {"values": half}
    pad = (0, spec.padded - spec.columns)
    mask = _complete(torch.nn.functional.pad(mask, pad), spec)
    parts = _with_pattern(spec, mask, lambda kept: kept, torch.nn.functional.pad(half, pad))
    return {"pattern": parts["pattern"], "values": parts["codes"]}


def unpack_levels(spec: PackedSpec, parts: Parts) -> tuple[Tensor, Tensor, Grid]:
    """(codes u8, mask bool, grid) of parts in the serving layout; codes of pruned weights are meaningless."""
    scale = parts["scales"].float()
    if spec.grid == "minmax":
        zero = parts["zeros"].float()
    else:
        zero = torch.full_like(scale, constant_zero(spec.grid, spec.bits))
    grid = Grid(spec.bits, spec.group, scale, zero)
    if spec.sparsity.kind == "dense":
        codes = packing.unpack_codes(parts["codes"], spec.bits, spec.columns)
        return codes, torch.ones_like(codes, dtype=torch.bool), grid
    mask = _mask(spec, parts["pattern"])
    codes = torch.zeros_like(mask, dtype=torch.uint8)
    codes[mask] = _kept_codes(spec, parts["codes"], mask)
    return codes[:, : spec.columns], mask[:, : spec.columns], grid


def decode(spec: PackedSpec, parts: Parts) -> Tensor:
    """Values f32 [rows, columns] of the stored rows.

    Each value is one fp32 subtraction and one fp32 product, so every IEEE machine gets the same bits; what is pruned is
    +0.0.
    """
    if spec.bits == 16:
        if spec.sparsity.kind == "dense":
            return parts["values"].float()
        mask = _mask(spec, parts["pattern"])
        values = torch.zeros(mask.shape, device=mask.device)
        values[mask] = parts["values"].flatten().float()
        return values[:, : spec.columns].contiguous()
    codes, mask, grid = unpack_levels(spec, parts)
    scale, zero = grid.columns(0, spec.columns)
    return codes.float().sub_(zero).mul_(scale).masked_fill_(~mask, 0.0)


def to_storage(spec: PackedSpec, parts: Parts) -> Parts:
    """Serving layout -> storage layout (where there is one; else the parts as they are)."""
    if not _has_storage_layout(spec):
        return parts
    codes, mask, _ = unpack_levels(spec, parts)
    rest = {name: part for name, part in parts.items() if name not in ("codes", "pattern")}
    if spec.sparsity.kind == "dense":
        return rest | {"symbols": symbols.dense_to_symbols(codes, _zero_codes(spec, parts), spec.bits)}
    pad = (0, spec.padded - spec.columns)
    zero = torch.nn.functional.pad(_zero_codes(spec, parts), pad)
    codes, mask = torch.nn.functional.pad(codes, pad), torch.nn.functional.pad(mask, pad)
    codes[:, spec.columns :] = zero[:, spec.columns :]
    return rest | symbols.pairs_to_symbols(codes, zero, mask, spec.bits)


def to_serving(spec: PackedSpec, parts: Parts, where: str) -> Parts:
    """Inverse of to_storage.

    Raises:
        FormatError: the parts do not fit each other.
    """
    if not _has_storage_layout(spec):
        return parts
    rest = {name: part for name, part in parts.items() if name not in ("symbols", "groups", "nonzero")}
    if spec.sparsity.kind == "dense":
        codes = symbols.symbols_to_dense(parts["symbols"], _zero_codes(spec, parts), spec.bits, spec.columns)
        return rest | {"codes": packing.pack_codes(codes, spec.bits)}
    zero = torch.nn.functional.pad(_zero_codes(spec, parts), (0, spec.padded - spec.columns))
    try:
        codes, mask = symbols.symbols_to_pairs(parts, zero, spec.bits, spec.padded)
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from error
    return rest | _with_pattern(spec, mask, lambda kept: packing.pack_codes(kept, spec.bits), codes)


def check_parts(spec: PackedSpec, parts: Parts, *, storage: bool, where: str) -> None:
    """Make sure that `parts` (of the storage or the serving layout) are those that `spec` means, before they decode.

    Raises:
        FormatError: a part is missing, not of this format, or has another dtype or shape.
    """
    found = {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}
    check_shapes(spec, found, storage=storage, where=where)


def check_shapes(
    spec: PackedSpec, parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, storage: bool, where: str
) -> None:
    """As check_parts, of the dtypes and shapes of parts; raises the same."""
    shapes = part_shapes(spec, storage=storage)
    extra = {"row_mask", "added_rows"}  # of any packed tensor; they must fit the whole tensor, which is not known here
    if odd := (shapes.keys() - parts.keys()) | (parts.keys() - shapes.keys() - extra):
        raise FormatError(f"{where}: part {min(odd)} is missing or does not belong to {spec.to_json()}")
    for name, (dtype, shape) in shapes.items():
        found, sizes = parts[name]
        fits = len(sizes) == len(shape) and all(want in (FREE, size) for size, want in zip(sizes, shape, strict=True))
        if found != dtype or not fits:
            raise FormatError(f"{where}: part {name} is {found} {list(sizes)}, expected {dtype} {list(shape)}")


def part_shapes(spec: PackedSpec, *, storage: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape that each part must have; FREE stands for a length that depends on the data."""
    rows, byte = spec.rows, torch.uint8
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if spec.bits != 16:
        shapes["scales"] = (torch.bfloat16, (rows, spec.groups))
        if spec.grid == "minmax":
            shapes["zeros"] = (byte, (rows, spec.groups))
    if storage and _has_storage_layout(spec):
        if spec.sparsity.kind == "dense":
            shapes["symbols"] = (byte, (rows, packing.packed_width(spec.columns, symbols.STORED_BITS[spec.bits])))
        elif spec.bits == 2:
            shapes["symbols"] = (byte, (rows, spec.padded // 4))
        else:
            shapes["groups"] = (byte, (rows, packing.packed_width(spec.padded, 1)))
            shapes["nonzero"] = (byte, (FREE,))
        return shapes
    values, dtype = ("values", torch.bfloat16) if spec.bits == 16 else ("codes", byte)
    if spec.sparsity.kind == "unstructured":
        shapes[values] = (dtype, (FREE,))
    else:
        count = spec.kept
        shapes[values] = (dtype, (rows, count if spec.bits == 16 else packing.packed_width(count, spec.bits)))
    if spec.sparsity.kind != "dense":
        width = packing.packed_width(spec.padded // 4, 4) if spec.is_24 else packing.packed_width(spec.padded, 1)
        shapes["pattern"] = (byte, (rows, width))
    return shapes


def _has_storage_layout(spec: PackedSpec) -> bool:
    if spec.sparsity.kind == "dense":
        return spec.has_zero_code or spec.bits == 3
    return spec.is_24 and spec.has_zero_code


def _zero_codes(spec: PackedSpec, parts: Parts) -> Tensor:
    """Zero point of each column as a code u8 [rows, columns]; 0 where no code means zero."""
    if spec.grid == "minmax":
        index = torch.arange(spec.columns, device=parts["zeros"].device) // spec.group
        return parts["zeros"][:, index]
    code = int(constant_zero(spec.grid, spec.bits)) if spec.has_zero_code else 0
    return torch.full((spec.rows, spec.columns), code, dtype=torch.uint8, device=parts["scales"].device)


def _with_pattern(spec: PackedSpec, mask: Tensor, write: Any, codes: Tensor) -> Parts:
    if spec.is_24:
        pattern = packing.pack_pairs(packing.mask_to_pairs(mask))
    else:
        pattern = packing.pack_codes(mask.to(torch.uint8), 1)
    if spec.sparsity.kind == "unstructured":
        kept = codes[mask]
        whole = codes.dtype != torch.uint8  # 16-bit values
        return {"pattern": pattern, "codes": kept if whole else ragged.pack_ragged(kept, mask.sum(1), spec.bits)}
    return {"pattern": pattern, "codes": write(codes[mask].view(spec.rows, spec.kept))}


def _mask(spec: PackedSpec, pattern: Tensor) -> Tensor:
    if spec.is_24:
        return packing.pairs_to_mask(packing.unpack_pairs(pattern, spec.padded // 4))
    mask = packing.unpack_codes(pattern, 1, spec.padded).bool()
    n, m = spec.sparsity.n, spec.sparsity.m
    if spec.sparsity.kind == "n:m" and bool((mask.view(spec.rows, spec.padded // m, m).sum(-1) != n).any()):
        raise ValueError(f"the pattern does not keep exactly {n} of every {m}")
    return mask


def _kept_codes(spec: PackedSpec, packed: Tensor, mask: Tensor) -> Tensor:
    """Codes of the kept weights, flat, in row order."""
    if spec.sparsity.kind != "unstructured":
        return packing.unpack_codes(packed, spec.bits, spec.kept).flatten()
    return ragged.unpack_ragged(packed, mask.sum(1), spec.bits)


def _complete(mask: Tensor, spec: PackedSpec) -> Tensor:
    """Let padding columns fill up a ragged last n:m group, so that every group keeps exactly n."""
    if spec.sparsity.kind != "n:m" or spec.padded == spec.columns:
        return mask
    mask = mask.clone()
    tail = mask[:, -spec.sparsity.m :]
    missing = spec.sparsity.n - tail.sum(1, keepdim=True)
    free = ~tail
    free[:, : spec.sparsity.m - (spec.padded - spec.columns)] = False
    tail |= free & (free.cumsum(1) <= missing)
    return mask
