"""Embedding and head of an adapter, where the base ties the one to the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deltacompress.adapters.records import Change, TokenRows, Whole
from deltacompress.runtime.variants.layout import Layout
from deltacompress.runtime.variants.variant import BaseSide


def own_weight(change: Change) -> str | None:
    """The whole weight that a module brings."""
    return None if change.whole is None else change.whole.weight


def _has_rows(change: Change) -> bool:
    return change.rows is not None or own_weight(change) is not None


def tables_of_both(weights: Mapping[str, Change], layout: Layout) -> dict[str, Change]:
    """What the adapter changes of a table that is tied to another, beside whose matrices it has the table itself.

    PEFT saves that as the model has it, where the vocabulary may have grown: it is the other one's, too.
    """
    found: dict[str, Change] = {}
    for path, change in weights.items():
        own, place = own_weight(change), layout.places.get(path)
        if own is None or place is None or not own.endswith(".base_layer.weight"):
            continue
        for other in (name for name, one in layout.places.items() if name != path and one.name == place.name):
            there = weights.get(other, Change(other.removesuffix(".weight"), change.tensor, change.shape))
            if own_weight(there) is None:
                bias = None if there.whole is None else there.whole.bias
                rows = change.rows if there.rows is None else there.rows
                found[other] = replace(there, shape=change.shape, whole=Whole(own, bias), rows=rows)
    return found


def rows_of_tied_heads(weights: Mapping[str, Change], base: BaseSide, layout: Layout) -> dict[str, TokenRows]:
    """Head -> rows of tokens that the adapter brings for the embedding which it is tied to, unless it has its own."""
    found: dict[str, TokenRows] = {}
    for path, change in weights.items():
        if change.rows is None or base.roles.get(path) != "embedding":
            continue
        name = layout.places[path].name
        tied = [other for other, place in layout.places.items() if other != path and place.name == name]
        found |= {other: change.rows for other in tied if other not in weights or not _has_rows(weights[other])}
    return found
