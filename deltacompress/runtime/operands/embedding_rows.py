"""What a variant brings for the input embedding: a table of its own, the rows that changed, or what goes over those."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.runtime.operands.operand import Operand, PinnedMemory, unlike

if TYPE_CHECKING:
    from deltacompress.kernels import Backend

POINTERS = ("codes", "scales", "zeros", "rank")
"""Tensors that the fused lookup finds by address, in its order."""


class LookupFormat(NamedTuple):
    """What tables share that one launch of the fused lookup serves; spec: of any number of rows."""

    spec: PackedSpec
    dtype: torch.dtype


class EmbeddingRows(Operand, ABC):
    """An operand of the embedding."""

    @abstractmethod
    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        """Rows [tokens, hidden] of `ids` [tokens], in the dtype of the base's table. Never waits for the device."""

    @property
    def format(self) -> LookupFormat | None:
        """As what the fused lookup reads it; None: it does not."""
        return None


@dataclass(frozen=True)
class EmbeddingTable(EmbeddingRows):
    """tensors: table [vocabulary, hidden] in the checkpoint's dtype."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        table = self.tensors["table"]
        return unlike(table, (None, base.shape[1]), table.dtype)

    @override
    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        return functional.embedding(ids, self.tensors["table"]).to(base.dtype)


@dataclass(frozen=True)
class PackedRows(EmbeddingRows):
    """An embedding that stays packed: the base's row plus the decoded row of the tokens in use.

    tensors: dense parts of the stored rows, bits and rank [rows] (where a row is stored, -1 if it is not), added.
    dtype: of the checkpoint, in which base + delta is rounded, as restoring does.
    """

    spec: PackedSpec
    dtype: torch.dtype

    @property
    @override
    def format(self) -> LookupFormat | None:
        return None if "added" in self.tensors else LookupFormat(replace(self.spec, rows=0), self.dtype)

    @override
    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        rank = self.tensors["rank"]
        shared = ids.clamp(max=rank.shape[0] - 1)
        stored = rank[shared]
        parts = {
            name: part.index_select(0, stored.clamp(min=0))
            for name, part in self.tensors.items()
            if name in ("codes", "scales", "zeros")
        }
        delta = packed.decode(replace(self.spec, rows=ids.shape[0]), parts)
        delta = torch.where((stored >= 0)[:, None], delta, 0.0)
        rows = (functional.embedding(shared, base).float() + delta).to(self.dtype)
        if (added := self.tensors.get("added")) is not None:
            own = functional.embedding((ids - rank.shape[0]).clamp(min=0), added)
            rows = torch.where((ids >= rank.shape[0])[:, None], own, rows)
        return rows.to(base.dtype)


@dataclass(frozen=True)
class RowsOver(EmbeddingRows, ABC):
    """An operand that changes what another one looks up: under, or the base's rows where that is None."""

    under: EmbeddingRows | None

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.under is None else self.under.nbytes)

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return None if self.under is None else self.under.misfit(base, dtype)

    @override
    def placed_bytes(self, kernels: Backend | None) -> int:
        return super().nbytes + (0 if self.under is None else self.under.placed_bytes(kernels))

    @override
    def placed(self, device: torch.device, kernels: Backend | None) -> Self:
        under = None if self.under is None else self.under.placed(device, kernels)
        return replace(super().placed(device, kernels), under=under)

    @override
    def pinned(self, memory: PinnedMemory) -> Self:
        return replace(super().pinned(memory), under=None if self.under is None else self.under.pinned(memory))

    def rows_under(self, ids: Tensor, base: Tensor) -> Tensor:
        """What is there without this, as `lookup` gives it."""
        return functional.embedding(ids, base) if self.under is None else self.under.lookup(ids, base)


@dataclass(frozen=True)
class LowRankRows(RowsOver):
    """E' = scale * (E + A B^T): LoRA of an embedding.

    tensors: a [vocabulary, r], b [hidden, r] with the adapter's scale in it; scale [hidden], where it has one (DoRA).
    """

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        a, hidden = self.tensors["a"], base.shape[1]
        found = unlike(a, (None, None), dtype) or unlike(self.tensors["b"], (hidden, a.shape[1]), dtype)
        if found is None and "scale" in self.tensors:
            found = unlike(self.tensors["scale"], (hidden,), dtype)
        return found or super().misfit(base, dtype)

    @override
    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        inner = functional.embedding(ids, self.tensors["a"])
        rows = torch.addmm(self.rows_under(ids, base), inner, self.tensors["b"].T)
        return rows * self.tensors["scale"] if "scale" in self.tensors else rows


@dataclass(frozen=True)
class ReplacedRows(RowsOver):
    """Rows of a few tokens. tensors: ids i64 [n], rising; rows [n, hidden]."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        ids = self.tensors["ids"]
        found = unlike(ids, (None,), torch.int64) or unlike(self.tensors["rows"], (ids.shape[0], base.shape[1]), dtype)
        return found or super().misfit(base, dtype)

    @override
    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        known = self.tensors["ids"]
        place = torch.searchsorted(known, ids).clamp(max=known.shape[0] - 1)
        own = functional.embedding(place, self.tensors["rows"])
        return torch.where((known[place] == ids)[:, None], own, self.rows_under(ids, base))
