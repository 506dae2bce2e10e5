"""Evaluation reports: any JSON object, attached to a version as a referrer; its numbers become scores.

A report says what somebody measured later, so it never is a part of the entry. Its numbers are found by the path of
keys that leads to them, e.g. `sst2.accuracy`; what `list --score` filters by.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deltacompress.errors import CheckpointError, InputError
from deltacompress.safetensors_header import load_json_object
from deltacompress.zoo import canonical
from deltacompress.zoo.artifact import Described
from deltacompress.zoo.blobs import Blob
from deltacompress.zoo.entry import REPORT, Descriptor, EntryManifest
from deltacompress.zoo.zoo import Zoo

MAX_REPORT_BYTES = 4 << 20
MAX_SCORES = 64
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
        """Read `sst2.accuracy>=0.9`.

        Raises:
            InputError: not of that form.
        """
        match = _CONDITION.fullmatch(text)
        try:
            if match is not None:
                return cls(match[1].lower(), match[2], float(match[3]))
        except ValueError:
            pass
        raise InputError(f"--score {text[:80]!a}: write it as a score and a bound, e.g. sst2.accuracy>=0.9")

    def holds(self, found: dict[str, float]) -> bool:
        """Whether the score is there and as it should be."""
        return self.score in found and _COMPARE[self.compare](found[self.score], self.value)


def describe_report(raw: bytes, subject: str, where: str) -> Described:
    """A report about the manifest with digest `subject`.

    Raises:
        InputError: not a JSON object, or too large.
    """
    if not canonical.fits(raw, MAX_REPORT_BYTES):
        raise InputError(f"{where}: over {MAX_REPORT_BYTES} bytes, or of too many values; attach a summary instead")
    try:
        data = load_json_object(raw, where)
        spelled = canonical.spell(data)
    except (CheckpointError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not a JSON object ({' '.join(str(error).split())[:200]})") from error
    found: dict[str, str | int | float | None] = {}
    for key, value in _numbers(data, ""):
        if len(found) < MAX_SCORES:
            found.setdefault(key, value)
    blob = Blob(canonical.sha256(spelled), len(spelled), lambda: (spelled,), where)
    entry = EntryManifest(
        kind="report",
        config=Descriptor(media_type=REPORT, digest=blob.digest, size=blob.size),
        summary=found,
        subject=subject,
    )
    return Described(entry, [blob])


def scores(zoo: Zoo, name: str) -> dict[str, float]:
    """Every score of the reports attached to a version. Of two that speak of one score, that with the higher digest
    counts: reports have no order; attach one, not two.

    Raises:
        ZooError: no such entry, or a damaged report.
    """
    found: dict[str, float] = {}
    for entry in sorted(zoo.referrers(name), key=lambda one: one.digest):
        if entry.kind == "report":
            found |= {key: float(value) for key, value in entry.summary.items() if isinstance(value, int | float)}
    return found


def _numbers(data: Any, path: str) -> Iterator[tuple[str, float]]:
    """(path, number) of every number, depth first; rows of a list go by their name or task."""
    todo = [(path, data)]
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
            key = re.sub(r"[^a-z0-9_.-]+", "-", at.strip(".").lower())[:64]
            if re.fullmatch(r"[a-z][a-z0-9_.-]{0,63}", key):
                yield key, float(value)
