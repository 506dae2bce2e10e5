"""LABEL=SOURCE of the command line: what is given under names, and what goes over what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.given import early
from deltacompress.cli.given.models import model
from deltacompress.errors import InputError, option
from deltacompress.evaluation.labels import BASE_LABEL
from deltacompress.reporter import SILENT, Reporter

Over = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]DELTA",
        help="The delta (directory, or entry of --zoo) of the model that the adapter NAME was trained on; repeatable.",
    ),
]
OverOne = Annotated[
    str | None,
    typer.Option(
        metavar="DELTA", help="The delta (directory, or entry of --zoo) of the model that the adapter was trained on."
    ),
]


Checkpoints = tuple[Path | None, dict[str, Path], bool]
"""The fine-tuned model, other checkpoints, whether the base too."""


def also(given: Sequence[str]) -> dict[str, str]:
    """NAME=SOURCE as a mapping.

    Raises:
        InputError: one is not of that form, or a name is there twice, or the base's.
    """
    found: dict[str, str] = {}
    for one in given:
        name, separator, source = one.partition("=")
        if not (name and separator and source):
            raise InputError("is not NAME=SOURCE", where=f"--also {one}", way_out="such as --also bot=path/of/adapter")
        if name == BASE_LABEL:
            raise InputError(f"is taken by the {name}", where=f"--also {one}", way_out="give another (NAME=SOURCE)")
        if name in found:
            raise InputError(f"the name {name} is given twice", where="--also", way_out="name each once")
        found[name] = source
    return found


def check_own(name: str, others: Iterable[str]) -> None:
    """Raises InputError: one of --also has the name that ARTIFACT's variant has."""
    if name in others:
        raise InputError("is the name of ARTIFACT", where=f"--also {name}=", way_out="give another (NAME=SOURCE)")


def labelled(given: Sequence[str]) -> dict[str, str]:
    """LABEL=ARTIFACT, or an artifact under its own name.

    Raises:
        InputError: a label is there twice.
    """
    made: dict[str, str] = {}
    for one in given:
        label, equals, place = one.partition("=")
        label, place = (label, place) if equals else (Path(one).name if Path(one).is_dir() else one, one)
        if label in made:
            way_out = f"give it another label than {label}=" if equals else f"write LABEL={place}"
            raise InputError(f"two artifacts are named {label}", where=one, way_out=way_out)
        made[label] = place
    return made


def against(given: Sequence[str]) -> Checkpoints:
    """What --against names.

    Raises:
        InputError: one is not of any of the three forms.
    """
    finetuned, others, with_base = None, dict[str, Path](), False
    for one in (part for text in given for part in text.split(",") if part):
        label, _, path = one.partition("=")
        if one == "base":
            with_base = True
        elif not label or not path:
            raise InputError(
                "write finetuned=PATH, base, or LABEL=PATH of another checkpoint", where=f"--against {one}"
            )
        elif label == "finetuned":
            finetuned = model(path)
        else:
            others[label] = model(path)
    return finetuned, others, with_base


def beneath(
    sources: Mapping[str, str], given: Mapping[str, str], zoo: str | None, base: Path | None, reporter: Reporter
) -> tuple[dict[str, str], dict[str, Path]]:
    """Sources, entries at the version that they mean now; and the deltas that adapters go over, by the same names:
    those that are given, else those that their entries say.

    Raises:
        InputError, IntegrityError, ZooError: as early.artifact and zoo.resolve.delta_path, or one is an adapter itself.
    """
    from deltacompress.adapters.directory import is_adapter

    for source in given.values():
        if is_adapter(Path(source)):
            raise InputError(
                "an adapter, and an adapter goes over the base or a packed delta",
                where=f"{option('over')} {source}",
                way_out="merge that one into its base, compress the result, and give that",
            )
    entries = {name: early.entry(source, zoo) for name, source in sources.items()}
    under = {name: early.artifact(source, zoo, base=base, reporter=reporter) for name, source in given.items()}
    for name, entry in entries.items():
        if entry is not None and name not in under:
            from deltacompress.zoo.exchange.resolve import delta_path

            if (found := delta_path(entry, zoo, reporter=reporter)) is not None:
                under[name] = found
    return {name: entries[name] or source for name, source in sources.items()}, under


def digest(artifact: str, over: str | None, zoo: str | None) -> str:
    """What names an artifact, or an adapter with what it goes over, in a report.

    Raises:
        InputError, IntegrityError, ZooError: as beneath; it is not there, or cannot be read.
    """
    from deltacompress.adapters.adapter import adapter_identity, digest_in
    from deltacompress.adapters.directory import is_adapter
    from deltacompress.artifact.manifest import need_directory, read_manifest

    sources, below = beneath({artifact: artifact}, {} if over is None else {artifact: over}, zoo, None, SILENT)
    place = early.place(sources[artifact], zoo)
    need_directory(place)
    if not is_adapter(place):
        return read_manifest(place).digest
    delta = below.get(artifact)
    return adapter_identity(digest_in(place), None if delta is None else read_manifest(delta).digest)


def over(given: Sequence[str], names: Collection[str], alone: str | None) -> dict[str, str]:
    """[NAME=]DELTA as a mapping. names: that may be given; alone: what DELTA without a name is for, None: nothing.

    Raises:
        InputError: no DELTA, another name, none where there is a choice, or one twice.
    """
    found: dict[str, str] = {}
    for one in given:
        where = f"--over {one}"
        name, equals, source = one.partition("=") if "=" in one or alone is None else (alone, "=", one)
        if not equals or ("=" in one and name not in names):
            told = f"is of none of {', '.join(names)}" if names else "names something, and there is one adapter only"
            raise InputError(told, where=where, way_out="write NAME=DELTA" if names else "write --over DELTA")
        if not source:
            raise InputError("names no delta", where=where, way_out="give the directory or entry of one")
        if name in found:
            raise InputError(
                "is a second delta for the same adapter",
                where=where,
                way_out="an adapter goes over one; what goes over that is to be merged into it first",
            )
        found[name] = source
    return found
