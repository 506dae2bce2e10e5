"""`deltacompress zoo`: the verbs that put entries into a zoo and get them out; the others are in the modules beside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deltacompress.cli.given.once import Verbs
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo import care, listing, tools
from deltacompress.cli.zoo.options import Name, ZooOption, date
from deltacompress.errors import InputError

app = Verbs(help="Keep deltas, adapters and base identities in a zoo.", no_args_is_help=True)
Relation = Literal["quantized", "recompressed", "merge", "distilled", "finetune"]


@app.command("init")
@verb
def init(
    console: Console,
    path: Annotated[str, typer.Argument(metavar="PATH", help="New or empty directory, or s3://bucket/prefix.")],
) -> None:
    """Make a zoo, after a trial of whether the place can carry one."""
    from deltacompress.cli.shown import render
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
    base: Annotated[str | None, typer.Option(help="The entry beneath it, if several could be meant.")] = None,
    parent: Annotated[list[str] | None, typer.Option(help="What an artifact was made from; may be repeated.")] = None,
    relation: Annotated[Relation | None, typer.Option(help="How it was made from its parents.")] = None,
    hub_id: Annotated[str | None, typer.Option(help="Hub id of a base model that lies in a directory.")] = None,
    revision: Annotated[str | None, typer.Option(help="Its commit.")] = None,
) -> None:
    """Publish a directory as the next version of NAME; prints name@version once that is durable."""
    from rich.text import Text

    from deltacompress.zoo.entries import linking
    from deltacompress.zoo.exchange.resolve import open_zoo

    opened = open_zoo(zoo)
    path, found_id, commit = _source(source)
    is_base = linking.kind_of(path) == "base-ref"
    with console.progress() as reporter:
        added = linking.add(
            opened,
            path,
            name,
            base=base,
            parents=parent or (),
            relation=relation,
            hub_id=hub_id or (found_id if is_base else None),
            revision=revision or (commit if is_base else None),
            reporter=reporter,
        )
    published = added.published
    data = {
        "name": published.name,
        "version": published.version,
        "kind": added.kind,
        "base": added.base,
        "same_as": published.same_as,
        "digest": published.manifest,
        "bytes": published.bytes,
    }
    console.result(data, lambda: Text(str(published)))


def _source(source: str) -> tuple[Path, str | None, str | None]:
    """The directory to add; of a base model that is fetched from the hub, its id and commit, too.

    Raises:
        InputError: neither a directory nor what may be a hub id.
        CheckpointError: it cannot be fetched.
    """
    path = Path(source)
    if path.exists() and not path.is_dir():
        raise InputError(
            "not a directory", where=source, way_out="give that of an artifact, a PEFT adapter or a base model"
        )
    if path.is_dir():
        return path, None, None
    if source.count("/") != 1 or source.startswith((".", "/", "~")):  # told before torch is imported, for seconds
        raise InputError("no such directory", where=source, way_out="give one, or the hub id of a base model: org/name")
    from deltacompress.checkpoints.hub import hub_origin
    from deltacompress.checkpoints.reader import Checkpoint

    path = Checkpoint.open(source).path  # a base model of the hub, or a clear error
    return path, *hub_origin(path)


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
    from rich.console import Group
    from rich.text import Text

    from deltacompress.cli.shown import render
    from deltacompress.zoo.entries.reports import scores
    from deltacompress.zoo.exchange.resolve import open_zoo
    from deltacompress.zoo.views.card import card as card_of

    opened = open_zoo(zoo)
    if card:
        text = card_of(opened, name)
        console.result({"card": text}, lambda: Text(text.rstrip("\n")))
        return
    found, entry = opened.show(name)
    own: dict[str, Any] = {
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
    data = own | dict(entry.summary) | own  # whoever made the entry wrote its summary: what is known here counts
    data["files"] = [
        {"file": file, "bytes": sum(one.size for one in layers), "blobs": len(layers)}
        for file, layers in entry.files().items()
    ]
    data["scores"] = scores(opened, str(found))
    data["attached"] = [{"kind": one.kind, "digest": one.digest} for one in opened.referrers(str(found))]
    data["manifest"] = entry.model_dump(mode="json")
    measured = [{"score": key, "value": value} for key, value in data["scores"].items()]

    def tables() -> Group:
        lists = {"files": data["files"], "attached": data["attached"], "scores": measured}
        found_tables = [render.rows(title, rows) for title, rows in lists.items() if rows]
        return Group(*found_tables, render.summary(str(found), data))

    console.result(data, tables)


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
    from deltacompress.cli.shown import render
    from deltacompress.files.places import ZOO
    from deltacompress.zoo.exchange.resolve import open_zoo

    if "://" in target or (Path(target) / ZOO).is_file():
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
    from deltacompress.cli.shown import render
    from deltacompress.zoo import Zoo
    from deltacompress.zoo.exchange.resolve import open_zoo

    opened, other = open_zoo(zoo), Zoo.open(target)
    found = opened.resolve(name)
    with console.progress() as reporter:
        new = opened.push(str(found), other, rename, reporter=reporter)
    data = {
        "from": str(found),
        "zoo": other.where,
        "name": new.name,
        "version": new.version,
        "same_as": new.same_as,
        "bytes": new.bytes,
    }
    shown = {key: value for key, value in data.items() if value is not None}
    console.result(data, lambda: render.summary("copied", shown))


listing.register(app)
care.register(app)
tools.register(app)
