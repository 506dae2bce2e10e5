"""The low_rank format: a delta [rows, columns] as the product of left [rows, rank] and right [rank, columns], in fp16.

The product is summed term by term, rank 0 first, each product and each sum rounded to fp32: so every IEEE machine gets
the same bits, whole or piece by piece. (The matrix products of a BLAS sum in orders of their own.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deltacompress.checkpoints import rows as checkpoint_rows
from deltacompress.checkpoints.rows import Elements, ranges
from deltacompress.codecs.formats.packed import Parts
from deltacompress.codecs.formats.pieces import Source, added_pieces, read_tensor
from deltacompress.errors import FormatError

DTYPE = torch.float16
_IN_CACHE = 1 << 16  # values of the product that a CPU sums up before it goes on to the next ones


def decode(params: dict[str, Any], parts: Parts, rows: int, columns: int, where: str) -> Tensor:
    """The delta f32 [rows, columns].

    Raises:
        FormatError: parts that do not fit it, or that hold NaN or Inf.
    """
    rank = params.get("rank")
    shapes = {"left": (rows, rank), "right": (rank, columns)}
    for name, shape in shapes.items():
        part = parts.get(name)
        if part is None or part.dtype != DTYPE or part.shape != shape:
            raise FormatError(f"rank {rank} of {rows} x {columns} needs a part {name} F16 {list(shape)}", where=where)
        _check_finite(part, name, where)
    if odd := parts.keys() - shapes.keys() - {"added_rows"}:
        raise FormatError(f"part {min(odd)} does not belong to the low_rank format", where=where)
    return add_product(torch.zeros(rows, columns, device=parts["left"].device), parts["left"], parts["right"])


def pieces(
    params: dict[str, Any],
    sources: Mapping[str, Source],
    base: Elements | None,
    like: Tensor,
    where: str,
    *,
    storage: bool,
) -> Iterator[Tensor]:
    """As encoded.restore_pieces; a piece is some rows, or some columns of a row that is longer than a piece."""
    rank, at = int(params["rank"]), 0
    columns = sources["right"].nbytes // (rank * DTYPE.itemsize)
    rows = sources["left"].nbytes // (rank * DTYPE.itemsize)
    step = max(checkpoint_rows.PIECE // columns, 1)
    for top in range(0, rows, step):
        count = min(step, rows - top)
        left = _read(sources, "left", top * rank, (top + count) * rank, where).view(count, rank)
        for begin, end in ranges(columns):
            delta = _add_terms(torch.zeros(count, end - begin), left, sources, (begin, end), columns, where).view(-1)
            if base is not None:
                delta.add_(base.read(at, at + len(delta)))
            at += len(delta)
            yield delta.to(like.dtype)
    yield from added_pieces(sources, like)


def check(params: dict[str, Any], sources: Mapping[str, Source], rows: int, where: str, *, storage: bool) -> None:
    """Make sure that the parts decode, without the product; raises as decode."""
    for name in ("left", "right"):
        for begin, end in ranges(sources[name].nbytes // DTYPE.itemsize):
            _read(sources, name, begin, end, where)


def _add_terms(
    out: Tensor, left: Tensor, sources: Mapping[str, Source], some: tuple[int, int], columns: int, where: str
) -> Tensor:
    """Add some columns of the product to `out`; as many rows of `right` at a time as a piece holds."""
    begin, end = some
    step = max(checkpoint_rows.PIECE // columns, 1) if end - begin == columns else 1
    for first in range(0, left.shape[1], step):
        last = min(first + step, left.shape[1])
        right = _read(sources, "right", first * columns + begin, (last - 1) * columns + end, where)
        add_product(out, left[:, first:last], right.view(last - first, end - begin))
    return out


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """out += left @ right in fp32, in the order that the format says."""
    step = len(out) if out.is_cuda else max(_IN_CACHE // out.shape[1], 1)
    factors = left.float().T.unsqueeze(-1).contiguous()  # [rank, rows, 1]
    for begin in range(0, len(out), step):
        block = out[begin : begin + step]
        term = torch.empty_like(block)
        for column, row in zip(factors[:, begin : begin + step], right.float(), strict=True):
            block.add_(torch.mul(column, row, out=term))
    return out


def _read(sources: Mapping[str, Source], name: str, begin: int, end: int, where: str) -> Tensor:
    """Elements of a factor, flat."""
    found = read_tensor(sources[name], begin, end, DTYPE)
    _check_finite(found, name, where)
    return found


def _check_finite(part: Tensor, name: str, where: str) -> None:
    if not bool(torch.isfinite(part).all()):
        raise FormatError(f"part {name} holds NaN or Inf", where=where, way_out="compress the model again")
