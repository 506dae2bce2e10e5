"""Manifests made by hand, for the tests of what reads them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

HASH = "0123456789abcdef" * 4
PART = {"name": "planes", "dtype": "U8", "shape": [2, 6], "bytes": 72, "sha256": HASH}


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name, "dtype": "BF16", "shape": [2, 3], "kind": "linear", "status": "exact", "codec": "exact",
        "format": "exact", "params": {"transform": "ordered"}, "sha256": HASH, "base_name": name, "base_rows": None,
        "base_sha256": HASH, "alias_of": None, "loss": None, "damp_fraction": None,
        "parts": [PART],
    } | fields  # fmt: skip


def plain(**fields: Any) -> dict[str, Any]:
    tensors = fields.get("tensors", [record("a"), record("b")])
    side = {"name": "m", "revision": None, "content_hash": HASH, "bytes": 24, "tensors": len(tensors)}
    return {
        "schema_version": 1, "base": side, "finetuned": side, "recipe": {"name": "lossless"}, "scope": "delta",
        "calibration": None, "lossless": "zstd", "tensors": tensors, "shards": [], "files": [], "tools": {"torch": "2"},
    } | fields  # fmt: skip


def canonical(data: Any, **options: Any) -> bytes:
    return json.dumps(data, **({"sort_keys": True, "separators": (",", ":")} | options)).encode()


def sealed(data: dict[str, Any]) -> bytes:
    """The file's bytes, by the documented rule: digest = sha256 of the canonical JSON without it."""
    return canonical(data | {"digest": hashlib.sha256(canonical(data)).hexdigest()})
