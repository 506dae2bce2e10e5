"""From rows to the table: means over seeds with their spread, and what is best at each size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

Row = Mapping[str, Any]
_AVERAGED = ("ratio", "linear_bits_per_weight", "kl", "accuracy", "difference")


def means(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each task, method and size: means over seeds, how many, and the least and the largest KL.

    Methods that could not be so small have none.
    """
    groups: dict[tuple[str, str, float | None], list[Row]] = {}
    for row in rows:
        if row["ratio"] is not None:
            groups.setdefault((row["task"], row["method"], row["asked"]), []).append(row)
    return [_mean(key, found) for key, found in groups.items()]


def _mean(key: tuple[str, str, float | None], rows: Sequence[Row]) -> dict[str, Any]:
    task, method, asked = key
    averaged = {
        name: sum(row[name] for row in rows) / len(rows)
        for name in _AVERAGED
        if all(row.get(name) is not None for row in rows)
    }
    kl = [row["kl"] for row in rows]
    named = {"task": task, "method": method, "asked": asked, "seeds": len(rows)}
    return named | averaged | {"kl_least": min(kl), "kl_most": max(kl)}


def frontier(found: Sequence[Row], task: str) -> list[Row]:
    """Of one task what nothing beats: no other row is both smaller and nearer. From large to small artifacts."""
    own = sorted((one for one in found if one["task"] == task), key=lambda one: (-one["ratio"], one["kl"]))
    best: list[Row] = []
    for one in own:
        if not best or one["kl"] < best[-1]["kl"]:
            best.append(one)
    return best[::-1]


def predictions(rows: Sequence[Row]) -> dict[str, Any]:
    """How many of a budget's predictions are within a quarter of the KL that was reached, of how many; and how many a
    perfect prediction would be, by the standard errors of what was reached alone.

    Where the true value is t, what is reached is t (1 + r z), for z drawn from the standard normal distribution: it is
    within a quarter of t where -0.2 <= r z <= 1/3. r: the standard error over what was reached.
    """
    found = [(row["kl_predicted"], row["kl_judged"], row["kl_error"]) for row in rows if row.get("kl_judged")]
    if not found:
        return {}
    normal = NormalDist()
    errors = [error / reached for _, reached, error in found]
    perfect = [1.0 if not r else normal.cdf(1 / 3 / r) - normal.cdf(-0.2 / r) for r in errors]
    within = sum(abs(told - reached) <= reached / 4 for told, reached, _ in found)
    return {"predictions": len(found), "within_a_quarter": within, "of_perfect_ones": sum(perfect)}


def to_markdown(found: Sequence[Row]) -> str:
    """A table for each task, by size; bold is what nothing beats."""
    parts = []
    for task in dict.fromkeys(one["task"] for one in found):
        winners = [id(one) for one in frontier(found, task)]
        own = sorted((one for one in found if one["task"] == task), key=lambda one: (one["ratio"], one["kl"]))
        scored = any("accuracy" in one for one in own)
        head = ["ratio", "method", "asked", "linear bits", "KL", "least to most", "seeds"]
        head += ["accuracy", "difference"] if scored else []
        lines = [f"## {task}", "", _line(head), _line(["---"] * len(head))]
        lines += [_line(_cells(one, scored=scored, best=id(one) in winners)) for one in own]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) or "Nothing that was asked for is so small.\n"


def _cells(one: Row, *, scored: bool, best: bool) -> list[str]:
    bold = "**" if best else ""
    bits, asked = one.get("linear_bits_per_weight"), one["asked"]
    cells = [
        f"{one['ratio']:.2f}x",
        f"{bold}{one['method']}{bold}",
        "" if asked is None else f"{asked:g}x",
        "" if bits is None else f"{bits:.2f}",
        f"{bold}{one['kl']:.2g}{bold}",
        f"{one['kl_least']:.2g} to {one['kl_most']:.2g}",
        str(one["seeds"]),
    ]
    return cells + ([f"{one['accuracy']:.1f}", f"{one['difference']:+.1f}"] if scored else [])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
