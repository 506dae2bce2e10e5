"""`deltacompress zoo`: the verbs that change what names mean, and those that keep a zoo whole and small."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import Name, ZooOption, date


@verb
def tag(
    console: Console,
    name: Name,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="e.g. prod; moved if it is there already.")],
    *,
    zoo: ZooOption = None,
    expect: Annotated[
        int | None, typer.Option(min=0, help="Refuse unless the alias points to this version now (0: is new).")
    ] = None,
) -> None:
    """Let an alias point to a version; of two people who move it at the same time, one is told."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo

    move = open_zoo(zoo).tag(name, alias, expect=expect)
    if move.rollback:
        console.note(f"{move.name}@{alias} went back to the older version {move.version}")
    data = asdict(move) | {"created": date(move.created)}
    console.result(data, lambda: render.summary(f"{move.name}@{alias}", data))


@verb
def history(console: Console, name: Name, *, zoo: ZooOption = None) -> None:
    """Every move of an alias (namespace/name@alias), oldest first."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo

    rows = [asdict(move) | {"created": date(move.created)} for move in open_zoo(zoo).history(name)]
    console.result(rows, lambda: render.rows(name, rows))


@verb
def rm(
    console: Console,
    name: Name,
    *,
    zoo: ZooOption = None,
    force: Annotated[bool, typer.Option("--force", help="Also if an alias points there.")] = False,
) -> None:
    """Remove a version (name@7), or all of them (name); `undelete` takes it back until the trash is emptied."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo
    from deltacompress.zoo.ledger.names import parse

    data = {"name": parse(name).name, "removed": list(open_zoo(zoo).rm(name, force=force))}
    shown = data | {"removed": ", ".join(map(str, data["removed"]))}
    console.result(data, lambda: render.summary("removed", shown))


@verb
def undelete(console: Console, name: Name, *, zoo: ZooOption = None) -> None:
    """Take back the removal of a version (name@7)."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo

    with console.progress() as reporter:
        open_zoo(zoo).undelete(name, reporter=reporter)
    data = {"restored": name}
    console.result(data, lambda: render.summary("undeleted", data))


@verb
def verify(
    console: Console,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One entry; everything by default.")] = None,
    *,
    zoo: ZooOption = None,
    sample: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Read only this share of the blobs, drawn at random.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw.", show_default="a new one")] = None,
    signed_by: Annotated[
        list[Path] | None, typer.Option(help="Public key (PEM): NAME must carry a signature of one of those given.")
    ] = None,
) -> None:
    """Check every byte against its hash; exit code 3 if anything is damaged, missing or does not belong there."""
    from deltacompress.errors import ChecksumError, InputError, IntegrityError
    from deltacompress.zoo.exchange.resolve import open_zoo

    if sample is not None and sample <= 0:
        raise InputError("--sample must be more than 0 and at most 1")
    if signed_by and name is None:
        raise InputError("--signed-by needs the NAME of an entry")
    opened = open_zoo(zoo)
    signer, wrong = None, None
    if signed_by and name is not None:
        from deltacompress.zoo.entries.signing import require

        name = str(opened.resolve(name))  # once: an alias may move meanwhile
        try:
            signer = require(opened, name, signed_by).public_key
        except IntegrityError as error:  # told unless the bytes are at fault
            wrong = error
    with console.progress() as reporter:
        report = opened.verify(name, share=1.0 if sample is None else sample, seed=seed, reporter=reporter)
    if report.ok and wrong is not None:
        raise wrong
    data: dict[str, Any] = asdict(report) | {"ok": report.ok, "signed_by": signer if report.ok else None}
    _report(console, opened.where, data)
    if not report.ok:
        raise ChecksumError(_told(data["problems"]))


@verb
def fsck(
    console: Console,
    *,
    zoo: ZooOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended, from the trash or --from.")
    ] = False,
    copy: Annotated[
        str | None, typer.Option("--from", help="Another copy of this zoo to take good bytes from.")
    ] = None,
) -> None:
    """Check everything and, with --repair, mend it; exit code 3 if something is still wrong."""
    from deltacompress.errors import ChecksumError, InputError
    from deltacompress.zoo import Zoo
    from deltacompress.zoo.exchange.resolve import open_zoo

    if copy is not None and not repair:
        raise InputError("--from is for repairing", way_out="add --repair")
    opened = open_zoo(zoo)
    with console.progress() as reporter:
        found = opened.fsck(repair=repair, copy=None if copy is None else Zoo.open(copy), reporter=reporter)
    data = asdict(found.left) | {"ok": found.ok, "repaired": list(found.repaired)}
    for key in found.repaired:
        console.note(f"repaired {key}")
    _report(console, opened.where, data)
    if not found.ok:
        raise ChecksumError(_told(data["problems"]))


@verb
def gc(
    console: Console,
    *,
    zoo: ZooOption = None,
    grace: Annotated[
        float | None, typer.Option(min=0, help="Hours that a publication under way may take.", show_default="24")
    ] = None,
    empty_trash: Annotated[
        bool, typer.Option("--empty-trash", help="First delete for good what earlier collections removed.")
    ] = False,
) -> None:
    """Move what no version needs to the trash; safe beside publishers, readers and other collectors."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.care.gc import GRACE
    from deltacompress.zoo.exchange.resolve import open_zoo

    seconds = GRACE if grace is None else 3600 * grace
    data = asdict(open_zoo(zoo).gc(grace=seconds, empty_trash=empty_trash))
    if data["left"]:
        console.warn(f"the disk is full: {data['left']} blobs wait; free the trash with `zoo gc --empty-trash`")
    console.result(data, lambda: render.summary("collected", data))


@verb
def du(console: Console, *, zoo: ZooOption = None) -> None:
    """Logical and physical size: what sharing saves, and what gc would free."""
    from deltacompress.cli.shown import render
    from deltacompress.zoo.exchange.resolve import open_zoo

    opened = open_zoo(zoo)
    data = asdict(opened.du())
    data["entries"] = [
        {"entry": f"{one['name']}@{one['version']}", "logical_bytes": one["logical"], "unique_bytes": one["unique"]}
        for one in data["entries"]
    ]
    for key in ("logical", "physical", "unreferenced", "trash"):
        data[f"{key}_bytes"] = data.pop(key)
    console.result(data, lambda: render.summary_and_rows(opened.where, data, table="entries"))


def register(app: typer.Typer) -> None:
    """Add these verbs to the group."""
    for command in (tag, history, rm, undelete, verify, fsck, gc, du):
        app.command(command.__name__)(command)


def _report(console: Console, where: str, data: dict[str, Any]) -> None:
    from deltacompress.cli.shown import render

    rows = [{"kind": one["kind"], "what": one["message"]} for one in data["problems"]]
    shown = {key: value for key, value in data.items() if key != "problems"} | ({"problems": rows} if rows else {})
    console.result(data, lambda: render.summary_and_rows(where, shown, table="problems" if rows else ""))


def _told(problems: list[dict[str, Any]]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]['message']}{more}"
