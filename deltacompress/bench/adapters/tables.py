"""From the points of the study of requests to its tables, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltacompress.bench.adapters.loops import GAP


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is told of points in which a request was answered otherwise than rounding explains."""
    return [
        f"{row['system']}, {row['adapters']}, {row['load']}: WRONG: answered otherwise in company than alone, by "
        f"{row['gap']:.2f} standard deviations of the logits"
        for row in rows
        if row.get("gap", 0.0) > GAP
    ]


def tables_of(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by table. over_base: tokens a second over those of the base under the same load."""
    rows = [row for key, row in found.items() if "system" in row and not key.startswith("zipf")]
    base = {row["load"]: row["tokens_s"] for row in rows if row["system"] == "base"}
    for row in rows:
        row["over_base"] = row["tokens_s"] / base[row["load"]] if row["load"] in base else None
    nested = {"rivals": ("rivals", "peft"), "loads": ("loads",)}
    tables = {
        name: [row for key, some in found.items() if key.split(",")[0] in starts for row in some]
        for name, starts in nested.items()
    }
    return {"rows": rows, **tables, "zipf": [row for key, row in found.items() if key.startswith("zipf")]}
