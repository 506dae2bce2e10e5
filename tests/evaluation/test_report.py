"""report.json: read back as written, refused when edited, newer or something else; described by its schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation.reports import report, subject
from jsonschema import Draft202012Validator

from deltacompress.errors import ChecksumError, FormatError, InputError, SchemaVersionError
from deltacompress.evaluation.report import data
from deltacompress.evaluation.report.data import read_report, report_schema
from deltacompress.files.canonical_json import canonical_digest


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    report().write(path)
    return path


def test_read_back(written: Path) -> None:
    assert read_report(written) == read_report(written.parent) == report()
    report(kl=0.5).write(written)  # an older report gives way
    assert read_report(written) == report(kl=0.5)
    assert read_report(written).subject("int2").ratio == 10
    assert read_report(written).score("sql", "nobody") is None


def test_the_schema_describes_it(written: Path) -> None:
    schema = report_schema()
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(written.read_text()))


def test_an_edited_report_is_refused(written: Path) -> None:
    data = json.loads(written.read_text())
    data["scores"][1]["value"] = 0.99
    written.write_text(json.dumps(data))
    with pytest.raises(ChecksumError, match="edited, or damaged"):
        read_report(written)


def test_both_versions_are_read(tmp_path: Path) -> None:
    """Version 1 is what programs wrote, and write, that measured no adapter; version 2 what they write of one."""
    path = tmp_path / "report.json"
    old = report(schema_version=1)
    old.write(path)
    assert json.loads(path.read_text())["schema_version"] == 1
    assert read_report(path) == old
    one = subject("bot", "adapter", identity="f" * 64, recipe="lora-r4", ratio=20.0)
    new = report(schema_version=2, subjects=[*old.model_dump()["subjects"], one])
    new.write(path)
    assert json.loads(path.read_text())["schema_version"] == 2
    assert read_report(path) == new
    assert [delta.label for delta in read_report(path).deltas] == ["int2", "bot"]
    _resigned(path, schema_version=1)
    with pytest.raises(FormatError, match="an adapter in a report of version 1"):
        read_report(path)


def _resigned(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    del data["digest"]
    data |= changes
    path.write_text(json.dumps(data | {"digest": canonical_digest(data)}))


def test_other_reports_are_refused(written: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such report"):
        read_report(tmp_path / "gone.json")
    text = written.read_text()
    written.write_text(text[:-20])
    with pytest.raises(ChecksumError, match="not JSON"):
        read_report(written)
    data = json.loads(text)
    del data["schema_version"]
    written.write_text(json.dumps(data))
    with pytest.raises(ChecksumError, match="differs from its digest"):
        read_report(written)
    written.write_text(text)
    _resigned(written, schema_version=3)
    with pytest.raises(SchemaVersionError, match="upgrade"):
        read_report(written)
    written.write_text(text)
    _resigned(written, more=1)
    with pytest.raises(FormatError, match="more"):
        read_report(written)


@pytest.mark.parametrize("text", ['{"a": [[], []]}', '{"a": ' + "[" * 80 + "]" * 80 + "}"])
def test_so_is_that_of_which_there_is_much(text: str, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MAX_MEMORY", 500)
    written.write_text(text)
    with pytest.raises(InputError, match="not a report of `deltacompress eval`"):
        read_report(written)


@pytest.mark.parametrize("text", ["{}", "[]", "5", '{"schema_version": 1, "digest": "0"}', '{"tasks": []}'])
def test_another_programs_json_is_wrong_input(text: str, written: Path) -> None:
    written.write_text(text)
    with pytest.raises(InputError, match=r"report\.json: not a report of `deltacompress eval`, such as .* DIR/report"):
        read_report(written)
