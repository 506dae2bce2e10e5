"""Quality gates in a test suite: five lines of Python, and pytest says which check failed and by how much.

from deltacompress.evaluation.testing import assert_gate

def test_the_support_bot_kept_its_skills(tmp_path):
    assert_gate("support-bot.delta", base="base", finetuned="support-bot", tasks=["intents"], task_dir="data",
                policy="default", out=tmp_path)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltacompress.evaluation.gate.rules import Gate
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.run import evaluate


def assert_gate(artifact: str | Path, *, policy: str | Path = "default", **options: Any) -> Report:
    """Evaluate an artifact (options: as `evaluate`) and fail the test if it does not pass; returns the report.

    Raises:
        AssertionError: one line per check that failed.
        InputError, IntegrityError: as `evaluate` and `Gate.check`.
    """
    gate = Gate.load(policy)
    report = evaluate(artifact, policy=policy, **options)
    result = gate.check(report)
    if not result.passed:
        lines = "\n".join(f"  {check.subject}: {check.told}" for check in result.failures)
        raise AssertionError(f"gate {gate.policy.name} failed:\n{lines}")
    return report
