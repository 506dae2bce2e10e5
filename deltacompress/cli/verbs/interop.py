"""Verbs for other tools' checkpoint formats: `export`, `dequantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.given import early
from deltacompress.cli.given.models import model
from deltacompress.cli.given.options import ArtifactArgument, ReplaceCheckpoint
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import ZooOption


@verb
def export(
    console: Console,
    artifact: ArtifactArgument,
    *,
    out: Annotated[Path, typer.Option(help="Directory to write the GPTQ checkpoint to.")],
    zoo: ZooOption = None,
    force: ReplaceCheckpoint = False,
) -> None:
    """Write an artifact of recipe gptq-4bit as a GPTQ checkpoint, for engines that serve one model alone."""
    from deltacompress.cli.shown import render

    early.output(out, replaces="checkpoint")
    with console.progress() as reporter:
        place = early.artifact(artifact, zoo, reporter=reporter)
        with nothing_begun():
            from deltacompress.interop import export_gptq

        export_gptq(place, out=out, force=force, reporter=reporter)
    data = {"artifact": artifact, "out": str(out), "format": "gptq"}
    console.result(data, lambda: render.summary("exported", data))


@verb
def dequantize(
    console: Console,
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=model, help="Directory of a GPTQ checkpoint.")],
    *,
    out: Annotated[Path, typer.Option(help="Directory to write the dense checkpoint to.")],
    force: ReplaceCheckpoint = False,
) -> None:
    """Write the dense checkpoint that a GPTQ checkpoint stands for, so that every other verb can take it."""
    from deltacompress.cli.shown import render

    early.output(out, replaces="checkpoint")
    early.checkpoints(model)
    with nothing_begun():
        from deltacompress.interop import dequantize as dequantize_model

    with console.progress() as reporter:
        dequantize_model(model, out=out, force=force, reporter=reporter)
    data = {"model": str(model), "out": str(out)}
    console.result(data, lambda: render.summary("dequantized", data))
