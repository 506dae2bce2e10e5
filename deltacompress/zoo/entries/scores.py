"""Scores: the numbers of reports under names that `list --score` filters by, e.g. `sst2.acc`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deltacompress.errors import InputError

MAX_SCORES = 64
"""How many of one report count."""
_CONDITION = re.compile(r"\s*([a-z][a-z0-9_.-]{0,63})\s*(>=|<=|>|<|=)\s*(-?[0-9.]+(?:e-?[0-9]+)?)\s*", re.IGNORECASE)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """`score >= value` and the like."""

    score: str
    compare: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `sst2.acc>=0.9`.

        Raises:
            InputError: not of that form.
        """
        match = _CONDITION.fullmatch(text)
        try:
            if match is not None:
                return cls(match[1].lower(), match[2], float(match[3]))
        except ValueError:
            pass
        raise InputError("write it as a score and a bound, e.g. sst2.acc>=0.9", where=f"--score {text[:80]!a}")

    def holds(self, found: Mapping[str, float]) -> bool:
        """Whether the score is there and as it should be."""
        return self.score in found and _COMPARE[self.compare](found[self.score], self.value)


def score_key(path: str) -> str:
    """The name of a score: lower case, what is no letter, digit or one of `_ . -` as a dash, a letter first."""
    key = re.sub(r"[^a-z0-9_.-]+", "-", path.strip(".").lower())
    return (key if re.match("[a-z]", key) else f"x-{key}")[:64]


def numbers_in(data: Any) -> Iterator[tuple[str, float]]:
    """(name, number) of every number in nested JSON, depth first, named by the keys that lead to it; rows of a list go
    by their name or task.
    """
    todo: list[tuple[str, Any]] = [("", data)]
    while todo:
        at, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{at}.{key}", one) for key, one in reversed(value.items())]
        elif isinstance(value, list):
            for one in reversed(value):
                label = (
                    next((one[k] for k in ("task", "name") if isinstance(one.get(k), str)), None)
                    if isinstance(one, dict)
                    else None
                )
                if label is not None:
                    todo.append((f"{at}.{label}", one))
        elif type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value):
            yield score_key(at), float(value)
