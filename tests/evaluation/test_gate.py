"""Gates: what passes, what fails and why, and every policy that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from evaluation.reports import answers, paired, report, score, subject

from deltacompress.errors import InputError, IntegrityError
from deltacompress.evaluation.gate.drop import _too_few
from deltacompress.evaluation.gate.early import refuse_hopeless
from deltacompress.evaluation.gate.output import append_summary, junit, summary
from deltacompress.evaluation.gate.rules import Gate, GateFailedError
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.report.records import ScoreRecord, SubjectRecord
from deltacompress.evaluation.tasks.load import load_tasks
from deltacompress.files.content import list_content


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
        ({"kl": {"max": 9, "choose": 1e-5, "tasks": {"sql": 0.002}}}, {"kl": 0.001, "kind": "choose"}, []),
        ({"kl": {"max": 0.00125}}, {"kl": 0.00125 / 1.1}, []),
        ({"drop": {"max": 0.001, "bound": "point"}}, {"drop": 0.004}, ["drop"]),
        ({"drop": {"max": 0.004, "bound": "point"}}, {"drop": 0.004}, []),
        ({"drop": {"max": 0.001, "tasks": {"sql": 0.02}}}, {}, []),
        ({"min_top1": 0.99}, {}, ["top-1"]),
        ({"min_top1": 0.98}, {}, []),
        ({"min_recovery": 0.995}, {}, ["recovery"]),
        ({"min_recovery": 0.99}, {}, []),
        ({"min_score": {"sql": 0.4}}, {}, ["score"]),
        ({"min_score": {"sql": 0.326}}, {}, []),
        ({"min_score": {"sqll": 0.1}}, {}, ["score"]),
        ({"min_ratio": 10}, {}, []),
        ({"min_ratio": 10.5}, {}, ["ratio"]),
        ({"min_samples": 501}, {}, ["samples"]),
        ({"min_samples": 500}, {}, []),
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


def test_a_recovery_of_nothing_is_no_recovery() -> None:
    """The fine-tuned model scores 0, so there is no share of it; what was asked for is not shown."""
    lost = [score("sql", "finetuned", 0.0), score("sql", "int2", 0.0, paired=paired(0, 0, recovery=None))]
    (failure,) = Gate.parse({"name": "p", "min_recovery": 0.5}).check(report(scores=lost)).failures
    assert (failure.name, failure.measured, failure.wanted) == ("recovery", None, "measured")
    assert failure.told == "sql: there is no recovery, since the fine-tuned model scores 0"


def test_what_a_check_asked_for_is_told() -> None:
    policy = {"name": "p", "kl": {"max": 9}, "require_tasks": ["gone"]}
    missing, unmeasured = Gate.parse(policy).check(report(scores=[score("sql", "int2", 0.3)])).failures
    assert (missing.name, missing.task, missing.wanted) == ("required task", "gone", "in the report")
    assert missing.told == "task gone is not in the report"
    assert (unmeasured.name, unmeasured.task, unmeasured.wanted) == ("kl", "sql", "measured")
    (unanswered,) = Gate.parse(policy | {"require_tasks": []}).check(report(scores=[])).failures
    assert (unanswered.name, unanswered.task, unanswered.wanted) == ("score", "sql", "measured")


def test_how_many_more_failed_is_told_if_any_did() -> None:
    for policy, told in (({"min_ratio": 99}, "99x$"), ({"min_ratio": 99, "min_samples": 999}, r"99x \(and 1 more\)$")):
        with pytest.raises(GateFailedError, match=told):
            Gate.parse({"name": "p"} | policy).check(report()).require()


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
    # the bound is 0.049 above the drop, where 0.009 are allowed: (49 / 9)^2 = 29.6 times the 500 samples
    assert result.failures[0].told.endswith("(500 samples are too few to tell; about 15000 might do)")
    at_the_limit = Gate.parse({"name": "p", "drop": {"max": 0.01}}).check(report(drop=0.01, upper=0.05))
    assert at_the_limit.failures[0].told.endswith("(500 samples are too few to tell)")
    lost = Gate.parse({"name": "p", "drop": {"max": 0.01}}).check(report(drop=0.02, upper=0.05))
    assert lost.failures[0].told.endswith("allowed 0.01")
    with pytest.raises(GateFailedError, match="gate p failed for int2: sql: drop") as failed:
        result.require()
    assert failed.value.exit_code == 1


PROBABILITY = {"name": "p", "drop": {"max": 0.03, "bound": "probability"}}


def probable(lost: float, upper: float, right: float | None = 0.3, **more: float) -> Report:
    """A report with probabilities of the answers; more: of the comparison of the scores."""
    compared = paired(more.pop("drop", 0.0), more.pop("bound", 0.05), **more)
    scores = [score("sql", "finetuned", 0.33), score("sql", "int2", 0.33, paired=compared)]
    return report(scores=[scores[0], scores[1] | {"answers": answers(lost, upper, right)}])


@pytest.mark.parametrize(
    ("made", "failed"),
    [
        (probable(0.01, 0.03), []),
        (probable(0.01, 0.031), ["drop"]),
        (probable(0.01, 0.02, drop=0.029, bound=0.2), []),  # the score's own bound is not asked for
        (probable(0.01, 0.02, low=0.03), []),
        (probable(0.01, 0.02, low=0.031), ["drop shown"]),
        (probable(0.04, 0.05, low=0.031), ["drop", "drop shown"]),
        (probable(0.01, 0.02, None), []),
        (probable(0.0, 0.0, 0.15), ["drop"]),  # there is little to lose
        (probable(0.0, 0.0, 0.151), []),
    ],
)
def test_a_drop_by_probability(made: Report, failed: list[str]) -> None:
    result = Gate.parse(PROBABILITY).check(made)
    assert [one.name for one in result.failures] == failed
    assert [one.name for one in result.verdicts[0].checks] == ["drop", "drop shown"]


def test_a_drop_by_probability_has_limits_of_tasks() -> None:
    policy = PROBABILITY | {"drop": {"max": 0.001, "bound": "probability", "tasks": {"sql": 0.03}}}
    assert Gate.parse(policy).check(probable(0.01, 0.03)).passed
    assert not Gate.parse(policy).check(probable(0.01, 0.04)).passed


def told(made: Report) -> list[str]:
    return [one.told for one in Gate.parse(PROBABILITY).check(made).verdicts[0].checks]


def test_what_a_drop_by_probability_tells() -> None:
    assert told(probable(0.01, 0.02, low=-0.01, high=0.02, bound=0.02)) == [
        "sql: the right answers lost +0.0100 of probability, at most 0.0200 with 95% confidence, allowed 0.03",
        "sql: the score dropped by +0.0000, 95% interval -0.0100 to +0.0200, allowed 0.03",
    ]
    choice, shown = told(probable(0.02, 0.035, None, drop=0.02, low=0.001, high=0.05, bound=0.035))
    assert choice == (
        "sql: up to 0.0200 of the probability moved between choices, at most 0.0350 with 95% confidence, allowed 0.03 "
        "(500 samples are too few to tell; about 1200 might do)"
    )
    assert shown == (
        "sql: the score dropped by +0.0200, 95% interval +0.0010 to +0.0500, allowed 0.03 (the score alone would not "
        "show it: 500 samples are too few to tell; about 1200 might do)"
    )
    assert _too_few(3, 0.02, 0.035, 0.03) == "3 samples are too few to tell; about 7 might do"
    assert told(probable(0.0, 0.0, 0.15))[0].endswith(
        "allowed 0.03; the fine-tuned model itself gives them only 0.1500, no more than 5 times that, so this task "
        "hardly shows such a drop: choose another one, or bound: upper"
    )
    assert told(probable(0.0, 0.0, 0.1501))[0].endswith("allowed 0.03")
    assert told(probable(0.04, 0.05))[0].endswith("allowed 0.03")
    assert told(probable(0.0, 0.0, drop=0.1, low=0.05, bound=0.15))[1].endswith("allowed 0.03")


@pytest.mark.parametrize("limit", [{"max": 3}, {"max": 0}, {"max": -0.01}, {"max": 0.03, "tasks": {"sql": 1}}])
def test_a_drop_of_probability_is_a_share(limit: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"drop: .*a share between 0 and 1: three points are 0\.03"):
        Gate.parse({"name": "p", "drop": limit | {"bound": "probability"}})
    Gate.parse({"name": "p", "drop": limit})  # scores have units of their own


def test_a_drop_by_probability_falls_to_the_score_where_there_is_none() -> None:
    for upper, passed in ((0.03, True), (0.031, False)):
        result = Gate.parse(PROBABILITY).check(report(upper=upper))
        assert result.passed == passed
        (only,) = result.verdicts[0].checks
        assert (only.name, only.measured) == ("drop", upper)
        assert "judged by the score: the report has no probabilities of these answers" in only.told
    assert "judged by" not in Gate.parse({"name": "p", "drop": {"max": 1}}).check(report()).verdicts[0].checks[0].told


def test_the_other_bounds_are_of_the_score_whatever_the_answers_lost() -> None:
    for bound, wanted in (("upper", 0.05), ("point", 0.0)):
        policy = {"name": "p", "drop": {"max": 0.03, "bound": bound}}
        (only,) = Gate.parse(policy).check(probable(0.2, 0.3)).verdicts[0].checks
        assert (only.name, only.measured) == ("drop", wanted)


def test_few_samples_of_a_drop_by_probability_are_refused_early(task_dir: Path) -> None:
    tasks = load_tasks(["colours"], task_dir=task_dir, few_shot=None, limit=7)
    with pytest.raises(InputError, match="to bound its kl, min_top1 or probability, at least 8 samples"):
        refuse_hopeless(Gate.parse(PROBABILITY).policy, tasks, 7)
    refuse_hopeless(Gate.parse({"name": "p", "drop": {"max": 0.03}}).policy, tasks, 7)


def test_only_deltas_are_judged() -> None:
    result = Gate.parse({"name": "p", "drop": {"max": 0.03}}).check(report())
    assert [verdict.subject for verdict in result.verdicts] == ["int2"]
    assert result.require() is result


def two_deltas() -> Report:
    """int2, which loses 0.4 points, and int1, which loses ten."""
    made = report()
    worse = subject("int1", "delta", ratio=20.0, manifest_digest="f" * 64)
    scores = [*made.scores, score("sql", "int1", 0.23, paired=paired(0.1, 0.12))]
    return made.model_copy(
        update={
            "subjects": (*made.subjects, SubjectRecord.model_validate(worse)),
            "scores": tuple(ScoreRecord.model_validate(one) for one in scores),
        }
    )


def test_every_delta_must_pass() -> None:
    result = Gate.parse({"name": "p", "drop": {"max": 0.03}}).check(two_deltas())
    assert [(verdict.subject, verdict.passed) for verdict in result.verdicts] == [("int2", True), ("int1", False)]
    assert not result.passed
    assert [check.subject for check in result.failures] == ["int1"]
    with pytest.raises(GateFailedError, match=r"gate p failed for int1: sql: drop \+0.1000, at most 0.1200 with 95%"):
        result.require()


def test_of_one_artifact_only_its_own_delta_is_judged() -> None:
    gate = Gate.parse({"name": "p", "drop": {"max": 0.03}})
    for digest, label, passed in (("c" * 64, "int2", True), ("f" * 64, "int1", False)):
        result = gate.check(two_deltas(), manifest_digest=digest)
        assert [verdict.subject for verdict in result.verdicts] == [label]
        assert result.passed == passed


def test_more_than_one_failure_is_counted() -> None:
    result = Gate.parse({"name": "p", "drop": {"max": 0.001}, "min_ratio": 99, "min_samples": 900}).check(report())
    with pytest.raises(GateFailedError, match=r"for int2: ratio 10.00x, wanted at least 99x \(and 2 more\)$"):
        result.require()


def test_a_bound_is_shown_as_a_bound() -> None:
    """0.012 is not what was measured but the most that was lost, with 95 % confidence."""
    asked = {"name": "p", "min_ratio": 2, "drop": {"max": 0.03}, "kl": {"max": 9}, "min_top1": 0.5}
    result = Gate.parse(asked).check(report())
    shown = {check.name: result.measured(check) for check in result.verdicts[0].checks}
    assert shown == {"ratio": "10", "drop": "<= 0.012", "kl": "<= 0.0011", "top-1": "0.98"}
    assert "| drop | &lt;= 0.012 | &lt;= 0.03 |" in summary(result)
    assert {row["name"]: row["bound"] for row in result.to_json()["checks"]} == {
        "ratio": False, "drop": True, "kl": True, "top-1": False,
    }  # fmt: skip
    bounded = Gate.parse(PROBABILITY).check(probable(0.01, 0.02, low=-0.01))
    shown = {check.name: bounded.measured(check) for check in bounded.verdicts[0].checks}
    assert shown == {"drop": "<= 0.02", "drop shown": "-0.01"}
    point = Gate.parse(asked | {"drop": {"max": 0.03, "bound": "point"}}).check(report())
    assert point.measured(point.verdicts[0].checks[1]) == "0.004"
    missing = Gate.parse({"name": "p", "min_score": {"gone": 1}}).check(report())
    assert missing.measured(missing.failures[0]) == ""


def test_what_is_told_of_a_check_is_what_was_measured() -> None:
    asked = {"drop": {"max": 0.03}, "kl": {"max": 9}, "min_top1": 0.5, "min_recovery": 0.5, "min_score": {"sql": 0.1}}
    (verdict,) = Gate.parse({"name": "p", "min_ratio": 2, "min_samples": 2} | asked).check(report()).verdicts
    assert {check.name: check.measured for check in verdict.checks} == {
        "ratio": 10.0, "samples": 500, "score": 0.326, "drop": 0.012, "recovery": 0.99, "kl": 0.0011, "top-1": 0.98,
    }  # fmt: skip
    wanted = {check.name: check.wanted for check in verdict.checks}
    assert (wanted["drop"], wanted["ratio"], wanted["kl"], wanted["top-1"]) == ("<= 0.03", ">= 2", "<= 9", ">= 0.5")
    (point,) = Gate.parse({"name": "p", "drop": {"max": 0.03, "bound": "point"}}).check(report()).verdicts
    assert point.checks[0].measured == 0.004


@pytest.mark.parametrize("policy", [{"drop": {"max": 1}}, {"kl": {"max": 1}}, {"min_top1": 0}, {"min_recovery": 0}])
def test_policies_that_compare_need_the_fine_tuned_model(policy: dict[str, Any]) -> None:
    alone = report(reference=None, scores=[score("sql", "int2", 0.3)])
    with pytest.raises(InputError, match="compares with the fine-tuned model"):
        Gate.parse({"name": "p"} | policy).check(alone)


def test_the_summary_begins_with_what_failed() -> None:
    result = Gate.parse({"name": "p", "drop": {"max": 0.03}, "min_ratio": 5}).check(two_deltas())
    shown = [line.split(" | ")[:2] for line in summary(result).splitlines() if line[:3] in ("| ❌", "| ✅")]
    assert shown == [["| ❌", "int1"], ["| ✅", "int2"], ["| ✅", "int2"], ["| ✅", "int1"]]
    suites = ElementTree.fromstring(junit(result))
    assert [(suite.get("tests"), suite.get("failures")) for suite in suites] == [("2", "0"), ("2", "1")]


def test_a_report_of_another_manifest_is_refused() -> None:
    gate = Gate.parse({"name": "p"})
    assert gate.check(report(), manifest_digest="c" * 64).passed
    with pytest.raises(IntegrityError, match="about another manifest: ffffffffffff is not in it"):
        gate.check(report(), manifest_digest="f" * 64)


def test_reports_that_cannot_be_judged() -> None:
    with pytest.raises(InputError, match="measures no delta"):
        Gate.parse({"name": "p"}).check(report(subjects=[]))
    alone = [score("sql", "int2", 0.3)]
    with pytest.raises(InputError, match="evaluate with finetuned=PATH"):
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
        ("name: p\ndrop: {max: .nan}\n", "drop.max: Input should be a finite number"),
        ("name: p\ndrop: {max: .inf}\n", "drop.max: Input should be a finite number"),
        ("name: p\ndrop: {max: 1, tasks: {a: .nan}}\n", "drop.tasks.a: Input should be a finite number"),
        ("name: p\nkl: {max: .inf}\n", "kl.max: Input should be a finite number"),
        ("name: p\nmin_score: {t: .nan}\n", "min_score.t: Input should be a finite number"),
        ("name: p\nmin_ratio: .inf\n", "min_ratio: Input should be a finite number"),
        ("[" * 5000, "nested too deeply to be a policy; see docs/evaluation.md"),
        ("a: b: c\n", "mend it, see docs/evaluation.md"),
    ],
)
def test_bad_policies(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        Gate.load(path)


def test_policies_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in list_content("evals/gates", ".yaml"):
        assert Gate.load(path.stem).policy.name == path.stem
    with pytest.raises(InputError, match="shipped: default, one-bit, strict"):
        Gate.load("defalt")
    with pytest.raises(InputError, match="cannot be read"):
        Gate.load(tmp_path / "none.yaml")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    for given in ("./fifo", "fifo"):
        with pytest.raises(InputError, match=r"the policy cannot be read \(a named pipe"):
            Gate.load(given)


def test_outputs_for_ci(tmp_path: Path) -> None:
    passed = Gate.parse({"name": "p", "min_ratio": 1}).check(report())
    failed = Gate.parse({"name": "a|b", "min_ratio": 1, "drop": {"max": 0.001}}).check(report())
    suite = ElementTree.fromstring(junit(failed))[0]
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
