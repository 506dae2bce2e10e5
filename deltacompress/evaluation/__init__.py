"""Accuracy reports and quality gates: what a compressed delta keeps of its fine-tuned model, said honestly.

    from deltacompress.evaluation import Gate, evaluate

    report = evaluate("artifact", base="base", finetuned="finetuned", tasks=["sst2"], task_dir="data", out="report")
    Gate.load("default").check(report).require()

Names are resolved on first use, so that importing this costs no torch and no lm-eval (the optional extra `eval`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacompress.evaluation.comparison import compare
    from deltacompress.evaluation.gate.rules import Gate, GateFailedError, GateResult
    from deltacompress.evaluation.gated import GatedResult, compress_gated
    from deltacompress.evaluation.report.data import Report, read_report
    from deltacompress.evaluation.run import evaluate

__all__ = [
    "Gate",
    "GateFailedError",
    "GateResult",
    "GatedResult",
    "Report",
    "compare",
    "compress_gated",
    "evaluate",
    "read_report",
]

_HOME = {
    "Gate": "gate.rules",
    "GateFailedError": "gate.rules",
    "GateResult": "gate.rules",
    "GatedResult": "gated",
    "Report": "report.data",
    "compare": "comparison",
    "compress_gated": "gated",
    "evaluate": "run",
    "read_report": "report.data",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
