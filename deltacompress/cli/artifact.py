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
    """Show what an artifact holds: per tensor its codec, bits per weight, bytes and loss."""
    from deltacompress.artifact.delta import load_delta
    from deltacompress.cli import render

    with console.progress() as reporter:
        data = load_delta(early.place(artifact, zoo, reporter=reporter)).summary(entropy=entropy)
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
    """Check every byte of an artifact against its recorded hashes; exit code 3 if one is wrong."""
    from deltacompress.artifact.delta import verify as verify_artifact
    from deltacompress.cli import render

    with console.progress() as reporter:
        verify_artifact(early.artifact(artifact, zoo, base=base, reporter=reporter), base=base, reporter=reporter)
    data = {"artifact": artifact, "base": None if base is None else str(base), "verified": True}
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
