"""What an adapter goes over: a base, or a fine-tuned model that the zoo holds as a delta.

The adapter's entry then names both: its base is the delta's base, which serves it, its fine-tuned model the delta's,
and its parents are the delta's base-ref and the delta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltacompress.errors import option
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.artifact import manifest_in
from deltacompress.zoo.entries.bases import identity_in
from deltacompress.zoo.entries.listing import Listed
from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.ledger.entry import Lineage
from deltacompress.zoo.ledger.read import need_kind

OVER = "over"
"""Of an entry's summary: the digest of the delta's manifest, which reports name, too."""


@dataclass(frozen=True, slots=True)
class Beneath:
    """A model that an adapter is held against.

    name: of the entry, `team/llama@1`; shapes: of its tensors; nbytes: of its checkpoint; lineage: of an adapter of
    it; over: digest of the delta's manifest, None for a base.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    nbytes: int
    lineage: Lineage
    over: str | None


def model_of(zoo: Catalog, name: str) -> Beneath:
    """The model of a base-ref, or the fine-tuned one of a delta.

    Raises:
        NotFoundError: no such entry, or one of another kind.
        IntegrityError: it is damaged.
    """
    found, entry = zoo.show(name)
    need_kind(found, entry, "base-ref", "delta")
    told = entry.lineage
    if entry.kind == "base-ref":
        base = identity_in(zoo.store, entry, str(found))
        lineage = told.model_copy(update={"parents": (found.manifest,), "relation": "adapter"})
        return Beneath(str(found), {one.name: one.shape for one in base.tensors}, base.bytes, lineage, None)
    manifest = manifest_in(zoo.store, entry, str(found))
    refs = {one.manifest for one in zoo.list(all_versions=True) if one.kind == "base-ref"}
    parents = (*(one for one in told.parents if one in refs), found.manifest)
    lineage = told.model_copy(update={"parents": parents, "relation": "adapter"})
    shapes = {one.name: one.shape for one in manifest.tensors}
    return Beneath(str(found), shapes, manifest.finetuned.bytes, lineage, manifest.digest)


def deltas_of(finetuned: str, listed: Sequence[Listed]) -> list[Listed]:
    """Deltas of the fine-tuned model of this name, as they were made from it; newest first under each name."""
    return [one for one in listed if one.kind == "delta" and one.lineage.get("finetuned_name") == finetuned]


def delta_under(zoo: Catalog, name: str) -> str | None:
    """The delta that the adapter `name` goes over, `team/bot@3`; None: it is none, or goes over its base.

    Raises:
        NotFoundError: no such entry, or its delta is not in this zoo.
    """
    found, entry = zoo.show(name)
    if entry.kind != "adapter" or entry.lineage.finetuned is None:
        return None
    over = entry.summary.get(OVER)
    deltas = [one for one in zoo.list(all_versions=True) if one.kind == "delta"]
    for one in sorted(deltas, key=lambda delta: delta.manifest not in entry.lineage.parents):
        # Its own entry, or the same artifact under another one: linked to another base-ref, say.
        if one.manifest in entry.lineage.parents or (over is not None and one.summary.get("artifact") == over):
            return f"{one.name}@{one.version}"
    raise NotFoundError(
        f"{found} goes over a delta of {str(entry.lineage.finetuned_name)[:200]!a}, which is not in this zoo",
        where=zoo.where,
        way_out="bring that here (zoo push, zoo undelete), or name a delta of that model with " + option("over"),
    )
