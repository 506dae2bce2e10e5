"""Rows of linears over ranks: each rank solves its share of every linear, and all get all of what came out.

Each linear's rows are cut, not the stack of those that are solved together: so each rank has a share of each tensor, in
order. What cannot be cut (patterns that are chosen over all rows or drawn by the number of a row, rows that make up for
each other, matrices with fewer rows than there are ranks) every rank solves whole, to the same result: all of them have
the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from deltacompress.codecs.encoded import Encoded, LinearToEncode, Sums
from deltacompress.compression.encoding import restored_of
from deltacompress.compression.planning import TensorPlan
from deltacompress.compression.ranks.ranks import Ranks

_NOTHING = Sums(0.0, 0.0, 0.0, 0.0)


class RowShares:
    """How the rows of some linears, which have the same settings, are cut."""

    def __init__(self, ranks: Ranks, tensors: Sequence[TensorPlan], linears: Sequence[LinearToEncode]) -> None:
        self._ranks = ranks
        self._rows = {one.name: one.delta.shape[0] for one in linears}
        apart = all(tensor.settings.rows_apart for tensor in tensors) and all(one.fisher is None for one in linears)
        self._cut = 1 < ranks.size <= min(self._rows.values()) and apart

    def own(self, linear: LinearToEncode) -> LinearToEncode:
        """The rows of a linear that are this rank's."""
        if not self._cut:
            return linear
        rows = self._ranks.share(self._rows[linear.name])
        moved = None if linear.moved is None else linear.moved[rows]
        return LinearToEncode(linear.name, linear.delta[rows], linear.finetuned[rows], moved=moved)

    def losses(self, encoded: Mapping[str, Encoded]) -> dict[str, Encoded]:
        """The same, each with loss and kept share of all rows."""
        if not self._cut:
            return dict(encoded)
        own = [value for one in encoded.values() for value in one.sums or _NOTHING]
        total = iter([sum(column) for column in zip(*self._ranks.numbers(own), strict=True)])
        whole = {name: Sums(*islice(total, len(_NOTHING))) for name in encoded}
        return {name: replace(one, loss=whole[name].loss, kept=whole[name].kept) for name, one in encoded.items()}

    def joined(self, tensor: TensorPlan, own: Encoded, reference: Tensor | None) -> tuple[Encoded, Tensor | None]:
        """All rows of a tensor, and what it is restored to, where each rank could restore its share.

        reference: what the tensor is coded against, all of it.
        """
        if not self._cut:
            return own, None
        rows = self._rows[tensor.name]
        parts = {name: self._ranks.gather(own.parts[name], rows) for name in sorted(own.parts)}
        whole = replace(own, params=own.params | {"rows": rows}, parts=parts)
        shape = tensor.pair.info.shape
        if tensor.transposed or shape[0] != rows:  # rows that were added come later
            return whole, None
        share = self._ranks.share(rows)
        some = restored_of(
            tensor, own, None if reference is None else reference[share], (share.stop - share.start, *shape[1:])
        )
        return whole, self._ranks.gather(some, rows)
