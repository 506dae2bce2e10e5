"""Cells of the matrix: a file for each, with all that it must have in common with the others. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast, get_args

from deltacompress.errors import CheckpointError, InputError, option
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.output import write_once
from deltacompress.files.regular import ANYWHERE, read_bytes, unreadable

System = Literal["decoupled", "swap"]
SYSTEMS: tuple[System, ...] = get_args(System)
_SUFFIX = ".cell.json"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """rate: requests a second."""

    system: System
    popularity: str
    rate: float

    @property
    def file(self) -> str:
        """Its name in the folder."""
        return f"{self.system}_{self.popularity}_{self.rate:g}{_SUFFIX}"


def cells(systems: Sequence[str], popularities: Sequence[str], rates: Sequence[float]) -> list[Cell]:
    """The matrix, system by system.

    Raises:
        InputError: a list is empty, names one twice, or something that there is not.
    """
    for name, listed in (("systems", systems), ("popularities", popularities), ("rates", rates)):
        if not listed or len({*listed}) < len(listed):
            raise InputError("names none, or one twice", where=option(name), way_out="give each once")
    if unknown := [one for one in systems if one not in SYSTEMS]:
        raise InputError(
            f"no system {unknown[0]!r:.40}", where=option("systems"), way_out=f"give some of {', '.join(SYSTEMS)}"
        )
    if wrong := [one for one in rates if not 0 < one < float("inf")]:
        raise InputError(f"is {wrong[0]:g}", where=option("rates"), way_out="give numbers above 0")
    return [
        Cell(cast("System", system), popularity, rate)
        for system, popularity, rate in product(systems, popularities, rates)
    ]


def part_of(matrix: Sequence[Cell], part: str | None) -> list[Cell]:
    """part: "K/N", of N equal pieces of the matrix the K-th, from 1; None: all.

    Raises:
        InputError: that is no part.
    """
    if part is None:
        return list(matrix)
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 10_000):
        raise InputError(f"is {part!r:.40}", where=option("part"), way_out="give K/N, such as 1/3")
    size, at = len(matrix), int(number)
    return list(matrix[size * (at - 1) // int(count) : size * at // int(count)])


def code_digest(package: Path) -> str:
    """Of everything in the package that computes: two commits with the same code are the same."""
    files = sorted(path for path in package.rglob("*") if path.suffix in {".py", ".cu", ".cuh", ".h"})
    return sha256_hex(b"".join(str(path.relative_to(package)).encode() + path.read_bytes() for path in files))[:16]


def write_cell(folder: Path, cell: Cell, identity: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keep what was found; raises OutputError."""
    data = {"identity": dict(identity), "cell": [cell.system, cell.popularity, cell.rate], **found}
    write_once(folder / cell.file, json.dumps(data).encode(), replace=True)


def read_cells(folder: Path, identity: Mapping[str, Any] | None = None) -> dict[Cell, dict[str, Any]]:
    """All that are there, of one identity: the one that is given, or that of the first.

    Raises:
        InputError: one was measured otherwise, or is no cell.
    """
    found: dict[Cell, dict[str, Any]] = {}
    for path, data in _files(folder):
        expected = identity = data["identity"] if identity is None else identity
        own = data["identity"]
        if differ := [name for name in {**expected, **own} if own.get(name) != expected.get(name)]:
            name = differ[0]
            raise InputError(
                f"was measured with {name} {own.get(name)}, not {expected.get(name)}",
                where=path,
                way_out="give another folder, or remove it",
            )
        found[Cell(*data["cell"])] = data
    return found


def _files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    from deltacompress.checkpoints.header import load_json_object

    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            data = load_json_object(read_bytes(path, at_most=_MOST_BYTES, links=ANYWHERE), str(path))
            if Cell(*data["cell"]).file != path.name or not {"identity", "row", "requests"} <= data.keys():
                raise KeyError
        except OSError as error:
            raise unreadable(InputError, path, error) from error
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise InputError("is no cell of a matrix", where=path, way_out="remove it") from error
        yield path, data
