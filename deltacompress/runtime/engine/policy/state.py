"""What the policy looks at, and what it decides: residents, limits, costs, rules; a plan. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from deltacompress.runtime.engine.policy.line import Line
from deltacompress.runtime.engine.policy.ticket import Ticket

Skipping = Literal["preempt", "drain", "free"]
"""What becomes of requests that skipped the line when an older one lacks room: "preempt": they give way; "drain": no
more of them start, those that run end by themselves; "free": nothing, more may start (an older one may starve)."""


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
    free when a request is admitted, so that those that run can grow. A request by itself may have more: `alone` at
    most, None where whoever computes it is to find how much.
    """

    rows: int
    slots: int
    nbytes: int | None = None
    loads: int = 1
    kv: int | None = None
    headroom: int = 0
    alone: int | None = None


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
    even alone beside what is pinned; to be failed. outgrown: in line or running, with more KV than one request can
    have; to be failed before all else. blocked: the first in line whose variant has no slot and gets none.
    """

    preempt: tuple[Preemption, ...] = ()
    evict: tuple[str, ...] = ()
    bring: tuple[str, ...] = ()
    admit: tuple[Ticket, ...] = ()
    hopeless: tuple[Ticket, ...] = ()
    outgrown: tuple[Ticket, ...] = ()
    blocked: Ticket | None = None
