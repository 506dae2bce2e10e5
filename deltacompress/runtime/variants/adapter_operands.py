"""From the records of an adapter to operands: what one of its modules adds, turns, scales or replaces.

`under` is the weight that an adapter was trained on: the base's, a fine-tuned model's, or a whole one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.adapters.adapter import Adapter
from deltacompress.adapters.records import Change, EmbeddingLowRank, LowRank, TokenRows
from deltacompress.adapters.records import Rotation as RotationRecord
from deltacompress.adapters.values import entries
from deltacompress.errors import CheckpointError
from deltacompress.numerics.adapters.magnitude import Rows, row_norms
from deltacompress.runtime.operands import low_rank
from deltacompress.runtime.operands.dense_delta import DeltaOfRows
from deltacompress.runtime.operands.embedding_rows import EmbeddingRows, EmbeddingTable, LowRankRows, ReplacedRows
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.product import LinearOperand
from deltacompress.runtime.operands.rotation import Rotation
from deltacompress.runtime.operands.scale import Scale
from deltacompress.runtime.operands.sparse import Sparse
from deltacompress.runtime.variants.adapter_tensors import AdapterTensors

Weight = Callable[[], Tensor]
"""Reads a weight [out, in], of any float dtype, when it is needed."""


@dataclass(frozen=True)
class AdapterOperands:
    """Makes the operands of one opened adapter, in host memory."""

    adapter: Adapter
    tensors: AdapterTensors

    def linear(self, change: Change, under: Weight, rows: Callable[[], Rows]) -> list[LinearOperand]:
        """Of a linear or head, but for a bias; under: without what the change itself brings whole; rows: the same, as
        one that is read row by row.

        Raises:
            CheckpointError, InputError, IntegrityError: values that cannot be served; names the module.
        """
        parts: list[LinearOperand] = []
        if change.whole is not None and change.whole.weight is not None:
            own = self._whole_with_rows(change)
            parts.append(FullWeight({"weight": self._served(change, "weight", own)}))
            rows = lambda: own  # noqa: E731
        elif change.rows is not None:
            parts.append(self.delta_of_rows(change.rows, under, change.module))
        if change.low_rank is not None:
            parts += self._low_rank(change, change.low_rank, rows)
        if change.rotation is not None:
            parts += self._rotation(change, change.rotation)
        if change.sparse is not None:
            lines, columns = (torch.from_numpy(one) for one in entries(self.adapter, change))
            values = self._served(change, "entries", self.tensors.read(change.sparse.values))
            parts.append(Sparse.of(lines, columns, values, change.outputs))
        return parts

    def embedding(self, change: Change, beneath: EmbeddingRows | None, under: Weight) -> EmbeddingRows:
        """Of the input embedding; beneath: the operand that it goes over; raises as `linear`."""
        if change.whole is not None and change.whole.weight is not None:
            own = self._whole_with_rows(change)
            beneath, under = EmbeddingTable({"table": own}), lambda: own
        elif change.rows is not None:
            order = torch.tensor(change.rows.indices)
            rows = self._served(change, "rows", self.tensors.read(change.rows.values))
            return ReplacedRows({"ids": order.sort().values, "rows": rows[order.argsort()]}, beneath)
        if change.embedding is not None:
            return self._embedding(change, change.embedding, beneath, under)
        assert beneath is not None, "an embedding's change brings a weight, rows or matrices"
        return beneath

    def delta_of_rows(self, rows: TokenRows, under: Weight, module: str) -> DeltaOfRows:
        """Rows of a head that take the place of its own, as what is added to those; raises as `linear`."""
        indices = torch.tensor(rows.indices)
        delta = self.tensors.wide(rows.values) - under()[indices].float()
        return DeltaOfRows({"rows": indices, "delta": self.tensors.served(module, "rows", delta)})

    # --- by kind -----------------------------------------------------------------------------------------------------

    def _low_rank(self, change: Change, record: LowRank, rows: Callable[[], Rows]) -> list[LinearOperand]:
        a, b = (self.tensors.ready(name) for name in (record.A, record.B))
        if a is not None and b is not None:
            return [low_rank.LowRank({"a": a, "b": b} | self._bias_of(change, record))]
        a, b = self.tensors.read(record.A), self.tensors.read(record.B)
        if b.dtype != self.tensors.dtype or record.magnitude is not None:
            b = b.float()
        b = b * record.scale  # computed in float32, whatever its dtype
        tensors = {"a": self._served(change, "A", a), "b": self._served(change, "B times its scale", b)}
        tensors |= self._bias_of(change, record)
        parts: list[LinearOperand] = [low_rank.LowRank(tensors)]
        if record.magnitude is not None:
            scale = self._over_norms(change, record.magnitude, row_norms(rows(), a, b))
            parts.append(Scale({"scale": self._served(change, "magnitude over norm", scale)}))
        return parts

    def _bias_of(self, change: Change, record: LowRank) -> dict[str, Tensor]:
        if record.bias is None:
            return {}
        bias = self.tensors.wide(record.bias) * record.scale
        return {"bias": self._served(change, "the bias of B times its scale", bias)}

    def _rotation(self, change: Change, record: RotationRecord) -> list[LinearOperand]:
        turns = self.tensors.turns(record.R)
        blocks = {f"blocks{k}": self._served(change, "rotation", one.blocks) for k, one in enumerate(turns)}
        scale = self._served(change, "boft_s", self.tensors.read(record.s).flatten())
        return [Rotation(blocks, tuple((one.stride, one.chunk) for one in turns)), Scale({"scale": scale})]

    def _embedding(
        self, change: Change, record: EmbeddingLowRank, beneath: EmbeddingRows | None, under: Weight
    ) -> EmbeddingRows:
        a, b = self.tensors.wide(record.A), self.tensors.wide(record.B) * record.scale
        tensors = {"a": self._served(change, "A", a.T), "b": self._served(change, "B times its scale", b)}
        if record.magnitude is not None:
            scale = self._over_norms(change, record.magnitude, row_norms(under().T, a, b))
            tensors["scale"] = self._served(change, "magnitude over norm", scale)
        return LowRankRows(tensors, beneath)

    def _over_norms(self, change: Change, magnitude: str, norms: Tensor) -> Tensor:
        if not bool((norms > 0).all()):
            raise CheckpointError(
                f"module {change.module}: the weight with B A added has a norm of 0, which a magnitude cannot scale",
                where=self.adapter.weights,
                way_out="train it again, or get it again",
            )
        return self.tensors.wide(magnitude) / norms

    def _whole_with_rows(self, change: Change) -> Tensor:
        """The whole weight that a module brings, with the rows that it brings besides; in the file's dtype."""
        assert change.whole is not None
        assert change.whole.weight is not None
        found = self.tensors.read(change.whole.weight)
        if change.rows is not None:
            found[torch.tensor(change.rows.indices)] = self.tensors.read(change.rows.values).to(found.dtype)
        return found

    def _served(self, change: Change, what: str, values: Tensor) -> Tensor:
        return self.tensors.served(change.module, what, values)
