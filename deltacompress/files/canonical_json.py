"""Canonical JSON, the one spelling of what is hashed: sorted keys, no spaces, ASCII."""

from __future__ import annotations

import json
from typing import Any

from deltacompress.files.hashing import sha256_hex


def canonical_bytes(value: Any) -> bytes:
    """Plain data as canonical JSON.

    Raises:
        ValueError: NaN or an infinity, which JSON does not have.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def canonical_digest(value: Any) -> str:
    """Hex SHA-256 of `canonical_bytes`; raises as it does."""
    return sha256_hex(canonical_bytes(value))


def canonical_fields(data: dict[str, Any]) -> dict[str, bytes]:
    """Key -> canonical value, of a large object whose fields are needed one by one; `join_fields` makes it whole."""
    return {name: canonical_bytes(value) for name, value in data.items()}


def join_fields(fields: dict[str, bytes]) -> bytes:
    """`canonical_bytes` of an object, from its `canonical_fields`."""
    return b"{" + b",".join(canonical_bytes(name) + b":" + fields[name] for name in sorted(fields)) + b"}"
