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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deltacompress.calibration.hub import open_hub
from deltacompress.calibration.records import (
    FIELDS,
    NEEDED,
    Record,
    RecordChecker,
    RecordSource,
    format_of,
    without_padding,
)
from deltacompress.errors import CalibrationError, first_line, option
from deltacompress.files.json_limits import parsed_bytes
from deltacompress.files.regular import ANYWHERE, UnfitFileError, open_regular, read_bytes, read_text, unreadable

_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MAX_LINE_BYTES = 64 << 20
_MAX_WHOLE_BYTES = 1 << 30  # of what is held in memory, where a format leaves no choice
_LONGEST_NAMED = 400
"""Characters of a source that messages repeat: a longer one is hardly a path, but a text given in its place."""
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(?:/\w[\w.-]*)?)(?::(?P<config>[^@:]+))?(?:@(?P<revision>[^@:]+))?")


Calibration = str | Path | Sequence[str | Mapping[str, Any]]
"""What can be calibrated on: a file or data set id, or the records themselves (a text is a record, too)."""
IN_MEMORY = "records in memory"


def name_of(source: Calibration) -> str:
    """How messages call it."""
    return str(source) if isinstance(source, str | Path) else IN_MEMORY


def open_source(source: Calibration, *, split: str = "train", asked: str = "calibration") -> RecordSource:
    """Open a .jsonl, .json, .parquet or .txt file, or a `datasets` id (`id`, `id:config`, `id:config@revision`); or
    records that are given.

    All records have the format of the first one. Records without content (blank text, no messages) are skipped. asked:
    the option that names it.

    Raises:
        CalibrationError: nothing there, unreadable, empty, or a record that lacks the needed field.

    """
    if not isinstance(source, str | Path):
        return _open_records(source)
    source = str(source)
    path = local_file(source, asked)
    if path is None:
        match = _HUB_ID.fullmatch(source)
        assert match is not None  # local_file looked
        return open_hub(source, match["id"], match["config"], match["revision"], split)
    if split != "train":
        raise CalibrationError(f"split {split!r} asked of a local file; only `datasets` ids have splits", where=path)
    with _read_errors(source):
        return _READERS[path.suffix.lower()](path)


def local_file(source: str, asked: str = "calibration") -> Path | None:
    """The file that `source` means, of a kind that can be read; None: it is the id of a hub dataset. Reads nothing.

    asked: the option that names it.

    Raises:
        CalibrationError: neither.

    """
    path = Path(os.path.expanduser(source))
    named = source if len(source) <= _LONGEST_NAMED else f"{source[:40]}... ({len(source)} characters)"
    if not source:
        raise CalibrationError(
            f"{option(asked)} is empty", way_out=f"pass a {_suffixes()} file or the id of a hub dataset"
        )
    with _read_errors(named):
        if path.is_dir():
            raise CalibrationError("is a directory", where=named, way_out=f"pass one {_suffixes()} file")
        if path.exists():
            _check_kind(path)
            return path
    slip = path.suffix.lower() in _READERS or (path.parent.exists() if "/" in source else "." in source)
    if slip or not _HUB_ID.fullmatch(source):
        raise CalibrationError(
            "no such file", where=named, way_out=f"pass a {_suffixes()} file or the id of a hub dataset"
        )
    return None


def _check_kind(path: Path) -> None:
    try:
        opened = open_regular(path, links=ANYWHERE)
    except UnfitFileError as error:
        raise CalibrationError(str(error.strerror), where=path, way_out=f"pass a {_suffixes()} file") from error
    with opened as file:
        head = file.read(6)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise CalibrationError(
                f"is compressed ({name})", where=path, way_out=f"unpack it and pass the {_suffixes()} file inside"
            )
    if path.suffix.lower() not in _READERS:
        raise CalibrationError(
            f"unsupported file type {path.suffix!r}", where=path, way_out=f"pass a {_suffixes()} file"
        )


@contextmanager
def _read_errors(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(CalibrationError, source, error, "make it readable or pass another file") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"not UTF-8 text (byte {error.start})", where=source, way_out="convert it to UTF-8"
        ) from error


def _suffixes() -> str:
    *head, last = _READERS
    return f"{', '.join(head)} or {last}"


def _order(count: int, seed: int) -> list[int]:
    """A permutation of range(count) that depends on its arguments alone."""
    import numpy as np

    keys = np.random.PCG64(seed).random_raw(count)
    return [int(i) for i in np.argsort(keys, kind="stable")]


def _local(path: Path, checker: RecordChecker, count: int, get: Callable[[int], Record]) -> RecordSource:
    format_ = checker.format
    if count == 0:
        raise CalibrationError(f"all of its records are blank; a calibration record needs {NEEDED}", where=path)
    return RecordSource(path.name, format_, lambda seed: map(get, _order(count, seed)))


