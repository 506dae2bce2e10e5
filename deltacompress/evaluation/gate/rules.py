"""Gates: a policy in YAML says how much a delta may lose, and a report is held against it.

A drop passes if its upper confidence bound passes: too few samples prove nothing, and fail, with a message that says
so. What is bounded is the drop of the score, or, which takes far fewer samples, the probability that the answers lost
(drop.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deltacompress.adapters.adapter import ANEW
from deltacompress.arguments import checked
from deltacompress.errors import DeltaCompressError, InputError, IntegrityError, spelled
from deltacompress.evaluation.gate.drop import drop_checks, new_check
from deltacompress.evaluation.gate.output import summary
from deltacompress.evaluation.gate.policy import Policy
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.report.records import Check, ScoreRecord, SubjectRecord, Verdict
from deltacompress.evaluation.scoring.statistics import FEWEST
from deltacompress.files.content import find_yaml
from deltacompress.files.strict_yaml import read_yaml


class GateFailedError(DeltaCompressError):
    """A report does not meet a policy; exit code 1."""

    exit_code = 1


def reference_of(roles: Collection[str]) -> str:
    """How to get what a policy compares subjects of these roles with: the fine-tuned model of an adapter is nowhere
    until somebody merges it.
    """
    how = f"evaluate with {spelled('--against finetuned=PATH', 'finetuned=PATH')}"
    if "adapter" not in roles or "delta" in roles:
        return how
    return f"{how}, PATH being what PEFT's merge_and_unload makes of it, or take a policy that only asks for scores"


def _digest(one: SubjectRecord) -> str | None:
    return one.identity if one.role == "adapter" else one.manifest_digest


@dataclass(frozen=True, slots=True)
class GateResult:
    """What a gate says about every delta of a report."""

    verdicts: tuple[Verdict, ...]
    bounds: frozenset[str] = frozenset()
    """Names of the checks whose `measured` is an upper confidence bound, not a measured value."""

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for verdict in self.verdicts for check in verdict.checks if not check.passed)

    def require(self) -> GateResult:
        """The same, if it passed.

        Raises:
            GateFailedError: names the checks that failed.
        """
        if not self.passed:
            first = self.failures[0]
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            raise GateFailedError(f"gate {self.verdicts[0].policy} failed for {first.subject}: {first.told}{more}")
        return self

    def _repr_markdown_(self) -> str:
        """What a notebook shows: the table of checks."""
        return summary(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data: a row per check; bound: whether `measured` is an upper confidence bound."""
        checks = [check for verdict in self.verdicts for check in verdict.checks]
        rows = [check.model_dump(mode="json") | {"bound": check.name in self.bounds} for check in checks]
        return {"policy": self.verdicts[0].policy, "passed": self.passed, "failed": len(self.failures), "checks": rows}

    def measured(self, check: Check) -> str:
        """What a table shows of a check: a number, "<= " and an upper confidence bound, or nothing."""
        if not isinstance(check.measured, float | int):
            return ""
        return f"{'<= ' if check.name in self.bounds else ''}{check.measured:.5g}"


