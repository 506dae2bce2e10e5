"""Verbs over one artifact: `inspect`, `verify`, `restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli import early
from deltacompress.cli.console import Console, verb
from deltacompress.cli.models import model
from deltacompress.cli.options import ArtifactArgument, BaseOption, ReplaceCheckpoint
from deltacompress.cli.zoo_options import ZooOption
from deltacompress.errors import InputError, option, switch

_SPARE = ("damp_fraction", "kept", "status", "shape", "kind")
"""Columns that a narrow screen is spared."""


@verb
def inspect(
    console: Console,
    artifact: ArtifactArgument,
    *,
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Read all of it: how far stored bytes are above their order-0 entropy.")
    ] = False,
    zoo: ZooOption = None,
) -> None:
    """Show what an artifact holds: per tensor its codec, bits per weight, bytes and loss; or what a PEFT adapter is."""
    from deltacompress.artifact.delta import load_delta
    from deltacompress.cli import render

    with console.progress() as reporter:
        place = early.place(artifact, zoo, reporter=reporter)
        if early.holds_adapter(place):
            _inspect_adapter(console, place, entropy=entropy)
            return
        data = load_delta(place).summary(entropy=entropy)
    console.result(data, lambda: render.summary_and_rows(artifact, data, table="tensors", more="parts", spare=_SPARE))


@verb
def verify(
    console: Console,
    artifact: ArtifactArgument,
    *,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>", parser=model, help="Also check that this base is the one the delta was made from."
        ),
    ] = None,
    zoo: ZooOption = None,
) -> None:
    """Check every byte of an artifact against its recorded hashes; exit code 3 if one is wrong.

    A PEFT adapter records none: what its tensors hold is checked, and that it fits --base.
    """
    from deltacompress.artifact.delta import verify as verify_artifact
    from deltacompress.cli import render

    if base is not None:
        early.checkpoints(base)
    with console.progress() as reporter:
        place = early.place(artifact, zoo, base=base, reporter=reporter)
        if early.holds_adapter(place):
            _verify_adapter(console, place, base)
            return
        verify_artifact(early.artifact(str(place), None, base=base), base=base, reporter=reporter)
    data = {"artifact": artifact, "base": None if base is None else str(base), "verified": True}
    console.result(data, lambda: render.summary("verified", data))


def _inspect_adapter(console: Console, place: Path, *, entropy: bool) -> None:
    from deltacompress.adapters.summary import summarize
    from deltacompress.cli import render

    if entropy:
        told = "is of the codes of an artifact, and this is a PEFT adapter"
        raise InputError(told, where=switch("entropy"), way_out="leave it out")
    data = summarize(place)
    console.result(data, lambda: render.summary_and_rows(str(place), data, table="tensors"))


def _verify_adapter(console: Console, place: Path, base: Path | None) -> None:
    """Its names, shapes and values; of an entry of a zoo, pulling has compared the bytes with their digests."""
    from deltacompress.adapters.values import check_values
    from deltacompress.cli import render

    if base is None:
        told = "is needed: a PEFT adapter says little of itself, and is checked against its base"
        raise InputError(told, where=option("base"), way_out="give the model that it was trained on")
    adapter = early.adapter(place, base)
    check_values(adapter)
    console.note("a PEFT adapter has no recorded hashes: its config, names, shapes and values were checked")
    data = {"adapter": str(place), "base": str(base), "kind": adapter.kind, "modules": adapter.modules}
    data |= {"digest": adapter.digest, "verified": True}
    console.result(data, lambda: render.summary("verified", data))


@verb
def restore(
    console: Console,
    artifact: ArtifactArgument,
    *,
    base: BaseOption,
    out: Annotated[Path, typer.Option(help="Directory to write the restored checkpoint to.")],
    zoo: ZooOption = None,
    force: ReplaceCheckpoint = False,
) -> None:
    """Write the fine-tuned model back as a Hugging Face checkpoint: base + delta."""
    from deltacompress.cli import render

    early.output(out, replaces="checkpoint")
    with console.progress() as reporter:
        place = early.artifact(artifact, zoo, base=base, reporter=reporter)
        from deltacompress.artifact.restoration import restore as restore_checkpoint

        restore_checkpoint(place, base=base, out=out, force=force, reporter=reporter)
    data = {"artifact": artifact, "base": str(base), "out": str(out)}
    console.result(data, lambda: render.summary("restored", data))
