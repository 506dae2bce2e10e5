"""Embedding and head of an adapter, where the one is tied to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deltacompress.adapters.records import Change, TokenRows, Whole
from deltacompress.runtime.variants.layout import Layout

Changes = Mapping[str, Change]
"""Module tensor path -> what the adapter changes of it."""


def own_weight(change: Change) -> str | None:
    """The whole weight that a module brings."""
    return None if change.whole is None else change.whole.weight


def _has_rows(change: Change) -> bool:
    return change.rows is not None or own_weight(change) is not None


@dataclass(frozen=True)
class Ties:
    """Which tables of a model are one. layout: of the model under the adapter; roles: module tensor path -> what the
    runtime replaced there; alike: whether two that are stored apart hold the same values.
    """

    layout: Layout
    roles: Mapping[str, str]
    alike: Callable[[str, str], bool]

    def others(self, path: str) -> list[str]:
        """Paths that are tied to one: stored once, or twice by a model that ties what is alike."""
        if self.roles.get(path) not in ("embedding", "head"):
            return []
        name, places = self.layout.places[path].name, self.layout.places
        once = [other for other, place in places.items() if other != path and place.name == name]
        if once or not self.layout.config.tie_word_embeddings:
            return once
        tables = [other for other in places if other != path and self.roles.get(other) in ("embedding", "head")]
        return [other for other in tables if self.alike(path, other)]

    def tables_of_both(self, weights: Changes) -> dict[str, Change]:
        """What is changed of a table that is tied to another, beside whose matrices the adapter has the table itself.

        PEFT saves that as the model has it, where the vocabulary may have grown: it is the other one's, too.
        """
        found: dict[str, Change] = {}
        for path, change in weights.items():
            own = own_weight(change)
            if own is None or not own.endswith(".base_layer.weight"):
                continue
            for other in self.others(path):
                there = weights.get(other, Change(other.removesuffix(".weight"), change.tensor, change.shape))
                if own_weight(there) is None:
                    rows = change.rows if self.roles[path] == "embedding" and there.rows is None else there.rows
                    whole = replace(there.whole or Whole(), weight=own)
                    found[other] = replace(there, shape=change.shape, whole=whole, rows=rows)
        return found

    def rows_of_heads(self, weights: Changes) -> dict[str, TokenRows]:
        """Head -> rows of tokens that the adapter brings for the embedding it is tied to, unless it has its own."""
        found: dict[str, TokenRows] = {}
        for path, change in weights.items():
            if change.rows is None or self.roles.get(path) != "embedding":
                continue
            tied = self.others(path)
            found |= {other: change.rows for other in tied if other not in weights or not _has_rows(weights[other])}
        return found
