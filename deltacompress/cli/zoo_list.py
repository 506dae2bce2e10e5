"""`deltacompress zoo list`: which entries are shown, by what they are and by what was measured of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deltacompress.cli.console import Console, verb
from deltacompress.cli.zoo_options import ZooOption, clean, date

if TYPE_CHECKING:
    from deltacompress.zoo.listing import Listed

Kind = Literal["delta", "base-ref", "adapter", "block"]
_NAMED = 10
"""Scores that a note names at most."""


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
        typer.Option(help="Only what a report says this of, e.g. sst2.accuracy>=0.9; may be repeated."),
    ] = None,
) -> None:
    """List the entries, or every version."""
    from deltacompress.cli import render
    from deltacompress.zoo.linking import base_refs
    from deltacompress.zoo.reports import Condition, scores
    from deltacompress.zoo.resolve import open_zoo

    conditions = [Condition.parse(one) for one in score or ()]
    opened = open_zoo(zoo)
    entries = opened.list(all_versions=all_versions, removed=removed)
    refs = base_refs(opened) if base is not None else []
    called = {
        (one.name, f"{one.name}@{one.version}", one.summary.get("hub_id")): one.lineage.get("base") for one in refs
    }
    hashes = {content for names, content in called.items() if base in names}

    def belongs(one: Listed) -> bool:
        told = (one.lineage.get("base_name"), one.lineage.get("base"))
        return base in told or (len(str(base)) >= 8 and str(told[1]).startswith(str(base))) or told[1] in hashes

    rows = []
    measured: set[str] = set()
    for one in entries:
        ratio = one.summary.get("ratio")
        if (
            (kind is not None and one.kind != kind)
            or (base is not None and not belongs(one))
            or (recipe is not None and one.summary.get("recipe") != recipe)
            or (min_ratio is not None and (not isinstance(ratio, int | float) or ratio < min_ratio))
        ):
            continue
        row = _row(one)
        if conditions:
            if one.problem is not None or one.removed:
                continue
            row["scores"] = scores(opened, f"{one.name}@{one.version}")
            measured |= row["scores"].keys()
            if not all(condition.holds(row["scores"]) for condition in conditions):
                continue
        rows.append(row)
    for row in rows:
        for problem in (row["problem"], *row["alias_problems"]):
            if problem:
                console.warn(problem)
    if unknown := {one.score for one in conditions} - measured:
        console.note(_known(min(unknown), sorted(measured)))
    asked = {one.score for one in conditions}
    console.result(rows, lambda: render.rows(opened.where, [clean(_short(row, asked)) for row in rows]))


def register(app: typer.Typer) -> None:
    """Add this verb to the group."""
    app.command("list")(list_)


def _known(score: str, measured: Sequence[str]) -> str:
    """Why a condition on `score` finds nothing."""
    if not measured:
        return f"--score {score}: none of these entries has a score; `zoo attest` attaches a report"
    more = f" and {len(measured) - _NAMED} more" if len(measured) > _NAMED else ""
    return f"--score {score}: none of these entries has it; their scores: {', '.join(measured[:_NAMED])}{more}"


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


def _short(row: dict[str, Any], asked: Collection[str]) -> dict[str, Any]:
    """What a table has room for. asked: the scores that were asked for."""
    state = "damaged" if row["problem"] else "removed" if row["removed"] else ""
    if row["alias_problems"]:
        state = f"{state}, alias damaged".lstrip(", ")
    told = {key: value for key, value in row.get("scores", {}).items() if key in asked}
    return {
        "entry": f"{row['name']}@{row['version']}",
        "kind": row["kind"],
        "base": row["base"],
        "recipe": row["recipe"],
        "ratio": row["ratio"] if row["ratio"] is None else f"{row['ratio']:.2f} x",
        "bytes": row["bytes"],
        "aliases": ", ".join(row["aliases"]),
        "created": row["created"][:10],
        **({"scores": ", ".join(f"{key} {value:.4g}" for key, value in told.items())} if told else {}),
        "state": state,
    }
