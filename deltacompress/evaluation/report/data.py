"""report.json: what was measured on what, as versioned data that other programs may rely on.

The file holds a digest over itself, like a manifest: a gate decides on it, so a report edited by hand is refused.
Scores and drops are fractions, sizes bytes, divergences nats per token, times seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deltacompress.errors import ChecksumError, FormatError, InputError, SchemaVersionError
from deltacompress.evaluation.report.markdown import markdown
from deltacompress.evaluation.report.records import SCHEMA_VERSION, ReportData
from deltacompress.files.canonical_json import canonical_digest
from deltacompress.files.json_limits import MAX_DEPTH, is_deep, parsed_bytes
from deltacompress.files.output import write_once
from deltacompress.files.regular import ANYWHERE, read_bytes, unreadable

REPORT = "report.json"
_MAX_BYTES = 64 << 20
_MARKS = {"subjects", "tasks", "scores"}  # two of them tell a report, damaged or not, from another program's JSON
_WRITES = f"such as `deltacompress eval ... --out DIR` writes as DIR/{REPORT}"
_MAX_MEMORY = 128 << 20  # of the parsed report, by the estimate


class Report(ReportData):
    """The whole report; reference: label of the fine-tuned model, if it was measured."""

    def _repr_markdown_(self) -> str:
        """What a notebook shows: report.md."""
        return markdown(self)

    def to_bytes(self) -> bytes:
        """The file's bytes, digest included."""
        data = self.model_dump(mode="json")
        return (json.dumps(data | {"digest": canonical_digest(data)}, indent=1, allow_nan=False) + "\n").encode()

    def write(self, path: Path) -> None:
        """Write report.json; raises OutputError."""
        write_once(path, self.to_bytes(), replace=True)


def read_report(path: str | Path) -> Report:
    """Read and check a report (a file, or the directory that holds report.json).

    Raises:
        InputError: there is none, or another program's JSON.
        ChecksumError, SchemaVersionError, FormatError: damaged or edited, newer, or breaking the schema.
    """
    file = Path(path)
    file = file / REPORT if file.is_dir() else file
    try:
        raw = read_bytes(file, at_most=_MAX_BYTES, links=ANYWHERE)
    except FileNotFoundError as error:
        raise InputError(f"no such report, {_WRITES}", where=file) from error
    except OSError as error:
        raise unreadable(InputError, file, error, "give another report") from error
    if parsed_bytes(raw) > _MAX_MEMORY:
        if sum(f'"{mark}"'.encode() in raw for mark in _MARKS) < 2:
            raise _foreign(file)
        raise FormatError("holds more values than any report does", where=file, way_out="evaluate again")
    try:
        data = json.loads(raw)
        content = {key: value for key, value in data.items() if key != "digest"} if type(data) is dict else {}
        digest = canonical_digest(content)
    except (ValueError, RecursionError) as error:  # NaN and what is beyond all floats is no JSON either
        raise ChecksumError(f"not JSON ({error})", where=file, way_out="evaluate again") from error
    if not isinstance(data, dict) or len(_MARKS & data.keys()) < 2:
        raise _foreign(file)
    if is_deep(raw):
        raise FormatError(
            f"nested deeper than {MAX_DEPTH} levels, as no report is", where=file, way_out="evaluate again"
        )
    claimed = data.pop("digest", None)
    version = data.get("schema_version")
    if claimed != digest:
        raise ChecksumError(
            "its content differs from its digest (edited, or damaged)", where=file, way_out="evaluate again"
        )
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise SchemaVersionError(
            f"report version {version!r}, this program reads up to {SCHEMA_VERSION}",
            where=file,
            way_out="upgrade deltacompress",
        )
    try:
        return Report.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{at}: {first['msg']}", where=file) from error


def _foreign(file: Path) -> InputError:
    return InputError(f"not a report of `deltacompress eval`, {_WRITES}", where=file)


def report_schema() -> dict[str, Any]:
    """JSON Schema of report.json. Every field is required: the writer leaves none out."""
    schema = Report.model_json_schema(mode="serialization")
    schema["properties"]["digest"] = {
        "description": "sha256 over the canonical JSON of all other fields",
        "pattern": "^[0-9a-f]{64}$",
        "title": "Digest",
        "type": "string",
    }
    for record in (schema, *schema["$defs"].values()):
        if "properties" in record:
            record["required"] = sorted(record["properties"])
    return schema
