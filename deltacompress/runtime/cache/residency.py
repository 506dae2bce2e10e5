"""Where each loaded variant is and how often it came and went: plain data, for whoever sets a budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from deltacompress.runtime.cache.loaded_variant import Counters, LoadedVariant
from deltacompress.runtime.cache.residents import Residents

Place = Literal["device", "arriving", "host", "disk"]


@dataclass(frozen=True, slots=True)
class VariantResidency:
    """One loaded variant.

    place: "host" is pinned host memory; nbytes: on the device; users: running requests; the counters as in Residency;
    last_load_seconds: of its last way to the device.
    """

    name: str
    place: Place
    nbytes: int
    host_bytes: int
    pin: bool
    users: int
    hits: int
    misses: int
    loads: int
    evictions: int
    load_seconds: float
    last_load_seconds: float


@dataclass(frozen=True, slots=True)
class Residency:
    """All loaded variants, by the order in which they were loaded.

    budget_bytes, host_budget_bytes: limits, None for none; device_bytes, host_bytes: taken of them; slots, slots_taken:
    variants that can be on the device at once, and that are there or on their way. hits, misses: times that a request
    or a forward found its variant ready, and that the variant had to come first; loads: times that one came to the
    device; evictions: that one left to make room; load_seconds: of all ways there, reading included where they read.
    These count since the base was loaded, variants that were unloaded included.
    """

    budget_bytes: int | None
    device_bytes: int
    host_budget_bytes: int | None
    host_bytes: int
    slots: int
    slots_taken: int
    hits: int
    misses: int
    loads: int
    evictions: int
    load_seconds: float
    variants: tuple[VariantResidency, ...]


def residency(
    residents: Residents, variants: Iterable[LoadedVariant], total: Counters, *, host_budget_bytes: int | None
) -> Residency:
    """What is where; total: the counters of the whole runtime."""
    found = tuple(_of(one) for one in variants)
    return Residency(
        residents.budget_bytes,
        residents.nbytes,
        host_budget_bytes,
        sum(one.host_bytes for one in found),
        residents.slots,
        len(residents.by_slot),
        total.hits,
        total.misses,
        total.loads,
        total.evictions,
        total.load_seconds,
        found,
    )


def _of(loaded: LoadedVariant) -> VariantResidency:
    counted, host_bytes = loaded.counters, loaded.pinned_bytes
    return VariantResidency(
        loaded.name,
        _place(loaded),
        loaded.nbytes,
        host_bytes,
        loaded.pin,
        loaded.users,
        counted.hits,
        counted.misses,
        counted.loads,
        counted.evictions,
        counted.load_seconds,
        loaded.brought_s,
    )


def _place(loaded: LoadedVariant) -> Place:
    if loaded.slot is not None:
        return "device" if loaded.installed else "arriving"
    return "host" if loaded.pinned_bytes else "disk"