def _parse_line(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CalibrationError("not UTF-8 text", where=where, way_out="convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"not valid JSON ({error}); each line must hold one JSON object", where=where) from error


def _open_jsonl(path: Path) -> RecordSource:
    checker = RecordChecker(str(path))
    offsets, numbers, offset = array("q"), array("q"), 0
    with open_regular(path, links=ANYWHERE) as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{path}: line {number}"
            if len(line) > _MAX_LINE_BYTES:
                raise CalibrationError(
                    f"over {_MAX_LINE_BYTES} bytes, as no record is", where=where, way_out="cut it into several"
                )
            if line.strip() and checker.accept(_parse_line(line, where), where):
                offsets.append(offset)
                numbers.append(number)
            offset += len(line)

    def get(index: int) -> Record:
        where = f"{path}: line {numbers[index]}"
        with open_regular(path, links=ANYWHERE) as file:
            file.seek(offsets[index])
            return Record(where, _parse_line(file.readline(_MAX_LINE_BYTES), where))

    return _local(path, checker, len(offsets), get)


def _open_json(path: Path) -> RecordSource:
    """An array of objects; a .json file that starts with an object is JSON Lines under another name."""
    with open_regular(path, links=ANYWHERE) as file:
        head = file.read(4096).decode("utf-8-sig", errors="replace").lstrip()
    if not head.startswith("["):
        return _open_jsonl(path)
    raw = read_bytes(path, at_most=_MAX_WHOLE_BYTES, links=ANYWHERE)
    text = raw.decode("utf-8-sig")
    if parsed_bytes(raw) > _MAX_WHOLE_BYTES:
        raise CalibrationError("too many values to be read at once", where=path, way_out="give JSON Lines (.jsonl)")
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:  # a JSONDecodeError's text ends in line and column
        raise CalibrationError(f"not valid JSON ({error})", where=path, way_out="give an array of objects") from error
    checker = RecordChecker(str(path))
    records = [Record(f"{path}: record {number}", item) for number, item in enumerate(items, start=1)]
    kept = [record for record in records if checker.accept(record.fields, record.where)]
    return _local(path, checker, len(kept), kept.__getitem__)


def _open_records(given: Sequence[object]) -> RecordSource:
    checker = RecordChecker(IN_MEMORY)
    kept: list[Record] = []
    for number, one in enumerate(given, start=1):
        where = f"{IN_MEMORY}: record {number}"
        fields = {"text": one} if isinstance(one, str) else dict(one) if isinstance(one, Mapping) else one
        if checker.accept(fields, where):
            assert isinstance(fields, dict)
            kept.append(Record(where, fields))
    return _local(Path(IN_MEMORY), checker, len(kept), kept.__getitem__)


def _open_parquet(path: Path) -> RecordSource:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    try:
        with open_regular(path, links=ANYWHERE) as raw, pq.ParquetFile(raw) as file:
            format_ = format_of(file.schema_arrow.names, str(path))
            batches, size = [], 0
            for batch in file.iter_batches(1024, columns=list(FIELDS[format_])):
                batches.append(batch)
                size += batch.nbytes
                if size > _MAX_WHOLE_BYTES:  # which a small file can come to: it may say one thing a million times
                    raise CalibrationError(
                        f"over {_MAX_WHOLE_BYTES} bytes unpacked", where=path, way_out="give JSON Lines (.jsonl)"
                    )
            table = pa.Table.from_batches(batches) if batches else file.read(columns=list(FIELDS[format_]))
    except pa.ArrowException as error:
        raise CalibrationError(
            f"not a readable parquet file ({first_line(error)})", where=path, way_out="write it again"
        ) from error
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
    text = read_text(path, at_most=_MAX_WHOLE_BYTES, links=ANYWHERE).strip()
    unit, parts = "paragraph", re.split(r"\n(?:[^\S\n]*\n)+", text)
    if len(parts) == 1:
        unit, parts = "line", text.split("\n")
    checker = RecordChecker(str(path))
    records = [Record(f"{path}: {unit} {number}", {"text": part}) for number, part in enumerate(parts, start=1)]
    kept = [record for record in records if checker.accept(record.fields, record.where)]
    if not kept:
        raise CalibrationError("is empty; a .txt file holds paragraphs separated by blank lines", where=path)
    return _local(path, checker, len(kept), kept.__getitem__)


_READERS: dict[str, Callable[[Path], RecordSource]] = {
    ".jsonl": _open_jsonl,
    ".json": _open_json,
    ".parquet": _open_parquet,
    ".txt": _open_txt,
}
