"""Where calibration records come from: a local file, or else a dataset of the hub.

A source answers one question only: which records, in which seeded order. Tokens are the business of `packing`.
Local files are checked to the last record when they are opened, so that a bad line is reported whatever the seed;
JSON Lines files are indexed by offset and never held in memory.

The order of a local file depends on the seed and the number of records alone: raw 64-bit words of PCG64 are the sort
keys, a stream that NumPy guarantees across versions and platforms (it does not for `Generator.permutation`), and no
global random state is read or touched.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deltacompress.calibrate.hub import open_hub
from deltacompress.calibrate.records import (
    FIELDS,
    NEEDED,
    Record,
    RecordChecker,
    RecordSource,
    first_line,
    format_of,
    without_padding,
)
from deltacompress.errors import CalibrationError

_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(?:/\w[\w.-]*)?)(?::(?P<config>[^@:]+))?(?:@(?P<revision>[^@:]+))?")


def open_source(source: str, *, split: str = "train") -> RecordSource:
    """Open a .jsonl, .json, .parquet or .txt file, or else a `datasets` id: `id`, `id:config`, `id:config@revision`.

    All records have the format of the first one. Records without content (blank text, no messages) are skipped.

    Raises:
        CalibrationError: nothing there, unreadable, empty, or a record that lacks the needed field.

    """
    path = Path(os.path.expanduser(source))
    if not source:
        raise CalibrationError(f"--calibration is empty; pass a {_suffixes()} file or the id of a hub dataset")
    try:
        if path.is_dir():
            raise CalibrationError(f"{source}: is a directory; pass one {_suffixes()} file")
        if path.exists():
            return _open_file(path, split)
    except OSError as error:
        raise CalibrationError(
            f"{source}: cannot be read ({error.strerror or error}); make it readable or pass another file"
        ) from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{source}: not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
    match = _HUB_ID.fullmatch(source)
    if match is None or path.suffix.lower() in _READERS or ("." in source and "/" not in source):
        raise CalibrationError(f"{source}: no such file; pass a {_suffixes()} file or the id of a hub dataset")
    return open_hub(source, match["id"], match["config"], match["revision"], split)


def _open_file(path: Path, split: str) -> RecordSource:
    if not path.is_file():  # a named pipe would be waited for, a device read for ever
        raise CalibrationError(f"{path}: not a regular file; pass a {_suffixes()} file")
    with path.open("rb") as file:
        head = file.read(6)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise CalibrationError(f"{path}: is compressed ({name}); unpack it and pass the {_suffixes()} file inside")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CalibrationError(f"{path}: unsupported file type {path.suffix!r}; pass a {_suffixes()} file")
    if split != "train":
        raise CalibrationError(f"{path}: split {split!r} asked of a local file; only `datasets` ids have splits")
    return reader(path)


def _suffixes() -> str:
    *head, last = _READERS
    return f"{', '.join(head)} or {last}"


def _order(count: int, seed: int) -> list[int]:
    """A permutation of range(count) that depends on its arguments alone."""
    keys = np.random.PCG64(seed).random_raw(count)
    return [int(i) for i in np.argsort(keys, kind="stable")]


def _local(path: Path, checker: RecordChecker, count: int, get: Callable[[int], Record]) -> RecordSource:
    format_ = checker.format
    if count == 0:
        raise CalibrationError(f"{path}: all of its records are blank; a calibration record needs {NEEDED}")
    return RecordSource(path.name, format_, lambda seed: map(get, _order(count, seed)))


def _parse_line(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{where}: not UTF-8 text; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where}: not valid JSON ({error}); each line must hold one JSON object") from error


def _open_jsonl(path: Path) -> RecordSource:
    checker = RecordChecker(str(path))
    offsets, numbers, offset = array("q"), array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            if line.strip() and checker.accept(_parse_line(line, where), where):
                offsets.append(offset)
                numbers.append(number)
            offset += len(line)

    def get(index: int) -> Record:
        where = f"{path}: line {numbers[index]}"
        with path.open("rb") as file:
            file.seek(offsets[index])
            return Record(where, _parse_line(file.readline(), where))

    return _local(path, checker, len(offsets), get)


def _open_json(path: Path) -> RecordSource:
    """An array of objects; a .json file that starts with an object is JSON Lines under another name."""
    with path.open("rb") as file:
        head = file.read(4096).decode("utf-8-sig", errors="replace").lstrip()
    if not head.startswith("["):
        return _open_jsonl(path)
    text = path.read_text(encoding="utf-8-sig")
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:  # a JSONDecodeError's text ends in line and column
        raise CalibrationError(f"{path}: not valid JSON ({error}); give an array of objects") from error
    checker = RecordChecker(str(path))
    records = [Record(f"{path}: record {number}", item) for number, item in enumerate(items, start=1)]
    kept = [record for record in records if checker.accept(record.fields, record.where)]
    return _local(path, checker, len(kept), kept.__getitem__)


def _open_parquet(path: Path) -> RecordSource:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    try:
        with pq.ParquetFile(path) as file:
            format_ = format_of(file.schema_arrow.names, str(path))
            table = file.read(columns=list(FIELDS[format_]))
    except pa.ArrowException as error:
        raise CalibrationError(f"{path}: not a readable parquet file ({first_line(error)}); write it again") from error
    checker = RecordChecker(str(path))
    kept, number = array("q"), 0
    for batch in table.to_batches(max_chunksize=1024):
        for record in batch.to_pylist():
            number += 1
            if checker.accept(record, f"{path}: record {number}"):
                kept.append(number)

    def get(index: int) -> Record:
        (record,) = table.slice(kept[index] - 1, 1).to_pylist()
        return Record(f"{path}: record {kept[index]}", without_padding(record))

    return _local(path, checker, len(kept), get)


def _open_txt(path: Path) -> RecordSource:
    """Paragraphs: text between blank lines, so that hard-wrapped prose stays whole; without any blank line, lines."""
    text = path.read_text(encoding="utf-8-sig").strip()
    unit, parts = "paragraph", re.split(r"\n(?:[^\S\n]*\n)+", text)
    if len(parts) == 1:
        unit, parts = "line", text.split("\n")
    checker = RecordChecker(str(path))
    records = [Record(f"{path}: {unit} {number}", {"text": part}) for number, part in enumerate(parts, start=1)]
    kept = [record for record in records if checker.accept(record.fields, record.where)]
    if not kept:
        raise CalibrationError(f"{path}: is empty; a .txt file holds paragraphs separated by blank lines")
    return _local(path, checker, len(kept), kept.__getitem__)


_READERS: dict[str, Callable[[Path], RecordSource]] = {
    ".jsonl": _open_jsonl,
    ".json": _open_json,
    ".parquet": _open_parquet,
    ".txt": _open_txt,
}
