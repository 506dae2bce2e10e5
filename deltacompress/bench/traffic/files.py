"""Traces from files: Azure's of 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), or JSON lines.

A line of JSON: {"at_s": 0.25, "prompt_tokens": 120, "output_tokens": 40}.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.errors import InputError
from deltacompress.files.regular import ANYWHERE, open_regular, unreadable

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LINES = ("at_s", "prompt_tokens", "output_tokens")
_MOST_BYTES = 1 << 28


def read(path: Path) -> list[Arrival]:
    """The arrivals of a trace, in its order; times count from its first one where the file gives dates.

    Raises:
        InputError: no such file; no trace, or an empty one; columns are missing; a time is negative, no time, or before
            that of the line above; a length is missing, or is not 1 or more.
    """
    text = _text(path)
    rows = _lines(path, text) if text.lstrip().startswith("{") else _azure(path, text)
    found: list[Arrival] = []
    for where, at_s, prompt, output in rows:
        if at_s < 0:
            raise InputError(f"a time of {at_s:g} s", where=where, way_out="count seconds from the start")
        if found and at_s < found[-1].at_s:
            raise InputError("comes before the line above", where=where, way_out="sort the trace by time")
        found.append(Arrival(at_s, _tokens(prompt, where), _tokens(output, where)))
    if not found:
        raise InputError("holds no requests", where=path)
    return found


def _text(path: Path) -> str:
    try:
        with open_regular(path, links=ANYWHERE) as file:
            raw = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise InputError("no such file", where=path, way_out="give a trace, or poisson or gamma") from None
    except OSError as error:
        raise unreadable(InputError, path, error) from error
    if len(raw) > _MOST_BYTES:
        raise InputError(f"more than {_MOST_BYTES >> 20} MiB", where=path, way_out="cut the trace")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"no UTF-8 text (byte {error.start})", where=path) from None


def _azure(path: Path, text: str) -> Iterator[tuple[str, float, Any, Any]]:
    rows = csv.reader(io.StringIO(text))
    try:
        header = next(rows, [])
        if missing := [name for name in AZURE if name not in header]:
            raise InputError(
                f"no column {missing[0]}", where=path, way_out=f"give a CSV file with {', '.join(AZURE)}, or JSON lines"
            )
        at, prompt, output = map(header.index, AZURE)
        start: datetime | None = None
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise InputError(f"{len(row)} columns, the header has {len(header)}", where=where)
            try:
                time = datetime.fromisoformat(row[at])
                start = time if start is None else start
                seconds = (time - start).total_seconds()
            except (ValueError, TypeError):  # no date; or one with a time zone, the first without
                raise InputError(f"{row[at]!r:.40} is no time", where=where) from None
            if seconds < 0:
                raise InputError("comes before the first line", where=where, way_out="sort the trace by time")
            yield where, seconds, row[prompt], row[output]
    except csv.Error as error:
        raise InputError(f"no CSV file ({error})", where=path) from None


def _lines(path: Path, text: str) -> Iterator[tuple[str, float, Any, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError("no JSON", where=where, way_out="give an object on each line") from None
        if not isinstance(row, dict) or (missing := [name for name in LINES if name not in row]):
            lacks = "no object" if not isinstance(row, dict) else f"no {missing[0]}"
            raise InputError(lacks, where=where, way_out=f"give {', '.join(LINES)}")
        at_s, *lengths = (row[name] for name in LINES)
        if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not _is_finite(at_s):
            raise InputError(f"at_s is {at_s!r:.40}", where=where, way_out="give seconds")
        yield where, float(at_s), *lengths


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _tokens(value: Any, where: str) -> int:
    number = value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 10**9:
        raise InputError(f"{value!r:.40} is no length", where=where, way_out="give tokens, 1 or more")
    return number