@dataclass(frozen=True, slots=True)
class Gate:
    """A policy, ready to judge reports."""

    policy: Policy

    @classmethod
    @checked
    def load(cls, name_or_path: str | Path) -> Gate:
        """Read a shipped policy by name, or any by path.

        Raises:
            InputError: no such policy, not YAML, or a key that is unknown or wrong; names it.
        """
        path = find_yaml(name_or_path, "evals/gates", what="policy", kind=InputError)
        data = read_yaml(path, what="policy", docs="docs/evaluation.md", kind=InputError)
        return cls.parse(data, where=str(path))

    @classmethod
    def parse(cls, data: Any, *, where: str = "policy") -> Gate:
        """Check plain data.

        Raises:
            InputError: names the first key that is unknown or wrong.
        """
        if not isinstance(data, dict):
            raise InputError(
                f"a policy is a mapping of limits, not {type(data).__name__}",
                where=where,
                way_out="see docs/evaluation.md",
            )
        try:
            return cls(Policy.model_validate(data))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                close = get_close_matches(str(first["loc"][-1]), Policy.model_fields, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(Policy.model_fields)}"
                raise InputError(f"unknown key {at}{hint}", where=where) from error
            raise InputError(f"{at}: {first['msg']}", where=where, way_out="see docs/evaluation.md") from error

    @property
    def compares(self) -> bool:
        """Whether the policy compares with the fine-tuned model."""
        policy = self.policy
        asked = (policy.drop, policy.kl, policy.min_top1, policy.min_recovery)
        return any(one is not None for one in asked)

    def check_tasks(self, names: Sequence[str]) -> None:
        """Make sure that the policy's own limits of tasks are of tasks that are measured.

        Raises:
            InputError: drop.tasks or kl.tasks names another one.
        """
        for key, limit in (("drop", self.policy.drop), ("kl", self.policy.kl)):
            for task in limit.tasks if limit is not None else ():
                if task not in names:
                    raise InputError(
                        f"{key}.tasks: {task} is not measured, only {', '.join(names)}",
                        where=f"policy {self.policy.name}",
                        way_out="correct its name, or measure it",
                    )

    @checked
    def check(self, report: Report, *, manifest_digest: str | None = None) -> GateResult:
        """Hold every delta and adapter of a report against the policy.

        manifest_digest: of the artifact that the report should be about, if that is to be made sure; of an adapter,
            its digest.

        Raises:
            InputError: the report has no delta, or lacks the fine-tuned model that the policy compares with; or as
                check_tasks.
            IntegrityError: the report is about another manifest.
        """
        deltas = report.deltas
        if manifest_digest is not None:
            deltas = tuple(one for one in deltas if _digest(one) == manifest_digest)
            if not deltas:
                told = ", ".join(f"{one.label} {str(_digest(one))[:12]}" for one in report.deltas) or "none"
                anew = ANEW if any(one.role == "adapter" for one in report.deltas) else ""
                raise IntegrityError(
                    f"the report is about another manifest: {manifest_digest[:12]} is not in it (it has {told})",
                    way_out=f"evaluate this artifact{anew}",
                )
        if not deltas:
            raise InputError(
                "the report measures no delta", way_out="`deltacompress eval ARTIFACT ...` makes one that does"
            )
        self.check_tasks([task.name for task in report.tasks])
        if self.compares and report.reference is None:
            roles = {one.role for one in deltas}
            none = ", and an adapter has none" if roles == {"adapter"} else ""
            raise InputError(
                f"policy {self.policy.name} compares with the fine-tuned model, which the report does not have{none}",
                way_out=reference_of(roles),
            )
        verdicts = []
        for delta in deltas:
            checks = tuple(self._checks(report, delta))
            passed = all(check.passed for check in checks)
            verdicts.append(Verdict(policy=self.policy.name, subject=delta.label, passed=passed, checks=checks))
        upper = self.policy.drop is not None and self.policy.drop.bound != "point"
        return GateResult(tuple(verdicts), frozenset({"kl", "drop"} if upper else {"kl"}))

    def _checks(self, report: Report, delta: SubjectRecord) -> Iterator[Check]:
        policy, label = self.policy, delta.label
        there = {task.name for task in report.tasks}
        for task in policy.require_tasks:
            told = f"task {task} {'is' if task in there else 'is not'} in the report"
            yield new_check("required task", label, task, None, "in the report", task in there, told)
        for task, least in policy.min_score.items():
            if task not in there:
                told = f"task {task}, whose score is wanted, is not in the report"
                yield new_check("score", label, task, None, f">= {least:g}", False, told)
        if policy.min_ratio is not None:
            ratio = delta.ratio or 0.0
            told = f"ratio {ratio:.2f}x, wanted at least {policy.min_ratio:g}x"
            yield new_check("ratio", label, None, ratio, f">= {policy.min_ratio:g}", ratio >= policy.min_ratio, told)
        for info in report.tasks:
            score = report.score(info.name, label)
            if score is None:
                told = f"task {info.name} was not answered, though the report has it"
                yield new_check("score", label, info.name, None, "measured", False, told)
            else:
                yield from self._task(report, info.kind, score)
        for overlap in report.overlap:
            if overlap.subject == label and overlap.verdict == "overlaps":
                yield new_check(
                    "held out", label, overlap.task, overlap.overlapping, "0", policy.allow_overlap, overlap.told
                )

    def _task(self, report: Report, kind: str, score: ScoreRecord) -> Iterator[Check]:
        policy, label, task = self.policy, score.subject, score.task
        few = score.samples < policy.min_samples
        if policy.min_samples > 1:
            told = f"{task}: {score.samples} samples, wanted at least {policy.min_samples}"
            yield new_check("samples", label, task, score.samples, f">= {policy.min_samples}", not few, told)
        if task in policy.min_score:
            least = policy.min_score[task]
            told = f"{task}: score {score.value:.4f}, wanted at least {least:g}"
            yield new_check("score", label, task, score.value, f">= {least:g}", score.value >= least, told)
        paired, fidelity = score.paired, score.fidelity
        for name, asked, there in (
            ("drop", policy.drop is not None or policy.min_recovery is not None, paired),
            ("kl", policy.kl is not None or policy.min_top1 is not None, fidelity),
        ):
            if asked and there is None:
                told = f"{task}: its {name} was not measured ({score.samples} samples; a bound needs {FEWEST})"
                yield new_check(name, label, task, None, "measured", False, told)
        if policy.drop is not None and paired is not None:
            yield from drop_checks(policy.drop, score, paired, report.settings.confidence)
        if policy.min_recovery is not None and paired is not None and paired.recovery is None:
            told = f"{task}: there is no recovery, since the fine-tuned model scores 0"
            yield new_check("recovery", label, task, None, "measured", False, told)
        elif policy.min_recovery is not None and paired is not None and paired.recovery is not None:
            told = f"{task}: recovery {paired.recovery:.4f}, wanted at least {policy.min_recovery:g}"
            passed = paired.recovery >= policy.min_recovery
            yield new_check("recovery", label, task, paired.recovery, f">= {policy.min_recovery:g}", passed, told)
        if policy.kl is not None and fidelity is not None:
            default = policy.kl.choose if kind == "choose" and policy.kl.choose is not None else policy.kl.max
            limit = policy.kl.tasks.get(task, default)
            told = f"{task}: KL {fidelity.kl:.5f} nats/token (at most {fidelity.kl_high:.5f}), allowed {limit:g}"
            yield new_check("kl", label, task, fidelity.kl_high, f"<= {limit:g}", fidelity.kl_high <= limit, told)
        if policy.min_top1 is not None and fidelity is not None:
            told = f"{task}: top-1 agreement {fidelity.top1:.4f}, wanted at least {policy.min_top1:g}"
            passed = fidelity.top1 >= policy.min_top1
            yield new_check("top-1", label, task, fidelity.top1, f">= {policy.min_top1:g}", passed, told)
