"""A request as the policy sees it, and where it stands in line. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass

Place = tuple[float, int]
"""Where a request stands in line, kept for life: seconds (arrival plus what its class waits), then a unique number."""
NEVER: Place = (float("inf"), 0)
"""Behind all others."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request as the policy sees it, from arrival to end; it is in line or runs, never both.

    The one class here that is not frozen: the engine counts in it at each step, and there are thousands.

    variant: None for the base. max_tokens: new tokens at most; expected: new tokens, as predicted at arrival and never
    changed. kv: units of KV (pages, or tokens: one unit throughout) that it holds after the coming step while it runs,
    and that it takes to start while it waits. pending: tokens of its prompt (of what is computed again) that are still
    to be computed: it runs in chunks. generated: new tokens so far. swapped: its KV lies on the host.
    """

    id: str
    variant: str | None
    place: Place
    max_tokens: int
    expected: int
    kv: int
    pending: int
    generated: int = 0
    swapped: bool = False
