"""A cache that makes `list` quick: what each version's manifest says, in SQLite, in the user's cache folder.

A version never changes, so what is known about its key stays true; what exists, is removed or tagged is read from the
store every time. Nothing but `list` looks here, so deleting the file (or a file that SQLite cannot read, which is
deleted) changes nothing but speed. It lies outside of the zoo because SQLite's locks fail on network file systems and a
zoo may be read-only or no directory at all.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

_SCHEMA = "CREATE TABLE IF NOT EXISTS version_1 (key TEXT PRIMARY KEY, row TEXT NOT NULL) WITHOUT ROWID"


def index_path(zoo_id: str) -> Path:
    """Where the cache of a zoo lies."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "deltacompress" / "zoo" / f"{zoo_id}.sqlite"


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> row of everything known; empty if there is no usable cache."""
    if not path.is_file():
        return {}
    try:
        with closing(sqlite3.connect(path, timeout=1)) as base:
            base.execute(_SCHEMA)
            return {key: json.loads(row) for key, row in base.execute("SELECT key, row FROM version_1")}
    except (sqlite3.Error, ValueError):
        with suppress(OSError):
            path.unlink()
        return {}


def store_rows(path: Path, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Remember rows. A cache that cannot be written is done without: it only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=1)) as base, base:
            base.execute(_SCHEMA)
            base.executemany(
                "INSERT OR REPLACE INTO version_1 VALUES (?, ?)", [(key, json.dumps(row)) for key, row in rows]
            )
    except (sqlite3.Error, OSError):
        return
