"""Gates: what passes, what fails and why, and every policy that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from evaluation.reports import paired, report, score

from deltacompress.content import list_content
from deltacompress.errors import InputError, IntegrityError
from deltacompress.evaluation.gate import Gate, GateFailedError
from deltacompress.evaluation.gate_output import append_summary, junit, summary, write_junit


def check(policy: dict[str, Any], **more: Any) -> list[str]:
    """What failed, by name of the check."""
    result = Gate.parse({"name": "p"} | policy).check(report(**more))
    assert result.passed == (not result.failures)
    return [one.name for one in result.failures]


@pytest.mark.parametrize(
    ("policy", "more", "failed"),
    [
        ({}, {}, []),
        ({"drop": {"max": 0.02}}, {"upper": 0.02}, []),
        ({"drop": {"max": 0.02}}, {"upper": 0.021}, ["drop"]),
        ({"drop": {"max": 0.02, "bound": "point"}}, {"upper": 0.5}, []),
        ({"drop": {"max": 0.02, "tasks": {"sql": 0.001}}}, {}, ["drop"]),
        ({"kl": {"max": 0.002}}, {"kl": 0.0018}, []),
        ({"kl": {"max": 0.002}}, {"kl": 0.0019}, ["kl"]),
        ({"kl": {"max": 0.002, "choose": 1e-5}}, {"kl": 0.001}, []),
        ({"kl": {"max": 0.002, "choose": 1e-5}}, {"kl": 0.001, "kind": "choose"}, ["kl"]),
        ({"kl": {"max": 0.002, "tasks": {"sql": 1e-5}}}, {"kl": 0.001}, ["kl"]),
        ({"min_top1": 0.99}, {}, ["top-1"]),
        ({"min_recovery": 0.995}, {}, ["recovery"]),
        ({"min_score": {"sql": 0.4}}, {}, ["score"]),
        ({"min_score": {"sqll": 0.1}}, {}, ["score"]),
        ({"min_ratio": 10}, {}, []),
        ({"min_ratio": 10.5}, {}, ["ratio"]),
        ({"min_samples": 501}, {}, ["samples"]),
        ({"require_tasks": ["sql", "gone"]}, {}, ["required task"]),
    ],
)
def test_limits(policy: dict[str, Any], more: dict[str, Any], failed: list[str]) -> None:
    assert check(policy, **more) == failed


def test_what_was_not_measured_fails() -> None:
    policy = {"drop": {"max": 1}, "kl": {"max": 9}}
    assert check(policy, scores=[score("sql", "finetuned", 0.3), score("sql", "int2", 0.3)]) == ["drop", "kl"]
    assert check({"min_top1": 0, "min_recovery": 0}, scores=[score("sql", "int2", 0.3)]) == ["drop", "kl"]
    assert check(policy, scores=[score("sql", "finetuned", 0.3)]) == ["score"]


@pytest.mark.parametrize(
    "policy", [{"drop": {"max": 1, "tasks": {"sqll": 0}}}, {"kl": {"max": 9, "tasks": {"sqll": 0}}}]
)
def test_a_limit_of_a_task_that_is_not_there_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"(drop|kl).tasks: sqll is not measured, only sql"):
        check(policy)


def test_samples_seen_in_calibration_fail_unless_allowed() -> None:
    seen = {"task": "sql", "subject": "int2", "verdict": "overlaps", "overlapping": 3, "told": "seen", "forced": True}
    assert check({}, overlap=[seen]) == ["held out"]
    assert check({"allow_overlap": True}, overlap=[seen]) == []


def test_too_few_samples_say_so() -> None:
    result = Gate.parse({"name": "p", "drop": {"max": 0.01}}).check(report(drop=0.001, upper=0.05))
    assert "too few to tell" in result.failures[0].told
    with pytest.raises(GateFailedError, match="gate p failed for int2: sql: drop") as failed:
        result.require()
    assert failed.value.exit_code == 1


def test_only_deltas_are_judged() -> None:
    result = Gate.parse({"name": "p", "drop": {"max": 0.03}}).check(report())
    assert [verdict.subject for verdict in result.verdicts] == ["int2"]
    assert result.require() is result


def test_a_report_of_another_manifest_is_refused() -> None:
    gate = Gate.parse({"name": "p"})
    assert gate.check(report(), manifest_digest="c" * 64).passed
    with pytest.raises(IntegrityError, match="about another manifest: ffffffffffff is not in it"):
        gate.check(report(), manifest_digest="f" * 64)


def test_reports_that_cannot_be_judged() -> None:
    with pytest.raises(InputError, match="measures no delta"):
        Gate.parse({"name": "p"}).check(report(subjects=[]))
    alone = [score("sql", "int2", 0.3)]
    with pytest.raises(InputError, match="--against finetuned=PATH"):
        Gate.parse({"name": "p", "drop": {"max": 0.01}}).check(report(reference=None, scores=alone))
    assert Gate.parse({"name": "p", "min_ratio": 1}).check(report(reference=None, scores=alone)).passed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: p\nmin_ration: 3\n", "unknown key min_ration; did you mean min_ratio"),
        ("name: p\ndrop: {max: 1, mode: x}\n", "unknown key drop.mode"),
        ("name: p\nzzz: 1\n", "there are name, description"),
        ("name: p\ndrop: {}\n", "drop.max: Field required"),
        ("name: p\nkl: {max: -1}\n", "kl.max"),
        ("name: p\nname: q\n", "given twice"),
        ("- 1\n", "a mapping of limits, not list"),
        ("a: [\n", "line"),
    ],
)
def test_bad_policies(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        Gate.load(path)


def test_policies_by_name(tmp_path: Path) -> None:
    for path in list_content("evals/gates", ".yaml"):
        assert Gate.load(path.stem).policy.name == path.stem
    with pytest.raises(InputError, match="shipped: default, one-bit, strict"):
        Gate.load("defalt")
    with pytest.raises(InputError, match="cannot be read"):
        Gate.load(tmp_path / "none.yaml")


def test_outputs_for_ci(tmp_path: Path) -> None:
    passed = Gate.parse({"name": "p", "min_ratio": 1}).check(report())
    failed = Gate.parse({"name": "a|b", "min_ratio": 1, "drop": {"max": 0.001}}).check(report())
    write_junit(failed, tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.get("name") for case in suite] == ["ratio", "drop sql"]
    assert suite[1][0].get("message") == failed.failures[0].told
    assert b"<failure" not in junit(passed)
    append_summary(passed, tmp_path / "summary.md")
    append_summary(failed, tmp_path / "summary.md")
    assert (tmp_path / "summary.md").read_text() == summary(passed) + summary(failed)
    assert "failed ❌" in summary(failed)
    assert "a\\|b" in summary(failed)


def test_a_result_is_plain_data() -> None:
    scores = [score("sql", "finetuned", 0.33), score("sql", "int2", 0.3, paired=paired(0.03, 0.05))]
    data = Gate.parse({"name": "p", "drop": {"max": 0.02}}).check(report(scores=scores)).to_json()
    assert (data["passed"], data["failed"], data["checks"][0]["measured"]) == (False, 1, 0.05)
