"""What the first rank tells the others to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """Of a forward: whole sequences (engine/forwards.py), pieces of prompts, or a token of each row (engine/steps)."""

    SEQUENCES = 1
    PIECES = 2
    ROWS = 3


@dataclass(frozen=True)
class Plan:
    """One forward, in the numbers that it starts from.

    pages: which keys and values, by Pages.number, and how many pages these have (0, 0: none). rows, columns: requests,
    and tokens of each; width: pages of a row's table; fresh: as in Pieces. slots, keep, kept: as in Batch. inputs: what
    the forward takes: ids; of pieces also positions and places; of rows positions; and tables.
    """

    kind: Kind
    slots: Sequence[int]
    inputs: Sequence[int]
    rows: int
    columns: int
    pages: tuple[int, int] = (0, 0)
    width: int = 0
    fresh: bool = False
    keep: Sequence[int] | None = None
    kept: Sequence[int] = ()
