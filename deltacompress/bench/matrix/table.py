"""From cells to a table: who attains the limits at which rate, and how much more than whole models. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltacompress.bench.matrix.cells import Cell

ENOUGH = 0.9
"""Of the requests, that must attain the limits."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Of the limits, at which the curve is drawn."""
Found = Mapping[Cell, Mapping[str, Any]]


def attained(data: Mapping[str, Any], factor: float = 1.0) -> float:
    """Share of all requests, those that got no end included, within the limits times `factor`."""
    first, each = data["identity"]["slo_ttft_s"] * factor, data["identity"]["slo_token_ms"] * factor / 1e3
    requests: list[list[float] | None] = data["requests"]
    good = [one for one in requests if one is not None and one[0] <= first and one[1] <= each]
    return len(good) / len(requests)


def rows(found: Found) -> list[dict[str, Any]]:
    """One for each cell, by popularity, system and rate."""
    ordered = sorted(found, key=lambda cell: (cell.popularity, cell.system, cell.rate))
    return [
        {
            "popularity": cell.popularity,
            "system": cell.system,
            "rate": cell.rate,
            "requests": len(found[cell]["requests"]),
            "attained": attained(found[cell]),
            **{name: found[cell]["row"][name] for name in ("failed", "e2e_mean", "ttft_mean", "ttft_p99", "tokens_s")},
        }
        for cell in ordered
    ]


def highest(found: Found) -> list[dict[str, Any]]:
    """The highest rate that each system bears: ENOUGH attain there and at every lower one. ratio: to that of swap.

    None where a system bears none of the rates, and for the ratio where swap does.
    """
    bears: dict[tuple[str, str], float | None] = {}
    for cell in sorted(found, key=lambda cell: (cell.popularity, cell.system, cell.rate)):
        at = cell.popularity, cell.system
        bears.setdefault(at, None)
        lower = [one for one in found if (one.popularity, one.system) == at and one.rate <= cell.rate]
        if all(attained(found[one]) >= ENOUGH for one in lower):
            bears[at] = cell.rate
    told = []
    for (popularity, system), rate in bears.items():
        swap = bears.get((popularity, "swap"))
        ratio = None if rate is None or swap is None else rate / swap
        told.append({"popularity": popularity, "system": system, "rate": rate, "ratio": ratio})
    return told


def to_markdown(found: Found) -> str:
    """Both, and what was measured on what."""
    if not found:
        return "No cell has been measured.\n"
    identity = next(iter(found.values()))["identity"]
    told = [f"| {name} | {value} |" for name, value in identity.items()]
    parts = [
        _table(f"Highest rate at which {ENOUGH:.0%} attain the limits", highest(found)),
        _table("Cells", rows(found)),
        "\n".join(["## Measured with", "", "| | |", "|---|---|", *told]) + "\n",
    ]
    return "\n".join(parts)


def _table(title: str, lines: Sequence[Mapping[str, Any]]) -> str:
    head = list(lines[0])
    cells = [[_cell(name, line[name]) for name in head] for line in lines]
    made = [head, ["---"] * len(head), *cells]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(one)} |" for one in made)]) + "\n"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "attained":
        return f"{value:.1%}"
    if name == "ratio":
        return f"{value:.1f}x"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
