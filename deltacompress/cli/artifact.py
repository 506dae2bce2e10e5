"""Verbs over one artifact: `inspect`, `verify`, `restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.console import Console, verb

Artifact = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="Directory of the artifact (manifest.json and its parts).")
]


@verb
def inspect(console: Console, artifact: Artifact) -> None:
    """Show what an artifact holds: per tensor its codec, bits per weight, bytes and loss."""
    from deltacompress.artifact import load_delta
    from deltacompress.cli import render

    data = load_delta(artifact).summary()
    console.result(data, lambda: render.summary_and_rows(str(artifact), data, table="tensors", more="parts"))


@verb
def verify(
    console: Console,
    artifact: Artifact,
    *,
    base: Annotated[
        Path | None, typer.Option(help="Also check that this base is the one the delta was made from.")
    ] = None,
) -> None:
    """Check every byte of an artifact against its recorded hashes; exit code 3 if one is wrong."""
    from deltacompress.artifact import verify as verify_artifact
    from deltacompress.cli import render

    with console.progress() as reporter:
        verify_artifact(artifact, base=base, reporter=reporter)
    data = {"artifact": str(artifact), "base": None if base is None else str(base), "verified": True}
    console.result(data, lambda: render.summary("verified", data))


@verb
def restore(
    console: Console,
    artifact: Artifact,
    *,
    base: Annotated[Path, typer.Option(help="Directory of the base model the delta was made from.")],
    out: Annotated[Path, typer.Option(help="Directory to write the restored checkpoint to.")],
) -> None:
    """Write the fine-tuned model back as a Hugging Face checkpoint: base + delta."""
    from deltacompress.cli import render
    from deltacompress.restoration import restore as restore_checkpoint

    with console.progress() as reporter:
        restore_checkpoint(artifact, base=base, out=out, reporter=reporter)
    data = {"artifact": str(artifact), "base": str(base), "out": str(out)}
    console.result(data, lambda: render.summary("restored", data))
