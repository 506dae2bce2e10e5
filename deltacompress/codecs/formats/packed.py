"""The packed format: what obs and rtn write, and what kernels read. docs/formats.md shows it bit by bit.

Serving layout, one set of parts per tensor [rows, columns]:
    codes    u8 [rows, ...]  b-bit codes of the kept weights, rows start on a byte (flat for unstructured patterns)
    pattern  u8 [rows, ...]  which weights are kept; absent when dense, or drawn
    scales   bf16 [rows, groups]
    zeros    u8 [rows, groups]  zero points, grid minmax only
    values   bf16 instead of codes, scales and zeros when bits is 16
    row_mask u8 [ceil(rows / 8)]  optional: bit r set = row r is stored; the others decode to zero
Storage layout (an entropy coder follows): codes and pattern become the symbols of numerics/bits/symbols.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltacompress.codecs.formats.spec import FREE, PackedSpec, check_shapes
from deltacompress.codecs.formats.spec import part_shapes as stored_shapes
from deltacompress.errors import FormatError
from deltacompress.numerics.bits import packing, pairs, ragged, symbols
from deltacompress.numerics.bits.drawn import drawn_mask
from deltacompress.numerics.grid import Grid, constant_zero

__all__ = ["FREE", "PackedSpec", "Parts", "Stack", "check_parts", "decode", "drawn_pattern", "pack", "pack_values",
           "part_shapes", "to_serving", "to_storage", "unpack_levels"]  # fmt: skip

Parts = dict[str, Tensor]
_AT_A_TIME = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Weights whose codes are rearranged at once: with fewer a GPU waits for the host."""
_DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Stack:
    """Parts made some rows at a time, each put into its place: never there twice."""

    def __init__(self, rows: int) -> None:
        """rows: of the parts that are matrices, at most."""
        self._most, self._rows = rows, 0
        self._matrices: Parts = {}
        self._flat: dict[str, list[Tensor]] = {}

    def add(self, parts: Parts) -> None:
        """Put these below those that were added before; flat parts, whose length depends on the data, are chained."""
        end = self._rows
        for name, part in parts.items():
            if part.dim() == 2:
                if name not in self._matrices:
                    self._matrices[name] = part.new_empty(self._most, part.shape[1])
                end = self._rows + len(part)
                self._matrices[name][self._rows : end] = part
            else:
                self._flat.setdefault(name, []).append(part)
        self._rows = end

    def whole(self) -> Parts:
        """All of them."""
        matrices = {name: part[: self._rows] for name, part in self._matrices.items()}
        flat = {name: torch.cat(pieces) for name, pieces in self._flat.items()}
        return {name: part.clone() if self._rows < self._most else part for name, part in matrices.items()} | flat


def pack(spec: PackedSpec, *, codes: Tensor, mask: Tensor, grid: Grid) -> Parts:
    """Parts in the serving layout of codes u8 and mask bool [rows, columns], a drawn one as `drawn_pattern` has it."""
    parts: Parts = {"scales": grid.scale.to(torch.bfloat16)}
    if spec.grid == "minmax":
        parts["zeros"] = grid.zero.to(torch.uint8)
    if spec.sparsity.kind == "dense":
        return parts | {"codes": packing.pack_codes(codes, spec.bits)}
    codes, mask = _padded(spec, codes), _padded(spec, mask)
    if spec.sparsity.kind == "drawn":
        if spec.padded != spec.columns:
            mask = drawn_pattern(spec, codes.device)  # of the columns that are not there, too
        kept = codes[mask].view(spec.rows, spec.kept)
        return parts | {"codes": packing.pack_codes(kept, spec.bits)}
    zero = _padded(spec, _zero_codes(spec, parts))
    if spec.has_zero_code and spec.is_24:
        # a kept zero may stand anywhere: choosing its place by rule is what makes the storage layout exact
        zeroed = (codes - zero).mul_(mask).add_(zero)  # modulo 256; torch.where takes seven times as long on a CPU
        return parts | _with_pairs(spec, pairs.canonical_pairs(mask & (codes != zero)), zeroed)
    if spec.has_zero_code and spec.sparsity.kind == "unstructured":
        mask = mask & (codes != zero)
    elif spec.padded != spec.columns:
        mask = _complete(mask, spec)
    return parts | _with_pattern(spec, mask, lambda kept: packing.pack_codes(kept, spec.bits), codes)


