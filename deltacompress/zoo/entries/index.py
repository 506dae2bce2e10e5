"""A cache that makes `list` quick: what records and manifests said, in SQLite, in the user's cache folder.

A row belongs to a key and to the very content that was found there (its hash, or the ETag of an object store), so it
is true wherever that content lies: two copies of one zoo that went different ways share the file and cannot mislead
each other, nor can a zoo that was restored from a backup. What exists, and what it contains, is looked up every time.
Nothing but `list` looks here, so deleting the file (or a file that SQLite cannot read, which is deleted) changes
nothing but speed. It lies outside of the zoo because SQLite's locks fail on network file systems and a zoo may be
read-only or no directory at all.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

Place = tuple[str, str]
"""Key and stamp: where something was read, and a text that only this content has."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS said_1 (key TEXT, stamp TEXT, row TEXT, PRIMARY KEY (key, stamp)) WITHOUT ROWID"


def index_path(zoo_id: str) -> Path:
    """Where the cache of a zoo, and of its copies, lies."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "deltacompress" / "zoo" / f"{zoo_id}.sqlite"


def load(path: Path) -> dict[Place, dict[str, Any]]:
    """Everything known; empty if there is no usable cache."""
    try:
        if not path.is_file():
            return {}
        with closing(sqlite3.connect(path, timeout=1)) as base:
            base.execute(_SCHEMA)
            rows = base.execute("SELECT key, stamp, row FROM said_1").fetchall()
            said = json.loads("[" + ",".join(row for _, _, row in rows) + "]")  # one by one takes three times as long
            return {(key, stamp): one for (key, stamp, _), one in zip(rows, said, strict=True)}
    except OSError:  # a folder that this user may not look into
        return {}
    except (sqlite3.Error, ValueError):
        with suppress(OSError):
            path.unlink()
        return {}


def store_rows(path: Path, rows: Iterable[tuple[Place, dict[str, Any]]]) -> None:
    """Remember rows. A cache that cannot be written is done without: it only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=1)) as base, base:
            base.execute(_SCHEMA)
            base.executemany(
                "INSERT OR REPLACE INTO said_1 VALUES (?, ?, ?)", [(*place, json.dumps(row)) for place, row in rows]
            )
    except (sqlite3.Error, OSError):
        return
