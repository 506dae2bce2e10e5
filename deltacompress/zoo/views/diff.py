"""What differs between two entries: facts, recipe, scores, tensors, and how many bytes they share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.codecs.recipe import Recipe
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.artifact import manifest_in
from deltacompress.zoo.entries.bases import identity_in
from deltacompress.zoo.entries.reports import scores
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.versions import Resolved

_SETTINGS = ("bits", "sparsity", "group_size", "grid")
_CHANGE = {"sha256": "values"}
_FOLLOWS = ("bytes", "loss")
"""What follows from other changes, and is told only where it stands alone."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two. tensors: name -> what is known about it, plain values only; kinds, bytes: name -> kind of tensor
    and stored bytes (of a base: bytes).
    """

    found: Resolved
    entry: EntryManifest
    recipe: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]
    kinds: Mapping[str, str]
    bytes: Mapping[str, int]
    scores: Mapping[str, float]


def diff(zoo: Catalog, a: str, b: str) -> dict[str, Any]:
    """Compare two entries of one zoo; what `zoo diff --json` prints.

    facts, recipe, scores: rows {what, a, b} of what differs (None: not there; of a recipe, that is not told of what the
    other has by default); tensors: rows {tensor, what, a, b}, with
    a `what` of "tensor" where only one has it; changed: a row {tensor, kind, change, a_bytes, b_bytes} for each tensor
    of those, the largest first; changes: they are counted, {kind, change, tensors, a_bytes, b_bytes}; same_tensors: how
    many are equal in everything; shared_bytes, a_bytes, b_bytes: stored once for both, or for one of them only.

    Raises:
        ZooError: no such entry, or a damaged one.
    """
    left, right = _side(zoo, a), _side(zoo, b)
    mine, theirs = left.entry.blobs, right.entry.blobs
    rows = list(_tensors(left.tensors, right.tensors))
    changed = _changed(rows, left, right)
    return {
        "a": str(left.found),
        "b": str(right.found),
        "same": left.found.manifest == right.found.manifest,
        "facts": list(_rows(_facts(left), _facts(right))),
        "recipe": list(_recipe_rows(left.recipe, right.recipe)),
        "scores": list(_rows(left.scores, right.scores)),
        "tensors": rows,
        "changed": changed,
        "changes": _counted(changed),
        "same_tensors": len(left.tensors.keys() | right.tensors.keys()) - len(changed),
        "shared_bytes": sum(size for digest, size in mine.items() if digest in theirs),
        "a_bytes": sum(size for digest, size in mine.items() if digest not in theirs),
        "b_bytes": sum(size for digest, size in theirs.items() if digest not in mine),
    }


def _side(zoo: Catalog, name: str) -> _Side:
    found, entry = zoo.show(name)
    recipe: Mapping[str, Any] = {}
    tensors: dict[str, Mapping[str, Any]] = {}
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    if entry.kind in ("delta", "base-ref"):
        if entry.kind == "delta":
            manifest = manifest_in(zoo.store, entry, str(found))
            recipe = manifest.recipe
            for one in manifest.tensors:
                settings = {key: one.params[key] for key in _SETTINGS if key in one.params}
                plain = {"status": one.status, "codec": one.codec, "dtype": one.dtype, "shape": _shape(one.shape)}
                tensors[one.name] = plain | settings | {"bytes": one.bytes, "loss": one.loss, "sha256": one.sha256[:12]}
                kinds[one.name], sizes[one.name] = one.kind, one.bytes
        else:
            for two in identity_in(zoo.store, entry, str(found)).tensors:
                tensors[two.name] = {"dtype": two.dtype, "shape": _shape(two.shape), "sha256": two.sha256[:12]}
                kinds[two.name], sizes[two.name] = "tensor", math.prod(two.shape) * ITEMSIZE.get(two.dtype, 0)
    return _Side(found, entry, recipe, tensors, kinds, sizes, scores(zoo, str(found)))


def _facts(side: _Side) -> dict[str, Any]:
    told = side.entry.lineage
    facts: dict[str, Any] = {
        "kind": side.entry.kind,
        "base": told.base_name,
        "base_hash": told.base and told.base[:12],
        "finetuned": told.finetuned_name,
        "finetuned_hash": told.finetuned and told.finetuned[:12],
        "relation": told.relation,
        "linked_to": ", ".join(sorted(one[:12] for one in told.parents)) or None,
        "entry_bytes": side.entry.logical_bytes,
    }
    return facts | dict(side.entry.summary) | facts


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in (*a, *(key for key in b if key not in a)):
        if a.get(key) != b.get(key):
            yield {"what": key, "a": a.get(key), "b": b.get(key)}


def _recipe_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """As _rows, without what only one has, and by default."""
    chosen = _chosen(a) | _chosen(b)
    for row in _rows(dict(_flat(a)), dict(_flat(b))):
        if row["what"] in chosen or row["what"].endswith(".codec") or None not in (row["a"], row["b"]):
            yield row


def _chosen(recipe: Mapping[str, Any]) -> set[str]:
    """The paths of what is not there by default; of a recipe of another version, which is not known, all."""
    try:
        return {path for path, _ in _flat(Recipe.model_validate(recipe).model_dump(mode="json", exclude_defaults=True))}
    except ValidationError:
        return {path for path, _ in _flat(recipe)}


def _tensors(a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for name in sorted(a.keys() | b.keys()):
        if name in a and name in b:
            for row in _rows(a[name], b[name]):
                yield {"tensor": name} | row
        else:
            here = ["present" if name in side else None for side in (a, b)]
            yield {"tensor": name, "what": "tensor", "a": here[0], "b": here[1]}


def _changed(rows: list[dict[str, Any]], left: _Side, right: _Side) -> list[dict[str, Any]]:
    """One row a tensor: what kind of tensor, what of it changed, its bytes on both sides; the largest first."""
    what: dict[str, list[str]] = {}
    for row in rows:
        what.setdefault(row["tensor"], []).append(row["what"])
    found = []
    for name, changes in what.items():
        follows = (*_FOLLOWS, *_SETTINGS, "status") if "codec" in changes else _FOLLOWS
        told = [_CHANGE.get(one, one) for one in changes if one not in follows] or changes
        if changes == ["tensor"]:
            told = ["only in A" if name in left.tensors else "only in B"]
        found.append(
            {
                "tensor": name,
                "kind": left.kinds.get(name) or right.kinds[name],
                "change": ", ".join(told),
                "a_bytes": left.bytes.get(name),
                "b_bytes": right.bytes.get(name),
            }
        )
    return sorted(found, key=lambda row: (-max(row["a_bytes"] or 0, row["b_bytes"] or 0), row["tensor"]))


def _counted(changed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of _changed by kind and change, those with the most bytes first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in changed:
        key = row["kind"], row["change"]
        sums = found.setdefault(key, {"kind": key[0], "change": key[1], "tensors": 0, "a_bytes": 0, "b_bytes": 0})
        sums["tensors"] += 1
        for side in ("a_bytes", "b_bytes"):
            sums[side] += row[side] or 0
    return sorted(found.values(), key=lambda row: -max(row["a_bytes"], row["b_bytes"]))


def _flat(data: Any) -> Iterator[tuple[str, Any]]:
    """(path, plain value) of everything in nested data."""
    todo = [("", data)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(f"{path}.{key}", one) for key, one in reversed(list(value.items()))]
        elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            yield path.lstrip("."), ", ".join(value)  # a rule's names
        elif isinstance(value, list | tuple):
            todo += [(f"{path}.{number}", one) for number, one in reversed(list(enumerate(value)))]
        else:
            yield path.lstrip("."), value


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
