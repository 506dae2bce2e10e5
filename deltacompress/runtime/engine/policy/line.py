"""The line: tickets that wait, by place, grouped by variant, so that a decision looks at no more than it must.

Preempted requests stand in the same line, whether their KV lies on the host or not: nothing is put back from a list of
leftovers, and whoever is removed leaves nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from deltacompress.runtime.engine.policy.ticket import Place, Ticket


class Line:
    """Tickets by place. Adding and removing take a search and a shift in the list of one variant."""

    def __init__(self) -> None:
        self._groups: dict[str | None, list[Ticket]] = {}
        self._heads: list[tuple[Place, str | None]] = []  # the first of each group, by place
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        """All of them by place; takes a sort."""
        return iter(sorted((one for group in self._groups.values() for one in group), key=lambda one: one.place))

    def counted(self, tokens: Callable[[Ticket], int], most: int) -> int:
        """What `tokens` says of each of them, added up until it is no less than `most`."""
        found = 0
        for group in self._groups.values():
            for ticket in group:
                if found >= most:
                    return found
                found += tokens(ticket)
        return found

    def add(self, ticket: Ticket) -> None:
        """Let it stand at its place."""
        group = self._groups.setdefault(ticket.variant, [])
        if group and ticket.place < group[0].place:
            self._unhead(group[0])
        insort(group, ticket, key=_place)
        if group[0] is ticket:
            insort(self._heads, (ticket.place, ticket.variant))
        self._count += 1

    def remove(self, ticket: Ticket) -> None:
        """Take it out; it must be in line."""
        group = self._groups[ticket.variant]
        at = bisect_left(group, ticket.place, key=_place)
        if at == len(group) or group[at] is not ticket:
            raise KeyError(ticket.id)
        del group[at]
        self._count -= 1
        if at == 0:
            self._unhead(ticket)
            if group:
                insort(self._heads, (group[0].place, group[0].variant))
            else:
                del self._groups[ticket.variant]

    def of(self, variant: str | None) -> Sequence[Ticket]:
        """Those of a variant, by place; not to be changed."""
        return self._groups.get(variant, ())

    def first(self, variant: str | None) -> Ticket | None:
        """The first of a variant."""
        group = self._groups.get(variant)
        return group[0] if group else None

    def firsts(self) -> Iterator[Ticket]:
        """The first of each variant, by place."""
        for _, variant in self._heads:
            yield self._groups[variant][0]

    def _unhead(self, ticket: Ticket) -> None:
        del self._heads[bisect_left(self._heads, ticket.place, key=_head_place)]


def _place(ticket: Ticket) -> Place:
    return ticket.place


def _head_place(head: tuple[Place, str | None]) -> Place:
    return head[0]
