"""What is trained, or made of what was trained: one label a row; and on what. Needs neither torch nor PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from deltacompress.errors import InputError, option

Kind = Literal["full", "delta", "lora", "dora", "boft", "rosa"]
FULL = "full"
_SPLITS = ("train.jsonl", "validation.jsonl")
_OF_MATRICES, _OF_ALL = (3e-4, 1e-3, 3e-3, 1e-2), (1e-4, 2e-4, 5e-4, 1e-3)


@dataclass(frozen=True, slots=True)
class Method:
    """label: of a row; rank: of its matrices; recipe: of a delta of the full fine-tune; rates: the learning rates that
    are tried, none where nothing is trained.
    """

    label: str
    kind: Kind
    rank: int = 0
    recipe: str | None = None
    rates: tuple[float, ...] = _OF_MATRICES


FAMILIES: dict[str, tuple[Method, ...]] = {
    "full": (Method(FULL, "full", rates=_OF_ALL),),
    "delta": tuple(Method(name, "delta", recipe=name, rates=()) for name in ("int4-24", "int2-24")),
    "lora": tuple(Method(f"lora-r{rank}", "lora", rank) for rank in (4, 16, 64)),
    "dora": (Method("dora-r16", "dora", 16),),
    "boft": (Method("boft", "boft"),),
    "rosa": (Method("rosa-r8", "rosa", 8),),
}


def chosen(names: Sequence[str]) -> tuple[Method, ...]:
    """Methods by the name of a family or a label; the full fine-tune, which all are held against, is the first.

    Raises:
        InputError: none of that name, or one twice.
    """
    labels = {one.label: (one,) for family in FAMILIES.values() for one in family}
    known = labels | FAMILIES
    if strange := [name for name in names if name not in known]:
        raise InputError(
            f"no method {strange[0]!r}", where=option("methods"), way_out=f"give some of {', '.join(known)}"
        )
    found = [one for name in names for one in known[name]]
    if twice := [one.label for one in found if found.count(one) > 1]:
        raise InputError(f"{twice[0]} is named twice", where=option("methods"), way_out="name each once")
    return (*FAMILIES["full"], *(one for one in found if one.kind != "full"))


def check_data(tasks: Sequence[str], data: Path) -> None:
    """Make sure that there are samples of each task to train on and to measure with.

    Raises:
        InputError: no such folder; or no such samples (the nearest task is told).
    """
    if not data.is_dir():
        raise InputError("no such folder", where=data, way_out=f"give one with <task>/{' and '.join(_SPLITS)}")
    there = sorted({file.parent.name for file in data.glob(f"*/{_SPLITS[0]}")})
    for task in tasks:
        if missing := [name for name in _SPLITS if not (data / task / name).is_file()]:
            close = get_close_matches(task.lower(), there, n=3, cutoff=0.5)
            told = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(there) or 'none'}"
            raise InputError(f"no {task}/{missing[0]}: {told}", where=data)
