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


class Way(IntEnum):
    """How a forward is computed: kernel by kernel, or by a CUDA graph, made now or there already (steps/graphs.py)."""

    PLAIN = 0
    CAPTURED = 1
    REPLAYED = 2


@dataclass(frozen=True)
class Plan:
    """One forward, in the numbers that it starts from.

    pages: which keys and values, by Pages.number, and how many pages these have (0, 0: none). rows, columns: requests,
    and tokens of each; width: pages of a row's table; fresh: of pieces as in Pieces, of rows whether the first rank's
    table has moved, so that its captured steps are gone. slots, keep, kept: as in Batch. inputs: what the forward
    takes: ids; of pieces also positions and places; of rows positions, the number of each row's table, and as many
    tables, from 0, of `width` pages or of fewer, if no row has more. way: of the forward; run, variants: as in a
    graph's Shape, whose rows, tokens and pages are rows, columns and width. ahead: of rows, whether only the first
    rank's device has their ids.
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
    way: Way = Way.PLAIN
    run: int = 0
    variants: bool = False
    ahead: bool = False
