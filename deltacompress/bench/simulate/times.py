"""How long things take: a model of steps, loads and copies with a few measured numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deltacompress.errors import InputError, option

_ZERO = {"row_ms", "first_variant_ms", "variant_ms", "load_ms", "start_ms", "hold_ms", "attend_ms"}  # may be 0


@dataclass(frozen=True, slots=True)
class Times:
    """Defaults: a 7B shape with `int2-24` variants on one H100, docs/benchmarks-serving.md.

    A decode step takes base_ms, row_ms for each row, first_variant_ms if any row is a variant's and variant_ms for each
    variant among them: 5.89 ms for one row, 6.50 for 16, 16.40 with 16 variants and 25.70 with 32 are met. load_ms: a
    variant from the page cache, hashes compared (65 ms moved). swap_gb_s: KV to the host and back, below the 55 GB/s
    at which whole models came from pinned memory. kv_token_bytes: 2 x 32 layers x 4096 x 2 bytes. kv_tokens: what 85 GB
    leave beside the base (13.5 GB), 16 variants of 1.69 GB and 8 % for all else. prefill_tokens_s is an assumption: the
    products alone would give 57,000. start_ms: that a prompt takes beside its tokens, in the step in which it ends;
    hold_ms: that a load holds up a step; attend_ms: of a step, for each 1,000 tokens that its rows look back at.
    """

    base_ms: float = 5.85
    row_ms: float = 0.041
    first_variant_ms: float = 1.26
    variant_ms: float = 0.54
    prefill_tokens_s: float = 20_000.0
    load_ms: float = 65.0
    swap_gb_s: float = 40.0
    kv_token_bytes: int = 524_288
    kv_tokens: int = 70_000
    start_ms: float = 0.0
    hold_ms: float = 0.0
    attend_ms: float = 0.0

    def check(self) -> None:
        """Raises InputError: one is no number above 0 (or 0, where nothing is divided by it)."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0 if field.name in _ZERO else value > 0) or not value < float("inf"):
                raise InputError(
                    f"is {value:g}",
                    where=f"{option('times')} {field.name}",
                    way_out="give a number above 0, and finite",
                )

    def decode_s(self, rows: int, variants: int, held: int = 0) -> float:
        """Seconds of a step in which `rows` decode, of `variants` variants; held: tokens of all of these rows."""
        decode = self.base_ms + self.row_ms * rows + self.variant_ms * variants + self.attend_ms * held / 1e3
        return (decode + (self.first_variant_ms if variants else 0.0)) / 1e3

    def prompts_s(self, tokens: int, ended: int) -> float:
        """Seconds more of a step that computes so many tokens of prompts, of which so many come to their end."""
        return tokens / self.prefill_tokens_s + ended * self.start_ms / 1e3

    @property
    def load_s(self) -> float:
        """Of a variant, one after another."""
        return self.load_ms / 1e3

    @property
    def swap_s(self) -> float:
        """Of a token's KV, one way."""
        return self.kv_token_bytes / self.swap_gb_s / 1e9

    @property
    def recompute_s(self) -> float:
        """Of a token's KV."""
        return 1 / self.prefill_tokens_s


def parsed(told: str) -> Times:
    """NAME=NUMBER,... in the place of defaults.

    Raises:
        InputError: there is no such name, or that is no number that can be.
    """
    known = {field.name: field.type for field in fields(Times)}
    given: dict[str, Any] = {}
    for one in filter(None, (part.strip() for part in told.split(","))):
        name, _, number = one.partition("=")
        if name not in known:
            raise InputError(f"no time {name!r:.40}", where=option("times"), way_out=f"there are {', '.join(known)}")
        try:
            given[name] = int(number) if known[name] == "int" else float(number)
        except ValueError:
            raise InputError(f"{one[:60]} is no number", where=option("times"), way_out=f"such as {name}=10") from None
    times = Times(**given)
    times.check()
    return times
