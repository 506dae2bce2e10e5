"""Sparsity patterns: which weights of a row may be kept.

`dense` keeps all, `n:m` keeps exactly n of every m neighbours along in_features (2:4 is what sparse tensor cores
read), `drawn:n:m` as many, but by lot, whatever they are, so that a seed tells which (numerics/bits/drawn.py);
`unstructured:f` prunes the fraction f. A last group that in_features leaves ragged keeps min(n, its size), by lot n at
most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_NM = re.compile(r"(drawn:)?([1-9]\d*):([1-9]\d*)")
_UNSTRUCTURED = re.compile(r"unstructured:(0?\.\d{1,6})")


@dataclass(frozen=True, slots=True)
class Sparsity:
    """A parsed pattern. `n`, `m` are set for n:m and drawn, `fraction` (pruned share) for unstructured only.

    >>> Sparsity.parse("2:4").kept_share
    0.5
    """

    kind: Literal["dense", "n:m", "drawn", "unstructured"]
    n: int = 0
    m: int = 0
    fraction: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Sparsity:
        """Read "dense", "n:m" or "drawn:n:m" (1 <= n < m <= 16), or "unstructured:F" (0 < F < 1, at most six
        decimals).

        Raises:
            ValueError: the text is none of these.
        """
        if text == "dense":
            return cls("dense")
        if found := _NM.fullmatch(text):
            n, m = int(found[2]), int(found[3])
            if n < m <= 16:
                return cls("drawn" if found[1] else "n:m", n=n, m=m)
        if found := _UNSTRUCTURED.fullmatch(text):
            fraction = float(found[1])
            if 0 < fraction < 1:
                return cls("unstructured", fraction=fraction)
        raise ValueError(
            f"sparsity {text!r} is not 'dense', 'n:m', 'drawn:n:m' with n < m <= 16, or 'unstructured:0.x'"
        )

    def __str__(self) -> str:
        if self.m:
            return f"{'drawn:' if self.kind == 'drawn' else ''}{self.n}:{self.m}"
        return self.kind if self.kind == "dense" else "unstructured:" + f"{self.fraction:.6f}".rstrip("0")

    @property
    def kept_share(self) -> float:
        """Share of the weights that are kept (of a row that the pattern divides)."""
        if self.m:
            return self.n / self.m
        return 1.0 - self.fraction
