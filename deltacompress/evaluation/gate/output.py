"""What a gate tells other programs: JUnit XML for CI servers, a Markdown table for job summaries."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree

from deltacompress.evaluation.report.markdown import escape
from deltacompress.evaluation.report.records import Check, Verdict
from deltacompress.files.output import output_errors


class Judged(Protocol):
    """What is written of a gate's result: verdicts, and how a check's measured value is shown."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]: ...

    @property
    def passed(self) -> bool: ...

    def measured(self, check: Check) -> str:
        """What a table shows of a check."""


def junit(result: Judged) -> bytes:
    """One test suite per delta, one test case per check."""
    root = ElementTree.Element("testsuites", name="deltacompress gate")
    for verdict in result.verdicts:
        failed = sum(not check.passed for check in verdict.checks)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{verdict.policy}: {verdict.subject}",
            tests=str(len(verdict.checks)),
            failures=str(failed),
            errors="0",
            skipped="0",
        )
        for check in verdict.checks:
            name = check.name if check.task is None else f"{check.name} {check.task}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"gate.{verdict.policy}.{verdict.subject}", name=name
            )
            if not check.passed:
                ElementTree.SubElement(case, "failure", message=check.told, type="gate").text = check.told
    ElementTree.indent(root)
    made: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return made + b"\n"


def summary(result: Judged) -> str:
    """A Markdown table, what failed first."""
    policy = result.verdicts[0].policy
    lines = [f"### Quality gate {escape(policy)}: {'passed ✅' if result.passed else 'failed ❌'}", ""]
    lines += ["| | delta | task | check | measured | wanted |", "|---|---|---|---|---|---|"]
    checks = [check for verdict in result.verdicts for check in verdict.checks]
    for check in sorted(checks, key=lambda one: one.passed):
        told = [check.subject, check.task or "", check.name, result.measured(check), check.wanted]
        cells = ["✅" if check.passed else "❌", *told]
        lines.append("| " + " | ".join(escape(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def append_summary(result: Judged, path: Path) -> None:
    """Append the table to a file; raises OutputError."""
    with output_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(summary(result))
