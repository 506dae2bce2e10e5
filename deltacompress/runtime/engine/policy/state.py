"""What the policy looks at: tickets in a line, residents, limits, costs and rules. Plain data, no torch, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deltacompress.runtime.engine.policy.line import Line

Place = tuple[float, int]
"""Where a request stands in line, kept for life: seconds (arrival plus what its class waits), then a unique number."""
NEVER: Place = (float("inf"), 0)
"""Behind all others."""
Skipping = Literal["preempt", "drain", "free"]
"""What becomes of requests that skipped the line when an older one lacks room: "preempt": they give way; "drain": no
more of them start, those that run end by themselves; "free": nothing, more may start (an older one may starve)."""


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


@dataclass(frozen=True, slots=True)
class Resident:
    """A variant that has a slot. ready: it has arrived; rank: the lowest leaves first (eviction.py)."""

    variant: str
    nbytes: int
    ready: bool = True
    pinned: bool = False
    rank: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much there is.

    rows: requests that run at once; slots: variants on the device, arriving ones included; nbytes: bytes of these, None
    for no limit; loads: variants on their way at once; kv: units of KV, None for no limit, of which `headroom` stay
    free when a request is admitted, so that those that run can grow.
    """

    rows: int
    slots: int
    nbytes: int | None = None
    loads: int = 1
    kv: int | None = None
    headroom: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of one step; of copying one unit of KV to the host or back; of computing one unit again."""

    step_s: float
    swap_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """skipping: see Skipping; grace: a skipper with at most so many tokens to go is about to end and keeps its row."""

    skipping: Skipping = "preempt"
    grace: int = 8


@dataclass(frozen=True, slots=True)
class State:
    """All that one decision depends on.

    running: requests with a row, those whose prompt is computed in chunks included. nbytes: of each variant that a
    ticket in line names and that has no slot. host_kv: units of KV that the host has room for, None for no limit.
    """

    line: Line
    running: Collection[Ticket]
    residents: Collection[Resident]
    nbytes: Mapping[str, int]
    limits: Limits
    costs: Costs
    rules: Rules
    host_kv: int | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that loses its row and goes back to its place in line.

    how: its KV is copied to the host, or dropped and computed again. by: the older request that lacks room; None: those
    that run have outgrown the KV.
    """

    ticket: Ticket
    how: Literal["swap", "recompute"]
    by: Ticket | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do before the coming step, in this order.

    preempt; then evict variants, which nobody runs any more; then begin to bring others, the most urgent first; then
    admit, in the order of the line: their variants are ready, rows and KV are there. hopeless: in line, but cannot run
    even alone beside what is pinned; to be failed. blocked: the first in line whose variant has no slot and gets none.
    """

    preempt: tuple[Preemption, ...] = ()
    evict: tuple[str, ...] = ()
    bring: tuple[str, ...] = ()
    admit: tuple[Ticket, ...] = ()
    hopeless: tuple[Ticket, ...] = ()
    blocked: Ticket | None = None
