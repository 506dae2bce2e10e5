"""What differs between two entries: facts, recipe, scores, tensors, and how many bytes they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deltacompress.manifest import MAX_MANIFEST_BYTES, parse_manifest
from deltacompress.zoo import blobs
from deltacompress.zoo.bases import MAX_IDENTITY_BYTES, parse_base
from deltacompress.zoo.entry import EntryManifest
from deltacompress.zoo.reports import scores
from deltacompress.zoo.versions import Resolved
from deltacompress.zoo.zoo import Zoo


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two. tensors: name -> what is known about it, plain values only."""

    found: Resolved
    entry: EntryManifest
    recipe: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, float]


def diff(zoo: Zoo, a: str, b: str) -> dict[str, Any]:
    """Compare two entries of one zoo; what `zoo diff --json` prints.

    facts, recipe, scores: rows {what, a, b} of what differs (None: not there); tensors: rows {tensor, what, a, b}, with
    a `what` of "tensor" where only one has it; same_tensors: how many are equal in everything; shared_bytes, a_bytes,
    b_bytes: stored once for both, or for one of them only.

    Raises:
        ZooError: no such entry, or a damaged one.
    """
    left, right = _side(zoo, a), _side(zoo, b)
    mine, theirs = left.entry.blobs, right.entry.blobs
    changed = list(_tensors(left.tensors, right.tensors))
    differing = {row["tensor"] for row in changed}
    return {
        "a": str(left.found),
        "b": str(right.found),
        "same": left.found.manifest == right.found.manifest,
        "facts": list(_rows(_facts(left), _facts(right))),
        "recipe": list(_rows(dict(_flat(left.recipe)), dict(_flat(right.recipe)))),
        "scores": list(_rows(left.scores, right.scores)),
        "tensors": changed,
        "same_tensors": len((left.tensors.keys() & right.tensors.keys()) - differing),
        "shared_bytes": sum(size for digest, size in mine.items() if digest in theirs),
        "a_bytes": sum(size for digest, size in mine.items() if digest not in theirs),
        "b_bytes": sum(size for digest, size in theirs.items() if digest not in mine),
    }


def _side(zoo: Zoo, name: str) -> _Side:
    found, entry = zoo.show(name)
    recipe: Mapping[str, Any] = {}
    tensors: dict[str, Mapping[str, Any]] = {}
    if entry.kind in ("delta", "base-ref"):
        config, where = entry.config, f"{zoo.where}: {found}"
        limit = MAX_MANIFEST_BYTES if entry.kind == "delta" else MAX_IDENTITY_BYTES
        raw = blobs.read(zoo.store, config.digest, config.size, limit=limit, what=f"config of {found}")
        if entry.kind == "delta":
            manifest = parse_manifest(raw, where)
            recipe = manifest.recipe
            for one in manifest.tensors:
                settings = {
                    key: one.params[key] for key in ("bits", "sparsity", "group_size", "grid") if key in one.params
                }
                plain = {"status": one.status, "codec": one.codec, "dtype": one.dtype, "shape": _shape(one.shape)}
                tensors[one.name] = plain | settings | {"bytes": one.bytes, "loss": one.loss, "sha256": one.sha256[:12]}
        else:
            for two in parse_base(raw, where).tensors:
                tensors[two.name] = {"dtype": two.dtype, "shape": _shape(two.shape), "sha256": two.sha256[:12]}
    return _Side(found, entry, recipe, tensors, scores(zoo, str(found)))


def _facts(side: _Side) -> dict[str, Any]:
    told = side.entry.lineage
    facts: dict[str, Any] = {
        "kind": side.entry.kind,
        "base": told.base_name,
        "base_hash": told.base and told.base[:12],
        "finetuned": told.finetuned_name,
        "finetuned_hash": told.finetuned and told.finetuned[:12],
        "relation": told.relation,
        "entry_bytes": side.entry.logical_bytes,
    }
    return facts | dict(side.entry.summary)


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in (*a, *(key for key in b if key not in a)):
        if a.get(key) != b.get(key):
            yield {"what": key, "a": a.get(key), "b": b.get(key)}


def _tensors(a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for name in sorted(a.keys() | b.keys()):
        if name in a and name in b:
            for row in _rows(a[name], b[name]):
                yield {"tensor": name} | row
        else:
            here = ["present" if name in side else None for side in (a, b)]
            yield {"tensor": name, "what": "tensor", "a": here[0], "b": here[1]}


def _flat(data: Any) -> Iterator[tuple[str, Any]]:
    """(path, plain value) of everything in nested data."""
    todo = [("", data)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(f"{path}.{key}", one) for key, one in reversed(list(value.items()))]
        elif isinstance(value, list | tuple):
            todo += [(f"{path}.{number}", one) for number, one in reversed(list(enumerate(value)))]
        else:
            yield path.lstrip("."), value


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
