"""Which causal model types of the installed transformers `compress` takes, and why it refuses the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltacompress.errors import InputError
from deltacompress.models.architectures.survey import VERSION, Verdict, causal_types, judge
from deltacompress.reporter import SILENT, Reporter


@dataclass(frozen=True, slots=True)
class ArchitecturesBench:
    """One verdict for each model type that was tried."""

    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        taken = sum(one.taken for one in self.verdicts)
        return {
            "transformers": VERSION,
            "types": len(self.verdicts),
            "taken": taken,
            "refused": len(self.verdicts) - taken,
            "rows": [_row(one) for one in self.verdicts],
        }


def run(types: Sequence[str] = (), *, reporter: Reporter = SILENT) -> ArchitecturesBench:
    """Try these model types, by default all that the installed transformers has a causal language model for.

    Raises:
        InputError: a type that it has none for.
    """
    known = causal_types()
    for name in types:
        if name not in known:
            told = f"no model type {name!r} with a causal language model in transformers {VERSION}"
            raise InputError(told, way_out="leave it out to try all")
    chosen = list(types) or known
    reporter.phase("trying architectures", len(chosen))
    verdicts = []
    for name in chosen:
        verdicts.append(judge(name))
        reporter.step(name)
    return ArchitecturesBench(tuple(verdicts))


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "model_type": verdict.model_type,
        "taken": verdict.taken,
        "linears": verdict.linears,
        "reason": verdict.reason,
    }
