"""`zoo attest` and `zoo list --score`: a report counts for the artifact that it measured, under names that are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluation.reports import fidelity, paired, report, score, subject
from zoo.cli_helpers import GOLDEN, Run, data, failed

from deltacompress.artifact.manifest import read_manifest
from deltacompress.errors import ChecksumError, FormatError, InputError, SchemaVersionError
from deltacompress.evaluation.report.data import Report, read_report
from deltacompress.evaluation.report.records import SCHEMA_VERSION
from deltacompress.evaluation.zoo import attach_report
from deltacompress.files.canonical_json import canonical_digest
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import evaluations


def measured(*artifacts: str) -> Report:
    """A report on a fine-tuned model and these artifacts."""
    digests = {one: read_manifest(GOLDEN / one).digest for one in artifacts}
    deltas = [subject(one, "delta", manifest_digest=told, identity=told) for one, told in digests.items()]
    found = [
        score("sql", one, 0.3 - at / 100, paired=paired(0.03, 0.04), fidelity=fidelity(0.001 + at / 1000))
        for at, one in enumerate(artifacts)
    ]
    return report(
        subjects=[subject("finetuned", "finetuned"), *deltas],
        scores=[score("sql", "finetuned", 0.33), *found],
        agreement=[],
        overlap=[],
        disagreements=[],
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """report.json on both artifacts of the zoo, where lm-eval is not installed."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    measured("int2-24", "int4-24").write(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_each_artifact_gets_its_own_scores(run: Run, cli_zoo: Path, file: Path) -> None:
    told = [data(run("attest", name, file, "--json"))["scores"] for name in ("t/bot@1", "t/bot@2", "t/bot@2")]
    assert told[0] == pytest.approx({"sql.exact_match": 0.29, "sql.kl": 0.002})
    assert told[1] == told[2] == pytest.approx({"sql.exact_match": 0.3, "sql.kl": 0.001})
    assert len(Zoo.open(cli_zoo).referrers("t/bot@2")) == 1
    assert [one["version"] for one in data(run("list", "--score", "sql.kl<0.0015", "--json"))] == [2]


def test_from_python_it_is_the_same_way_in(run: Run, cli_zoo: Path, file: Path) -> None:
    """Not the fine-tuned model's score under the delta, and no second attachment."""
    zoo = Zoo.open(cli_zoo)
    digest = zoo.attest("t/bot@2", file)
    assert zoo.scores("t/bot@2") == pytest.approx({"sql.exact_match": 0.3, "sql.kl": 0.001})
    assert data(run("attest", "t/bot@2", file, "--json"))["report"] == digest
    assert attach_report(zoo.where, "t/bot@2", "int2-24", read_report(file)) == digest
    assert len(zoo.referrers("t/bot@2")) == 1
    with pytest.raises(InputError, match="t/base@1: a base-ref, not a delta"):
        zoo.attest("t/base", file)


@pytest.mark.parametrize("damage", ["digest", "value", "version", "nan", "field"])
def test_from_python_a_changed_report_is_refused(run: Run, cli_zoo: Path, file: Path, damage: str) -> None:
    told = json.loads(file.read_text())
    error: type[Exception] = ChecksumError
    if damage == "digest":
        told["digest"] = "0" * 64
    elif damage == "nan":
        told["scores"][0]["value"] = float("nan")
    elif damage == "value":
        told["scores"][1]["value"] = 0.99
    else:
        error = SchemaVersionError if damage == "version" else FormatError
        told |= {"schema_version": 3} if damage == "version" else {"subjects": {"int2-24": 1}}
        content = {key: value for key, value in told.items() if key != "digest"}
        told["digest"] = canonical_digest(content)
    file.write_text(json.dumps(told))
    zoo = Zoo.open(cli_zoo)
    with pytest.raises(error, match=r"report\.json: "):
        zoo.attest("t/bot@2", file)
    assert not zoo.referrers("t/bot@2")


def test_the_zoo_reads_the_reports_that_are_written_today() -> None:
    assert evaluations.VERSIONS[-1] == SCHEMA_VERSION


