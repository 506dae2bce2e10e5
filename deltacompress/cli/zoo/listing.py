"""`deltacompress zoo list`: which entries are shown, and what a table has room for."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import ZooOption, date
from deltacompress.errors import InputError

if TYPE_CHECKING:
    from deltacompress.zoo.entries.listing import Listed

Kind = Literal["delta", "base-ref", "adapter"]


@verb
def list_(
    console: Console,
    *,
    zoo: ZooOption = None,
    all_versions: Annotated[bool, typer.Option("--all-versions", help="Every version, not only the newest.")] = False,
    removed: Annotated[bool, typer.Option("--removed", help="Also versions that were removed.")] = False,
    kind: Annotated[Kind | None, typer.Option(help="Only entries of this kind.")] = None,
    base: Annotated[str | None, typer.Option(help="Only what belongs to this base: its entry, name or hash.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Only what this recipe made.")] = None,
    min_ratio: Annotated[float | None, typer.Option(help="Only what is at least so many times smaller.")] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(help="Only what a report says this of, e.g. sst2.acc>=0.9; may be repeated."),
    ] = None,
) -> None:
    """List the entries, or every version."""
    from deltacompress.cli.shown import render

    if min_ratio is not None and not math.isfinite(min_ratio):
        raise InputError("give a finite number, such as 8", where=f"--min-ratio {min_ratio}")
    from deltacompress.zoo.entries.scores import Condition
    from deltacompress.zoo.exchange.resolve import open_zoo
    from deltacompress.zoo.views.selection import Wanted, select

    conditions = tuple(Condition.parse(one) for one in score or ())
    opened = open_zoo(zoo)
    entries = opened.list(all_versions=all_versions, removed=removed)
    selected = select(opened, entries, Wanted(kind, base, recipe, min_ratio, conditions), console.note)
    rows = [_row(one.entry) | ({"scores": one.scores} if conditions else {}) for one in selected]
    for row in rows:
        for problem in (row["problem"], *row["alias_problems"]):
            if problem:
                console.warn(problem)
    asked = {one.score for one in conditions}
    shown = _without_empty([_short(row, asked) for row in rows])
    console.result(rows, lambda: render.rows(opened.where, shown, spare=("created", "base", "kind", "recipe")))


def register(app: typer.Typer) -> None:
    """Add this verb to the group."""
    app.command("list")(list_)


def _row(one: Listed) -> dict[str, Any]:
    return {
        "name": one.name,
        "version": one.version,
        "kind": one.kind,
        "recipe": one.summary.get("recipe"),
        "ratio": one.summary.get("ratio"),
        "bytes": one.bytes,
        "base": one.lineage.get("base_name"),
        "base_hash": one.lineage.get("base"),
        "finetuned": one.lineage.get("finetuned_name"),
        "relation": one.lineage.get("relation"),
        "aliases": list(one.aliases),
        "created": date(one.created),
        "digest": one.manifest,
        "removed": one.removed,
        "problem": one.problem,
        "alias_problems": list(one.alias_problems),
    }


def _short(row: Mapping[str, Any], asked: Collection[str]) -> dict[str, Any]:
    """What a table has room for. asked: the scores that were asked for."""
    from deltacompress.cli.shown import render

    state = "damaged" if row["problem"] else "removed" if row["removed"] else ""
    if row["alias_problems"]:
        state = f"{state}, alias damaged".lstrip(", ")
    told = {key: value for key, value in row.get("scores", {}).items() if key in asked}
    return {
        "entry": f"{row['name']}@{row['version']}",
        "aliases": ", ".join(row["aliases"]),
        "kind": row["kind"],
        "recipe": row["recipe"],
        "ratio": f"{ratio:.2f} x" if isinstance(ratio := row["ratio"], int | float) else None,
        "size": None if row["problem"] else render.size(row["bytes"]),
        "scores": ", ".join(f"{key} {value:.4g}" for key, value in told.items()),
        "state": state,
        "base": row["base"],
        "created": None if row["problem"] else row["created"][:10],
    }


def _without_empty(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the columns in which none of them has anything."""
    full = {key for row in rows for key, value in row.items() if value}
    return [{key: value for key, value in row.items() if key in full} for row in rows]