def pack_values(spec: PackedSpec, *, values: Tensor, mask: Tensor) -> Parts:
    """Parts of 16-bit values f32 [rows, columns]."""
    half = values.to(torch.bfloat16)
    if spec.sparsity.kind == "dense":
        return {"values": half}
    mask = _complete(_padded(spec, mask), spec)
    parts = _with_pattern(spec, mask, lambda kept: kept, _padded(spec, half))
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
    if spec.is_24:
        kept = pairs.unpack_pairs(parts["pattern"], spec.padded // 4)
        codes, mask = pairs.spread(packing.unpack_codes(parts["codes"], spec.bits, spec.kept), kept)
    else:
        drawn = spec.sparsity.kind == "drawn"
        mask = drawn_pattern(spec, scale.device) if drawn else _mask(spec, parts["pattern"])
        codes = torch.zeros_like(mask, dtype=torch.uint8)
        # a GPU is not waited for, as codes[mask] would
        codes.masked_scatter_(mask, _kept_codes(spec, parts["codes"], mask))
    return codes[:, : spec.columns], mask[:, : spec.columns], grid


def drawn_pattern(spec: PackedSpec, device: torch.device) -> Tensor:
    """Of a drawn one, bool [rows, padded columns]."""
    n, m = spec.sparsity.n, spec.sparsity.m
    return drawn_mask(n, m, spec.rows, spec.padded, seed=spec.seed, first=spec.first, device=device)


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
        if spec.sparsity.kind == "unstructured" and int(mask.sum()) != parts["values"].numel():
            raise ValueError("the values are not as many as the pattern says")
        values.masked_scatter_(mask, parts["values"].float())
        return values[:, : spec.columns].contiguous()
    codes, mask, grid = unpack_levels(spec, parts)
    scale, zero = grid.columns(0, spec.columns)
    return codes.float().sub_(zero).mul_(scale).masked_fill_(~mask, 0.0)


def to_storage(spec: PackedSpec, parts: Parts) -> Parts:
    """Serving layout -> storage layout (where there is one; else the parts as they are)."""
    if not spec.has_storage_layout:
        return parts
    rest = {name: part for name, part in parts.items() if name not in ("codes", "pattern")}
    stack = Stack(spec.rows)
    for block in _symbols_of_blocks(spec, {name: part for name, part in parts.items() if part.dim() == 2}):
        stack.add(block)
    found = stack.whole()
    if "nonzero" in found:
        found["nonzero"] = symbols.pack_nonzero(found["nonzero"], spec.bits)
    return rest | found


def _symbols_of_blocks(spec: PackedSpec, parts: Parts) -> Iterator[Parts]:
    """What becomes of codes and pattern, some rows at a time, so that little is unpacked at once."""
    step = max(_AT_A_TIME[parts["codes"].device.type] // spec.padded, 1)
    for begin in range(0, max(spec.rows, 1), step):
        some = {name: part[begin : begin + step] for name, part in parts.items()}
        block = replace(spec, rows=min(step, spec.rows - begin))
        codes, mask, _ = unpack_levels(block, some)
        zero = _zero_codes(block, some)
        if spec.masked:
            yield symbols.dense_to_masked(codes, zero, spec.bits)
            continue
        if spec.sparsity.kind == "dense":
            yield {"symbols": symbols.dense_to_symbols(codes, zero, spec.bits)}
            continue
        codes, zero, mask = (_padded(spec, one) for one in (codes, zero, mask))
        yield symbols.pairs_to_symbols(codes, zero, mask, spec.bits)


def to_serving(spec: PackedSpec, parts: Parts, where: str) -> Parts:
    """Inverse of to_storage.

    Raises:
        FormatError: the parts do not fit each other.
    """
    if not spec.has_storage_layout:
        return parts
    rest = {name: part for name, part in parts.items() if name not in ("symbols", "groups", "nonzero")}
    zero = _padded(spec, _zero_codes(spec, parts))
    try:
        if spec.masked:
            codes = symbols.masked_to_dense(parts, zero, spec.bits, spec.columns)
        elif spec.sparsity.kind == "dense":
            codes = symbols.symbols_to_dense(parts["symbols"], zero, spec.bits, spec.columns)
        else:
            codes, both = symbols.symbols_to_pairs(parts, zero, spec.bits, spec.padded)
    except ValueError as error:
        raise FormatError(str(error), where=where) from error
    if spec.sparsity.kind == "dense":
        return rest | {"codes": packing.pack_codes(codes, spec.bits)}
    return rest | _with_pairs(spec, both, codes)


def check_parts(spec: PackedSpec, parts: Parts, *, storage: bool, where: str) -> None:
    """Make sure that `parts` are those that `spec` means, before they decode; raises as spec.check_shapes."""
    found = {name: (_NAMES.get(part.dtype, str(part.dtype)), tuple(part.shape)) for name, part in parts.items()}
    check_shapes(spec, found, storage=storage, where=where)


def part_shapes(spec: PackedSpec, *, storage: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """As spec.part_shapes, with torch's dtypes."""
    shapes = stored_shapes(spec, storage=storage)
    return {name: (_DTYPES[dtype], shape) for name, (dtype, shape) in shapes.items()}


def _padded(spec: PackedSpec, matrix: Tensor) -> Tensor:
    """[rows, padded columns], with zeros; the matrix itself where nothing is missing."""
    missing = spec.padded - spec.columns
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix


def _zero_codes(spec: PackedSpec, parts: Parts) -> Tensor:
    """Zero point of each column as a code u8 [rows, columns]; 0 where no code means zero."""
    if spec.grid == "minmax":
        if parts["zeros"].shape[1] == 1:
            return parts["zeros"].expand(-1, spec.columns)
        index = torch.arange(spec.columns, device=parts["zeros"].device) // spec.group
        return parts["zeros"][:, index]
    code = int(constant_zero(spec.grid, spec.bits)) if spec.has_zero_code else 0
    return torch.full((spec.rows, spec.columns), code, dtype=torch.uint8, device=parts["scales"].device)


def _with_pairs(spec: PackedSpec, both: Tensor, codes: Tensor) -> Parts:
    """both: the nibbles of what 2:4 keeps of codes u8."""
    return {"pattern": pairs.pack_pairs(both), "codes": packing.pack_codes(pairs.kept_of(codes, both), spec.bits)}


def _with_pattern(spec: PackedSpec, mask: Tensor, write: Any, codes: Tensor) -> Parts:
    whole = codes.dtype != torch.uint8  # 16-bit values
    if spec.is_24 and not whole:
        return _with_pairs(spec, pairs.pairs_of(mask), codes)
    pattern = pairs.pack_pairs(pairs.pairs_of(mask)) if spec.is_24 else packing.pack_codes(mask.to(torch.uint8), 1)
    if spec.sparsity.kind == "unstructured":
        kept = codes[mask]
        return {"pattern": pattern, "codes": kept if whole else ragged.pack_ragged(kept, mask.sum(1), spec.bits)}
    return {"pattern": pattern, "codes": write(codes[mask].view(spec.rows, spec.kept))}


def _mask(spec: PackedSpec, pattern: Tensor) -> Tensor:
    if spec.is_24:
        return pairs.mask_of(pairs.unpack_pairs(pattern, spec.padded // 4))
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
