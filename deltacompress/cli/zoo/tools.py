"""`deltacompress zoo`: lineage, comparison, moves without a network, signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import Name, ZooOption

_LARGEST = 10
"""Tensors that `diff` names."""
_LONGEST = 100
"""Characters of a cell, such as the names of a rule's tensors; --json has all of them."""


@verb
def lineage(
    console: Console,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only what this entry came from and what came of it.")
    ] = None,
    *,
    zoo: ZooOption = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a Mermaid flowchart.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write a picture to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a picture with other content.")] = False,
) -> None:
    """What came from what: base, fine-tuned, delta, and what was made from that."""
    from rich.text import Text

    from deltacompress.files.output import write_once
    from deltacompress.files.places import check_place
    from deltacompress.zoo.exchange.resolve import open_zoo
    from deltacompress.zoo.views import lineage_picture

    opened = open_zoo(zoo)
    for one in opened.list(all_versions=True):
        for problem in (one.problem, *one.alias_problems):
            if problem is not None:
                console.warn(problem)
    graph = opened.lineage(name)
    if svg is not None:
        check_place(svg)
        drawn = lineage_picture.svg(graph, f"lineage of {name or opened.where}").encode()
        written = write_once(svg, drawn, replace=force)
        console.note(f"picture in {svg}" + ("" if written else ", as it was"))
    text = lineage_picture.mermaid(graph) if mermaid else lineage_picture.tree(graph)
    data = graph.to_json() | ({"mermaid": text} if mermaid else {})
    console.result(data, lambda: Text(text or "nothing yet; add something with `zoo add`"))


@verb
def diff(
    console: Console,
    a: Annotated[str, typer.Argument(metavar="A", help="An entry, e.g. team/bot@1.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, e.g. team/bot@2.")],
    *,
    zoo: ZooOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every change of every tensor, not the largest few.")
    ] = False,
) -> None:
    """Compare two entries: facts, recipe, scores, tensors, and the bytes they share."""
    from rich.console import Group, RenderableType

    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo
    from deltacompress.zoo.views.diff import diff as diff_of

    data = diff_of(open_zoo(zoo), a, b)

    def tables() -> Group:
        found: list[RenderableType] = [
            render.rows(kind, [{key: _cell(row["what"], value) for key, value in row.items()} for row in data[kind]])
            for kind in ("facts", "recipe", "scores")
            if data[kind]
        ]
        if data["changes"]:
            found.append(render.rows("tensors that differ", [_sized(row) for row in data["changes"]]))
        if everything and data["tensors"]:
            told = [{key: _cell(row["what"], value) for key, value in row.items()} for row in data["tensors"]]
            found.append(render.rows("every change", told))
        elif data["changed"]:
            largest = [_sized(row) for row in data["changed"][:_LARGEST]]
            title = f"the largest {len(largest)} of {len(data['changed'])} (--all: every change of each)"
            found.append(render.rows(title, largest, spare=("kind", "change")))
        return Group(*found, render.summary(f"{data['a']} and {data['b']}", data))

    console.result(data, tables)


@verb
def export(
    console: Console,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The tar file to write.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="What to export.")] = None,
    *,
    zoo: ZooOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Every version of every name.")] = False,
) -> None:
    """Write versions, with what is attached to them, to one tar file."""
    from deltacompress.cli.shown import render
    from deltacompress.errors import InputError
    from deltacompress.zoo.exchange import transfer
    from deltacompress.zoo.exchange.resolve import open_zoo

    if everything == bool(names):
        raise InputError("give the NAMEs to export, or --all")
    opened = open_zoo(zoo)
    wanted = list(names or ())
    if everything:
        wanted = [f"{one.name}@{one.version}" for one in opened.list(all_versions=True)]
    with console.progress() as reporter:
        found = transfer.export(opened, wanted, out, reporter=reporter)
    data = {"out": str(out), "versions": list(found.versions), "blobs": found.blobs, "bytes": found.bytes}
    shown = data | {"versions": ", ".join(found.versions)}
    console.result(data, lambda: render.summary("exported", shown))


@verb
def import_(
    console: Console,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file of `zoo export`.")],
    *,
    zoo: ZooOption = None,
) -> None:
    """Publish what an export holds and the zoo lacks; a name gets the next version here."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange import transfer
    from deltacompress.zoo.exchange.resolve import open_zoo

    with console.progress() as reporter:
        rows = [asdict(one) for one in transfer.import_(open_zoo(zoo), file, reporter=reporter)]
    console.result(rows, lambda: render.rows(str(file), rows))


@verb
def keygen(
    console: Console,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Private key to write; the public one is FILE.pub.")],
) -> None:
    """Make an Ed25519 key pair to sign with (needs the extra `sign`)."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.entries.signing import make_key

    data = {"private": str(file), "public": f"{file}.pub", "public_key": make_key(file)}
    console.result(data, lambda: render.summary("new key", data))


@verb
def sign(
    console: Console,
    name: Name,
    *,
    key: Annotated[Path, typer.Option(help="Private key (PEM), e.g. of `zoo keygen`.")],
    zoo: ZooOption = None,
) -> None:
    """Sign a version; `zoo verify NAME --signed-by KEY.pub` checks it."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.entries.signing import sign as sign_entry
    from deltacompress.zoo.exchange.resolve import open_zoo

    opened = open_zoo(zoo)
    found = opened.resolve(name)
    data = {"entry": str(found), "digest": found.manifest, "public_key": sign_entry(opened, str(found), key)}
    console.result(data, lambda: render.summary("signed", data))


@verb
def attest(
    console: Console,
    name: Name,
    report: Annotated[
        Path, typer.Argument(metavar="REPORT", help="report.json of `deltacompress eval`, or another JSON object.")
    ],
    *,
    key: Annotated[Path | None, typer.Option(help="Also sign the report with this private key (PEM).")] = None,
    zoo: ZooOption = None,
) -> None:
    """Attach an evaluation report to the version that it measured; its numbers are scores that `list` filters by."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo

    opened = open_zoo(zoo)
    found = opened.resolve(name)
    digest = opened.attest(str(found), report, key=key)
    measured = dict(opened.scores(str(found)))
    data = {"entry": str(found), "report": digest, "signed": key is not None, "scores": measured}
    rows = [{"score": one, "value": value} for one, value in measured.items()]
    console.result(data, lambda: render.summary_and_rows("attached", data | {"scores": rows}, table="scores"))


def register(app: typer.Typer) -> None:
    """Add these verbs to the group."""
    for command in (lineage, diff, export, keygen, sign, attest):
        app.command(command.__name__)(command)
    app.command("import")(import_)


def _cell(what: str, value: object) -> str:
    """A value for a table; of a digest what tells it from others."""
    if value is None:
        return "-"
    if isinstance(value, int) and what.endswith("bytes"):
        return f"{value:,} B"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return f"{value[:12]}..."
    if isinstance(value, float):
        return f"{value:.4g}"
    return told if len(told := str(value)) <= _LONGEST else f"{told[:_LONGEST]}..."


def _sized(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with sizes in the place of bytes."""
    from deltacompress.cli.shown import render

    sides = {"a_bytes": "A", "b_bytes": "B"}
    return {
        sides.get(key, key): render.size(value) if key in sides and value is not None else value
        for key, value in row.items()
    }
