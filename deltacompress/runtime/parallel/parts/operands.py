"""What of a variant's operand is one rank's. It computes with its part as with any operand.

All that a linear with some of the columns adds is summed over the ranks, so that it need not be known beforehand:
a factor for each output acts on the parts of a sum as on the sum, and what is added once is added by the first rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from deltacompress.errors import UnsupportedModelError, option
from deltacompress.kernels import Backend
from deltacompress.runtime.operands.dense_delta import DeltaOfRows, DenseDelta
from deltacompress.runtime.operands.embedding_rows import (
    EmbeddingRows,
    EmbeddingTable,
    LowRankRows,
    PackedRows,
    ReplacedRows,
)
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.low_rank import LowRank
from deltacompress.runtime.operands.operand import Operand, Vector
from deltacompress.runtime.operands.packed_delta import PackedDelta
from deltacompress.runtime.operands.product import Combined, LinearOperand
from deltacompress.runtime.operands.rotation import Rotation
from deltacompress.runtime.operands.scale import Scale
from deltacompress.runtime.operands.sparse import Sparse
from deltacompress.runtime.parallel.parts.cut import Cut
from deltacompress.runtime.parallel.parts.packed import part_of_packed

O = TypeVar("O", bound=Operand)  # noqa: E741


class OperandParts:
    """Makes the parts of one rank. first: whether it adds what is added once."""

    def __init__(self, kernels: Backend | None, *, first: bool) -> None:
        self._kernels, self._first = kernels, first

    def of(self, operand: Operand, cut: Cut) -> Operand:
        """Raises UnsupportedModelError: its part is not known."""
        match operand:
            case Vector():
                return Vector({"vector": cut.of(operand.tensors["vector"])})
            case Combined():
                return replace(operand, parts=tuple(self._linear(one, cut) for one in operand.parts))
            case LinearOperand():
                return self._linear(operand, cut)
            case EmbeddingRows():
                return _embedding(operand, cut)
        raise unsplit(f"a {type(operand).__name__}")

    def _linear(self, operand: LinearOperand, cut: Cut) -> LinearOperand:
        match operand:
            case FullWeight():
                return FullWeight({"weight": cut.of(operand.tensors["weight"])})
            case DenseDelta():
                return DenseDelta({"delta": cut.of(operand.tensors["delta"])})
            case DeltaOfRows():
                return _delta_of_rows(operand, cut)
            case PackedDelta():
                return self._packed(operand, cut)
            case LowRank():
                return self._low_rank(operand, cut)
            case Rotation():
                return operand if cut.dim == 0 else _rotation(operand, *cut.ranges[0])
            case Scale():
                return operand if cut.dim == 1 else Scale({"scale": cut.of(operand.tensors["scale"])})
            case Sparse():
                return _sparse(operand, cut)
        raise unsplit(f"a {type(operand).__name__}")

    def _packed(self, operand: PackedDelta, cut: Cut) -> PackedDelta:
        try:
            spec, parts = part_of_packed(operand.spec, operand.tensors, cut)
        except ValueError as error:
            raise unsplit(f"a packed delta of {operand.spec.to_json()} ({error})") from error
        if self._kernels is None or not self._kernels.supports(spec):
            raise unsplit(f"a packed delta, in groups of {spec.group} columns after the cut,")
        return PackedDelta(parts, spec, spec.rows)

    def _low_rank(self, operand: LowRank, cut: Cut) -> LowRank:
        tensors = dict(operand.tensors)
        if cut.dim == 0:
            cuts = {name: cut.of(tensors[name]) for name in ("b", "bias") if name in tensors}
            return LowRank(tensors | cuts)
        if not self._first:
            tensors.pop("bias", None)
        return LowRank(tensors | {"a": cut.of(tensors["a"])})


def unsplit(what: str) -> UnsupportedModelError:
    """That a part of something is not known."""
    told = f"how to split {what} over several devices is not known"
    return UnsupportedModelError(told, way_out=f"serve it without {option('tp')}")


def _delta_of_rows(operand: DeltaOfRows, cut: Cut) -> DeltaOfRows:
    rows, delta = operand.tensors["rows"], operand.tensors["delta"]
    if cut.dim == 1:
        return DeltaOfRows({"rows": rows, "delta": cut.of(delta)})
    places = cut.places(rows)
    return DeltaOfRows({"rows": places[places >= 0], "delta": delta[places >= 0]})


def _rotation(operand: Rotation, begin: int, end: int) -> Rotation:
    """Blocks that lie in these columns; a run of blocks whose features alternate must lie there whole."""
    found: dict[str, Tensor] = {}
    for number, (blocks, (stride, _)) in enumerate(zip(operand.turns, operand.layout, strict=True)):
        size = blocks.shape[-1]
        if begin % (stride * size) or end % (stride * size):
            raise unsplit(f"a rotation of blocks that span {stride * size} features, cut at {begin} and {end},")
        found[f"blocks{number}"] = blocks[begin // size : end // size].contiguous()
    return replace(operand, tensors=found)


def _sparse(operand: Sparse, cut: Cut) -> Sparse:
    starts, columns, values = (operand.tensors[name] for name in ("starts", "columns", "values"))
    out = starts.shape[0] - 1
    rows = torch.arange(out).repeat_interleave(starts.diff().long())
    places = cut.places((rows if cut.dim == 0 else columns).long())
    own = places >= 0
    if cut.dim == 0:
        return Sparse.of(places[own], columns[own], values[own], cut.size)
    return Sparse.of(rows[own], places[own], values[own], out)


def _embedding(operand: EmbeddingRows, cut: Cut) -> EmbeddingRows:
    match operand:
        case EmbeddingTable():
            return EmbeddingTable({"table": cut.of(operand.tensors["table"])})
        case PackedRows():
            return _packed_rows(operand, cut)
        case LowRankRows():
            tensors = operand.tensors | {"a": cut.of(operand.tensors["a"])}
            return LowRankRows(tensors, _under(operand.under, cut))
        case ReplacedRows():
            places = cut.places(operand.tensors["ids"])
            ids, rows = places[places >= 0], operand.tensors["rows"][places >= 0]
            if not len(ids):  # a row of nobody, since there must be one
                ids, rows = places.new_full((1,), -1), rows.new_zeros(1, rows.shape[1])
            return ReplacedRows({"ids": ids, "rows": rows}, _under(operand.under, cut))
    raise unsplit(f"a {type(operand).__name__}")


def _under(operand: EmbeddingRows | None, cut: Cut) -> EmbeddingRows | None:
    return None if operand is None else _embedding(operand, cut)


def _packed_rows(operand: PackedRows, cut: Cut) -> PackedRows:
    rank = operand.tensors["rank"]
    [(begin, end)] = cut.ranges
    own = rank[begin:end]
    stored = own[own >= 0]
    first = int(stored[0]) if len(stored) else 0
    tensors = {
        name: part[first : first + max(len(stored), 1)].contiguous()
        for name, part in operand.tensors.items()
        if name != "rank"
    }
    moved = torch.where(own >= 0, own - first, -1)
    moved = torch.nn.functional.pad(moved, (0, cut.size - len(moved)), value=-1)
    return PackedRows(tensors | {"rank": moved}, replace(operand.spec, rows=max(len(stored), 1)), operand.dtype)
