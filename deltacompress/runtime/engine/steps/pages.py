"""Keys and values of running requests and of known beginnings, in pages of a few tokens that anybody can hold.

A request takes pages as it grows, so nothing is padded to the longest and nothing moves when requests come or go; what
several requests have in common lies in pages that all of them hold (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn import functional

from deltacompress.devices import free_bytes
from deltacompress.errors import BackendError, to_free_memory

PAGE = 16
"""Tokens of a page, if nothing else is said."""
SCRATCH = 0
"""A page that nobody holds: what must be written somewhere, and is never read, goes there."""
_FIRST = 64
"""Pages at the start; when they are used up, there are twice as many."""
_PATIENCE = 32
"""Times that `try_more` is asked, at most, until it is tried: an attempt in vain may move what is there."""
_numbers = itertools.count(1)
_OF_FREE = 0.5
"""Of a GPU's memory that is left, what pages take where nobody knows what variants are still to take."""
_OF_ALL = 0.06
"""Of a GPU's memory, what is left to steps, their graphs and what lies between tensors."""
_WORTH = 1.25
"""Times as many pages as there are: for fewer they do not move, and graphs do not go."""


class Pages:
    """All pages of one scheduler.

    size: tokens of a page; expected: that are soon needed; keys, values: by layer [heads, pages, tokens, size of a
    head], from its first forward on. version: counts how often they moved to another place. number: of these among all
    of the process. reclaim: asked to free so many where there is no memory for more; says whether it could.
    reclaimable: how many it could. coming: bytes that variants may still take of a GPU, None where nobody knows.
    cleared: is told when memory is given back.
    """

    def __init__(self, size: int = PAGE, *, expected: int = 0, most_tokens: int | None = None) -> None:
        """expected: pages that are soon needed, for which a GPU's memory is taken at once, as far as it is there.

        most_tokens: that there are pages for; None: as many as the device has memory for.
        """
        self.size, self.expected = size, expected
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.version = 0
        self.number = next(_numbers)
        self.reclaim: Callable[[int], bool] = lambda _: False
        self.reclaimable: Callable[[], int] = lambda: 0
        self.coming: Callable[[], int | None] = lambda: None
        self.cleared: Callable[[int], None] = lambda _: None
        self._given = None if most_tokens is None else max(most_tokens // size, 1) + 1
        self._most = self._given  # pages; once there was no memory for so many, fewer
        self._asked = self._patience = 0  # how often for more since then; and how often until it is tried
        self._holders = [1]  # of each page; nobody gets SCRATCH
        self._free: list[int] = []

    @property
    def count(self) -> int:
        """Pages that there are."""
        return len(self._holders)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return self.count - 1 - len(self._free)

    def stay(self, count: int) -> bool:
        """Whether so many can be taken without any that move."""
        lacking = count - len(self._free)
        all_there = self._most is not None and self.count >= self._most
        return lacking <= 0 or (all_there and lacking <= self.reclaimable())

    @property
    def room(self) -> int | None:
        """Pages that can still be taken; None: nobody knows, and there has been memory so far."""
        return None if self._most is None else len(self._free) + self._most - self.count + self.reclaimable()

    @property
    def most(self) -> int | None:
        """Pages that one holder can have, if nobody else has any; None: nobody knows."""
        return None if self._most is None else self._most - 1

    @property
    def nbytes(self) -> int:
        """Of a page, in all layers."""
        return sum(one.nbytes // one.shape[1] for one in (*self.keys.values(), *self.values.values()))

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Pages for one more holder.

        Raises:
            BackendError: the device is out of memory.
        """
        self.reserve(count)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def reserve(self, count: int) -> None:
        """Have so many free ones; raises as take."""
        if (lacking := count - len(self._free)) <= 0:
            return
        least = self.count + lacking
        failed: BackendError | None = None
        try:
            self._grow(least if self._most is None else min(least, self._most))
        except BackendError as error:
            failed = error
        lacking = count - len(self._free)
        if lacking > 0 and not self.reclaim(lacking):
            raise failed or no_memory(least * self.size)

    def is_shared(self, page: int) -> bool:
        """Whether several hold it."""
        return self._holders[page] > 1

    def share(self, pages: Iterable[int]) -> None:
        """One more holds them."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One less holds them; what nobody holds is free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those for keys and values [rows, heads, tokens, size] of a layer.

        Raises:
            BackendError: the device is out of memory.
        """
        if layer not in self.keys:
            self.version += 1
            with _memory_for(self.count * self.size):
                made = [one.new_zeros(one.shape[1], self.count, self.size, one.shape[3]) for one in (key, value)]
            self.keys[layer], self.values[layer] = made
        return self.keys[layer], self.values[layer]

    def clear(self) -> None:
        """Nobody holds any more, and the memory is given back."""
        self.keys, self.values = {}, {}
        self._holders, self._free = [1], []
        self.version += 1
        self._most, self._asked, self._patience = self._given, 0, 0
        self.cleared(self.number)

    def take_expected(self) -> None:
        """Have as many as are expected, as far as there is memory, so that they need not move later."""
        with suppress(BackendError):
            self._grow(self.count + 1)

    def try_more(self) -> None:
        """There may be memory again where there was none; after each attempt in vain, to be asked twice as often."""
        self._asked += 1
        there = self._there()
        if self._asked >= self._patience and (there is None or there >= self.count * _WORTH):
            self._most, self._asked = self._given, 0

    def follow(self, count: int) -> None:
        """Have as many as the first rank has, which alone knows who holds them; raises as take."""
        if count != self.count:
            self._stretch(count)
            self._holders = [1] * count

    def _grow(self, least: int) -> None:
        """To twice as many, or as are expected; where there is no memory for these to `least`.

        Raises:
            BackendError: there is no memory for these either, and so for no more until somebody says `try_more`.
        """
        if least <= self.count:
            return
        wanted, there, known = max(_FIRST, 2 * self.count), self._there(), self._most
        if there is not None:
            wanted = min(max(wanted, self.expected), there)
        if known is not None:
            wanted = min(wanted, known)
        wanted = max(wanted, least)
        between = {(wanted + least) // 2} if there is not None else set[int]()
        for count in sorted({wanted, least} | between, reverse=True):
            try:
                self._stretch(count)
            except BackendError:
                if count == least:
                    if known == self._given:  # else it is known, and this tells more of how little there is
                        self._asked, self._patience = 0, min(max(2 * self._patience, 1), _PATIENCE)
                    self._most = max(self.count, least - 1 if there is None else min(least - 1, there))
                with suppress(BackendError):  # some of them were larger already, and may stay so
                    self._stretch(self.count)
                if count == least:
                    raise
            else:
                self._free += range(count - 1, self.count - 1, -1)
                self._holders += [0] * (count - self.count)
                self._asked = self._patience = 0
                if there is not None and known is None and (count >= there or count < wanted):
                    self._most = count  # it is all that there will be, and whoever admits requests should know
                return

    def _there(self) -> int | None:
        """Pages that a GPU has memory for beside all else, at least those that there are; None where nobody knows."""
        one = next(iter(self.keys.values()), None)
        if one is None or not one.is_cuda:
            return None
        free, coming = free_bytes(one.device), self.coming()
        all_of_it = torch.cuda.get_device_properties(one.device).total_memory
        if coming is None:
            left = int(free * _OF_FREE)
        else:  # a budget as large as the GPU leaves some to them, too, but no more of it each time that they grow
            own = self.count * self.nbytes
            left = max(free - coming - int(all_of_it * _OF_ALL), int((free + own) * _OF_FREE / 2) - own, 0)
        return self.count + left // self.nbytes

    def _stretch(self, count: int) -> None:
        """All layers to so many pages."""
        if not self.keys:
            self.version += 1
        with _memory_for(count * self.size):
            for mine in (self.keys, self.values):
                for layer, one in mine.items():
                    if one.shape[1] != count:
                        mine[layer] = functional.pad(one, (0, 0, 0, 0, 0, count - one.shape[1]))
                        self.version += 1


@contextmanager
def _memory_for(tokens: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_memory(tokens) from error


def no_memory(tokens: int) -> BackendError:
    """What is raised where there are no pages for so many."""
    return BackendError(
        f"no memory for the keys and values of {tokens} tokens",
        way_out=to_free_memory(),
    )
