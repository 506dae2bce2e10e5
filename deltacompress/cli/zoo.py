"""`deltacompress zoo`: the verbs that put entries into a zoo and get them out; the others are in the modules beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deltacompress.cli import zoo_care, zoo_tools
from deltacompress.cli.console import Console, verb
from deltacompress.cli.zoo_options import Name, ZooOption, clean, date

if TYPE_CHECKING:
    from deltacompress.zoo.listing import Listed

app = typer.Typer(help="Keep deltas, adapters and base identities in a zoo.", no_args_is_help=True)
Relation = Literal["quantized", "recompressed", "merge", "distilled", "finetune"]
Kind = Literal["delta", "base-ref", "adapter", "block"]


@app.command("init")
@verb
def init(
    console: Console,
    path: Annotated[str, typer.Argument(metavar="PATH", help="New or empty directory, or s3://bucket/prefix.")],
) -> None:
    """Make a zoo, after a trial of whether the place can carry one."""
    from deltacompress.cli import render
    from deltacompress.zoo import Zoo

    zoo = Zoo.init(path)
    data = {"zoo": zoo.where, "id": zoo.id, "capabilities": list(zoo.capabilities)}
    console.result(data, lambda: render.summary("new zoo", data))


@app.command("add")
@verb
def add(
    console: Console,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Directory of an artifact, a PEFT adapter or a base model (or its hub id)."
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="namespace/name; the zoo gives the version.")],
    *,
    zoo: ZooOption = None,
    base: Annotated[str | None, typer.Option(help="The base entry it belongs to, if several could be meant.")] = None,
    parent: Annotated[list[str] | None, typer.Option(help="An entry it was made from; may be repeated.")] = None,
    relation: Annotated[Relation | None, typer.Option(help="How it was made from its parents.")] = None,
    hub_id: Annotated[str | None, typer.Option(help="Hub id of a base model that lies in a directory.")] = None,
    revision: Annotated[str | None, typer.Option(help="Its commit.")] = None,
) -> None:
    """Publish a directory as the next version of NAME; prints name@version once that is durable."""
    from rich.text import Text

    from deltacompress.zoo import linking
    from deltacompress.zoo.resolve import open_zoo

    opened = open_zoo(zoo)
    path = Path(source)
    if not path.is_dir():
        from deltacompress.checkpoint import Checkpoint
        from deltacompress.publication import hub_origin

        path = Checkpoint.open(source).path  # a base model of the hub, or a clear error
        found, commit = hub_origin(path)
        hub_id, revision = hub_id or found, revision or commit
    with console.progress() as reporter:
        added = linking.add(
            opened,
            path,
            name,
            base=base,
            parents=parent or (),
            relation=relation,
            hub_id=hub_id,
            revision=revision,
            reporter=reporter,
        )
    published = added.published
    data = {
        "name": published.name,
        "version": published.version,
        "kind": added.kind,
        "base": added.base,
        "digest": published.manifest,
        "bytes": published.bytes,
    }
    console.result(data, lambda: Text(str(published)))


@app.command("list")
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
            if not all(condition.holds(row["scores"]) for condition in conditions):
                continue
        rows.append(row)
    for row in rows:
        if row["problem"]:
            console.warn(row["problem"])
    console.result(rows, lambda: render.rows(opened.where, [clean(_short(row)) for row in rows]))


@app.command("show")
@verb
def show(
    console: Console,
    name: Name,
    *,
    zoo: ZooOption = None,
    card: Annotated[bool, typer.Option("--card", help="The model card (README.md) for the Hugging Face hub.")] = False,
) -> None:
    """Show what an entry is, what it descends from and what is attached to it."""
    from rich.text import Text

    from deltacompress.cli import render
    from deltacompress.zoo.card import card as card_of
    from deltacompress.zoo.reports import scores
    from deltacompress.zoo.resolve import open_zoo

    opened = open_zoo(zoo)
    if card:
        text = card_of(opened, name)
        console.result({"card": text}, lambda: Text(text.rstrip("\n")))
        return
    found, entry = opened.show(name)
    data: dict[str, Any] = {
        "name": found.name,
        "version": found.version,
        "kind": entry.kind,
        "digest": found.manifest,
        "created": date(found.created),
        "bytes": entry.logical_bytes + found.size,
        "base": entry.lineage.base_name,
        "finetuned": entry.lineage.finetuned_name,
        "relation": entry.lineage.relation,
    }
    data |= dict(entry.summary)
    data["files"] = [
        {"file": file, "bytes": sum(one.size for one in layers), "blobs": len(layers)}
        for file, layers in entry.files().items()
    ]
    data["scores"] = scores(opened, str(found))
    data["attached"] = [{"kind": one.kind, "digest": one.digest} for one in opened.referrers(str(found))]
    data["manifest"] = entry.model_dump(mode="json")
    plain = clean({key: value for key, value in data.items() if key != "manifest"})
    console.result(data, lambda: render.summary_and_rows(str(found), plain, table="files", more="attached"))


@app.command("pull")
@verb
def pull(
    console: Console,
    name: Name,
    target: Annotated[str, typer.Argument(metavar="DIR", help="New directory, or another zoo (path or URL).")],
    *,
    zoo: ZooOption = None,
) -> None:
    """Get an entry, verified while it streams; run it again to go on after an interruption."""
    from deltacompress.cli import render
    from deltacompress.zoo.resolve import open_zoo

    if "://" in target or (Path(target) / "zoo.json").is_file():
        _copy(console, name, zoo, target, None)
        return
    opened = open_zoo(zoo)
    found = opened.resolve(name)
    with console.progress() as reporter:
        out = opened.pull(str(found), target, reporter=reporter)
    data = {"name": found.name, "version": found.version, "out": str(out), "verified": True}
    console.result(data, lambda: render.summary("pulled", data))


@app.command("push")
@verb
def push(
    console: Console,
    name: Name,
    target: Annotated[str, typer.Argument(metavar="ZOO", help="The zoo to copy it to (path or URL).")],
    *,
    zoo: ZooOption = None,
    rename: Annotated[str | None, typer.Option("--as", help="Publish it there under another name.")] = None,
) -> None:
    """Copy an entry, and what is attached to it, to another zoo; what is there already is not sent again."""
    _copy(console, name, zoo, target, rename)


def _copy(console: Console, name: str, zoo: str | None, target: str, rename: str | None) -> None:
    from deltacompress.cli import render
    from deltacompress.zoo import Zoo
    from deltacompress.zoo.resolve import open_zoo

    opened, other = open_zoo(zoo), Zoo.open(target)
    found = opened.resolve(name)
    with console.progress() as reporter:
        new = opened.push(str(found), other, rename, reporter=reporter)
    data = {"from": str(found), "zoo": other.where, "name": new.name, "version": new.version, "bytes": new.bytes}
    console.result(data, lambda: render.summary("copied", data))


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
    }


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """What a table has room for."""
    state = "damaged" if row["problem"] else "removed" if row["removed"] else ""
    return {
        "entry": f"{row['name']}@{row['version']}",
        "kind": row["kind"],
        "base": row["base"],
        "recipe": row["recipe"],
        "ratio": row["ratio"] if row["ratio"] is None else f"{row['ratio']:.2f} x",
        "bytes": row["bytes"],
        "aliases": ", ".join(row["aliases"]),
        "created": row["created"][:10],
        **({"scores": ", ".join(f"{k} {v:.4g}" for k, v in row["scores"].items())} if "scores" in row else {}),
        "state": state,
    }


zoo_care.register(app)
zoo_tools.register(app)
