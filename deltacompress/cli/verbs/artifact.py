"""Verbs over one artifact: `inspect`, `verify`, `restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.given import early
from deltacompress.cli.given.models import model
from deltacompress.cli.given.named import OverOne, beneath
from deltacompress.cli.given.options import ArtifactArgument, BaseOption, ReplaceCheckpoint
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import ZooOption
from deltacompress.errors import CheckpointError, InputError, option, switch

_SPARE = ("damp_fraction", "kept", "status", "shape", "kind")
"""Columns that a narrow screen is spared."""
_NOTES = {
    "loss": "squared error over that of storing nothing; obs: of outputs on the calibration data, others: of weights",
    "kept": "obs: the share of the delta's effect on those outputs that is stored (1: all of it)",
    "damp_fraction": "obs: what steadied the solver, added to the Hessian's diagonal, over the mean of that",
}
"""What the columns mean whose names do not say it."""


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
    from deltacompress.adapters.directory import is_adapter
    from deltacompress.artifact.delta import load_delta
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        place = early.place(artifact, zoo, reporter=reporter)
        if is_adapter(place):
            _inspect_adapter(console, artifact, place, entropy=entropy)
            return
        data = load_delta(place).summary(entropy=entropy) | {"artifact": artifact}
    console.result(
        data,
        lambda: render.summary_and_rows(artifact, data, table="tensors", more="parts", spare=_SPARE, notes=_NOTES),
    )


@verb
def verify(
    console: Console,
    artifact: ArtifactArgument,
    *,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=model,
            help="Also check that the delta was made from this base, or that the adapter fits it.",
        ),
    ] = None,
    over: OverOne = None,
    zoo: ZooOption = None,
) -> None:
    """Check every byte of an artifact against its recorded hashes; exit code 3 if one is wrong.

    The directory of a PEFT adapter records none: what its tensors hold is checked, and with --base, that it fits there,
    or with --over, that it fits the fine-tuned model which that delta is.
    """
    from deltacompress.adapters.directory import is_adapter, need_adapter
    from deltacompress.artifact.delta import verify as verify_artifact
    from deltacompress.cli.shown import render

    if base is not None:
        early.checkpoints(base)
    with console.progress() as reporter:
        sources, under = beneath({"": artifact}, {} if over is None else {"": over}, zoo, base, reporter)
        below, place = under.get(""), early.place(sources[""], zoo, base=base, reporter=reporter)
        if is_adapter(place):
            _verify_adapter(console, place, base, below, entry=None if Path(artifact).is_dir() else artifact)
            return
        whole = early.artifact(str(place), None, base=base)  # what is neither is told as that
        if below is not None:
            need_adapter(place, f"leave out {option('over')}")
        verify_artifact(whole, base=base, reporter=reporter)
    data = {"artifact": artifact, "base": None if base is None else str(base), "verified": True}
    console.result(data, lambda: render.summary("verified", data))


def _inspect_adapter(console: Console, given: str, place: Path, *, entropy: bool) -> None:
    from deltacompress.adapters.adapter import check_alone, read_adapter
    from deltacompress.adapters.summary import summarize
    from deltacompress.cli.shown import render

    if entropy:
        told = "is of the codes of an artifact, and this is a PEFT adapter"
        raise InputError(told, where=switch("entropy"), way_out="leave it out")
    read = read_adapter(place)
    data = summarize(read) | {"adapter": given}
    try:
        check_alone(read)
    except CheckpointError as error:  # what is there is told all the same
        console.note(str(error))
    if data["left_out"]:
        console.note(f"not the adapter's own, and passed over: {', '.join(data['left_out'])}")
    console.result(data, lambda: render.summary_and_rows(given, data, table="changes"))


def _verify_adapter(console: Console, place: Path, base: Path | None, over: Path | None, *, entry: str | None) -> None:
    """Its names and values, and with a base, or a delta that it goes over, its shapes; the bytes of an entry were
    compared when it was pulled.
    """
    from deltacompress.adapters.adapter import check_alone, read_adapter
    from deltacompress.adapters.directory import base_note
    from deltacompress.adapters.summary import summarize
    from deltacompress.adapters.values import check_finite, check_values
    from deltacompress.checkpoints.hub import hub_origin
    from deltacompress.cli.shown import render

    if over is not None and base is not None:
        from deltacompress.artifact.delta import load_delta
        from deltacompress.checkpoints.reader import Checkpoint

        load_delta(over).check_base(Checkpoint.open(base))
    if base is None and over is None:
        shapes, read = "config, names and values", read_adapter(place)
        check_alone(read)
        told = summarize(read)
        check_finite(read.weights, read.stamp, read.tensors.values())
    else:
        shapes, adapter = "config, names, shapes and values", early.adapter(place, base, over)
        check_values(adapter)
        told = {"kind": adapter.kind, "modules": adapter.modules, "digest": adapter.digest}
        of_base = None if over is not None or base is None else base_note(place, hub_origin(base)[0])
        for note in (*adapter.notes, *([] if of_base is None else [of_base])):
            console.note(f"{entry or place}: {note}")
    if entry is None:
        more = "" if over is not None or base is not None else f"; whether its tensors fit, {option('base')} tells"
        console.note(f"a PEFT adapter's directory has no recorded hashes: its {shapes} were checked{more}")
    data = {"adapter": entry or str(place), "base": None if base is None else str(base), "kind": told["kind"]}
    data |= {} if over is None else {"over": str(over)}
    data |= {"modules": told["modules"], "digest": told["digest"], "verified": True}
    data["compared_with"] = None if entry is None else f"the digests of {entry}"
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
    from deltacompress.cli.shown import render

    early.output(out, replaces="checkpoint")
    with console.progress() as reporter:
        place = early.artifact(artifact, zoo, base=base, reporter=reporter)
        with nothing_begun():
            from deltacompress.artifact.restoration import restore as restore_checkpoint

        restore_checkpoint(place, base=base, out=out, force=force, reporter=reporter)
    data = {"artifact": artifact, "base": str(base), "out": str(out)}
    console.result(data, lambda: render.summary("restored", data))
