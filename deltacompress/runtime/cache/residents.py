"""Who is on the device or on the way there: each in a slot of its own, all of them under one budget of bytes.

A slot is given when a variant starts to come and taken back when it has left, so any number may be loaded beside those
that are there at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from deltacompress.errors import BackendError, InputError, option
from deltacompress.runtime.cache.loaded_variant import LoadedVariant

_SPARE = 1.05
"""Times what variants take that are known: later ones may be a little larger, or small adapters beside them."""


class Residents:
    """slots: how many there are, numbered from 1; by_slot: who has them; budget_bytes: None for no limit."""

    def __init__(self, slots: int, budget_bytes: int | None) -> None:
        """Raises InputError: a budget that is no number of bytes."""
        whole = isinstance(budget_bytes, int) and not isinstance(budget_bytes, bool)
        if budget_bytes is not None and (not whole or budget_bytes < 0):
            told = f"{budget_bytes!r} is no whole number of bytes, 0 or more"
            raise InputError(told, where=option("budget_bytes"), way_out="give one, or nothing for no limit")
        self.slots, self.budget_bytes = slots, budget_bytes
        self.by_slot: dict[int, LoadedVariant] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return _bytes(self.by_slot.values())

    @property
    def coming_bytes(self) -> int | None:
        """That variants may still take, those on their way included; None without a budget."""
        there = _bytes(one for one in self.by_slot.values() if one.installed)
        return None if self.budget_bytes is None else max(0, self.budget_bytes - there)

    def keep_to_whole(self, sizes: Collection[int]) -> tuple[int, int] | None:
        """Lower the budget to what as many variants take as fit, and a little, for later ones that take more.

        sizes: bytes of those known. Gives (how many, the budget); None where their number depends on which they are, or
        is one: the budget stays.
        """
        assert self.budget_bytes is not None
        fit = {self.budget_bytes // size for size in sizes if size}
        if len(fit) != 1 or (count := fit.pop()) < 2:
            return None
        self.budget_bytes = min(self.budget_bytes, int(count * max(sizes) * _SPARE))
        return count, self.budget_bytes

    def enter(self, loaded: LoadedVariant) -> None:
        """Give it the lowest free slot; there must be one."""
        loaded.slot = next(number for number in range(1, self.slots + 1) if number not in self.by_slot)
        self.by_slot[loaded.slot] = loaded

    def leave(self, loaded: LoadedVariant) -> None:
        """Take its slot back, if it has one."""
        if loaded.slot is not None:
            del self.by_slot[loaded.slot]
            loaded.slot = None

    def leaving(self, wanted: LoadedVariant) -> list[LoadedVariant] | None:
        """Who must leave so that there is room for `wanted`, least recently used first; None where that cannot be."""
        slots = self.slots - len(self.by_slot)
        room = None if self.budget_bytes is None else self.budget_bytes - self.nbytes - wanted.nbytes
        out: list[LoadedVariant] = []
        for one in sorted((one for one in self.by_slot.values() if one.is_idle), key=lambda one: one.used):
            if slots > 0 and (room is None or room >= 0):
                break
            out.append(one)
            slots, room = slots + 1, None if room is None else room + one.nbytes
        return out if slots > 0 and (room is None or room >= 0) else None

    def fits(self, wanted: Collection[LoadedVariant]) -> bool:
        """Whether these can be here together, beside what stays anyway."""
        together = {*wanted, *(one for one in self.by_slot.values() if one.pin or one.users)}
        return len(together) <= self.slots and (self.budget_bytes is None or _bytes(together) <= self.budget_bytes)

    def check(self, wanted: LoadedVariant, others: Iterable[LoadedVariant]) -> None:
        """Make sure that `wanted` and each of the other loaded variants can be here some time, beside what is pinned.

        Raises:
            BackendError: budget or slots are too few.
        """
        others = list(others)
        pinned = [one for one in others if one.pin]
        rest = [one for one in others if not one.pin]
        self._check_bytes(wanted, _bytes(pinned), max(rest, key=lambda one: one.nbytes, default=None))
        left = self.slots - len(pinned)
        if left < 1 or (wanted.pin and rest and left < 2):
            raise BackendError(
                f"{len(pinned)} variants are pinned, and there are {self.slots} slots: none is left for "
                + (f"the {len(rest)} others" if left else "it"),
                where=wanted.variant.folder,
                way_out="unload one that is pinned" + (", or load it without pin" if wanted.pin else ""),
            )

    def _check_bytes(self, wanted: LoadedVariant, pinned: int, largest: LoadedVariant | None) -> None:
        if self.budget_bytes is None:
            return
        told, way_out = f"{wanted.nbytes} bytes as it is served", f"raise {option('budget_bytes')}"
        if wanted.nbytes > self.budget_bytes:
            why = f"{told}, more than the whole budget of {self.budget_bytes}"
        elif wanted.nbytes > (left := self.budget_bytes - pinned):
            why = f"{told}, and what is pinned leaves {left} of the budget of {self.budget_bytes}"
            way_out += ", or unload what is pinned"
        elif wanted.pin and largest is not None and largest.nbytes > left - wanted.nbytes:
            why = (
                f"{told}: pinned, it leaves {left - wanted.nbytes} of the budget of {self.budget_bytes}, and "
                f"{largest.name} needs {largest.nbytes}"
            )
            way_out += ", or load it without pin"
        else:
            return
        raise BackendError(why, where=wanted.variant.folder, way_out=way_out)

    def no_room(self, wanted: LoadedVariant) -> BackendError:
        """Why there is none for `wanted` beside what is in use."""
        kept = {one.name: one for one in self.by_slot.values() if one.users or one.pin} | {wanted.name: wanted}
        if len(kept) > self.slots:
            return BackendError(
                f"{len(kept)} variants would be in use, and there are {self.slots} slots: none for {wanted.name}",
                way_out="use fewer at once",
            )
        return BackendError(
            f"the variants in use ({', '.join(sorted(kept))}) take {_bytes(kept.values())} bytes, the budget is "
            f"{self.budget_bytes}: no room for {wanted.name}",
            way_out=f"raise {option('budget_bytes')} or use fewer at once",
        )

    def describe(self) -> str:
        """Who is here, for messages; any thread may ask."""
        found = sorted(self.by_slot.values(), key=lambda one: one.number)
        return f"resident, in bytes: {', '.join(f'{one.name} {one.nbytes}' for one in found) or 'none'}"


def _bytes(variants: Iterable[LoadedVariant]) -> int:
    return sum(one.nbytes for one in variants)