def test_any_task_has_a_name_for_its_score(run: Run, cli_zoo: Path, file: Path) -> None:
    named = measured("int2-24")
    tasks = tuple(one.model_copy(update={"name": "2Wiki QA"}) for one in named.tasks)
    scores = tuple(one.model_copy(update={"task": "2Wiki QA"}) for one in named.scores)
    named.model_copy(update={"tasks": tasks, "scores": scores}).write(file)
    told = data(run("attest", "t/bot@2", file, "--json"))["scores"]
    assert told == pytest.approx({"x-2wiki-qa.exact_match": 0.3, "x-2wiki-qa.kl": 0.001})


def test_a_report_on_something_else_is_refused(run: Run, cli_zoo: Path, tmp_path: Path, file: Path) -> None:
    measured("sign-24").write(file)
    failed(run("attest", "t/bot@1", file), 2, "t/bot@1: not the artifact that the report measured as sign-24")
    failed(run("attest", "t/base", file), 2, "a base-ref, not a delta")
    measured().write(file)
    failed(run("attest", "t/bot@1", file), 2, "the report measures no delta")
    assert not Zoo.open(cli_zoo).referrers("t/bot@1")


def test_an_edited_or_newer_report_is_refused(run: Run, cli_zoo: Path, file: Path) -> None:
    def edit(**more: Any) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | more))

    edit(created="2027-01-01T00:00:00+00:00")
    failed(run("attest", "t/bot@1", file), 3, str(file), "edited, or damaged", "evaluate again")
    edit(digest=None)
    failed(run("attest", "t/bot@1", file), 3, str(file), "edited, or damaged")
    assert not Zoo.open(cli_zoo).referrers("t/bot@1")


def test_an_evaluation_is_signed_too(run: Run, cli_zoo: Path, tmp_path: Path, file: Path) -> None:
    pytest.importorskip("cryptography")
    failed(run("attest", "t/bot@1", file, "--key", tmp_path / "none"), 2, "none")
    assert not Zoo.open(cli_zoo).referrers("t/bot@1")
    run("keygen", tmp_path / "key")
    done = data(run("attest", "t/bot@1", file, "--key", tmp_path / "key", "--json"))
    (signed,) = Zoo.open(cli_zoo).signatures("t/bot@1")
    assert (done["signed"], signed.what) == (True, f"report {done['report'][:12]}")


def test_a_score_that_no_entry_has_is_told(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    code, out, err = run("list", "--score", "sst2.f1>0", "--json")
    assert (code, json.loads(out)) == (0, [])
    assert err == "--score sst2.f1: nothing here has a score; `zoo attest` attaches a report\n"
    (tmp_path / "r.json").write_text(json.dumps({"boolq": {f"m{at:02}": 0.5 for at in range(11)}, "sst2": {"acc": 1}}))
    run("attest", "t/bot", tmp_path / "r.json")
    failed(run("list", "--score", "sst2.f1>0"), 2, "--score sst2.f1: no entry has it; there are ", " and 2 more")
    failed(run("list", "--score", "sst2.accuracy>0"), 2, "there are sst2.acc, boolq.m00, ")  # spelled like it: first
    failed(run("list", "--score", "boolq.m10>0", "--score", "mmlu>0"), 2, "--score mmlu: no entry has it")
    assert run("list", "--score", "boolq.m10>0.9") == (0, f"{cli_zoo}: none\n", "")
    assert data(run("list", "--kind", "base-ref", "--score", "boolq.m10>0", "--json")) == []  # others have it


def test_a_table_shows_the_scores_that_were_asked_for(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"sst2": {"accuracy": 0.75, "kl": 0.125}, "boolq": 0.625}')
    run("attest", "t/bot", tmp_path / "r.json")
    asked = ("list", "--score", "sst2.kl<1", "--score", "boolq>0")
    table = run(*asked)[1]
    assert "boolq 0.625, sst2.kl 0.125" in table
    assert "accuracy" not in table
    assert len(data(run(*asked, "--json"))[0]["scores"]) == 3
