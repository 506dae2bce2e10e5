"""Keys and values of running requests and of known beginnings, in pages of a few tokens that anybody can hold.

A request takes pages as it grows, so nothing is padded to the longest and nothing moves when requests come or go; what
several requests have in common lies in pages that all of them hold (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from deltacompress.errors import BackendError
from deltacompress.runtime.batch import to_device

PAGE = 16
"""Tokens of a page, if nothing else is said."""
SCRATCH = 0
"""A page that nobody holds: what must be written somewhere, and is never read, goes there."""
_FIRST = 64
"""Pages at the start; when they are used up, there are twice as many."""


class Pages:
    """All pages of one scheduler.

    size: tokens of a page; keys, values: per layer [heads, pages, tokens, size of a head], once the first prompt has
    told the shapes. version: counts how often they moved to another place. peak: pages held at once, at most.
    """

    def __init__(self, size: int = PAGE) -> None:
        self.size = size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.version = self.peak = 0
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

    @property
    def nbytes(self) -> int:
        """Of a page, in all layers."""
        return sum(one.nbytes for one in (*self.keys, *self.values)) // self.count

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Pages for one more holder.

        Raises:
            BackendError: the device is out of memory.
        """
        if len(self._free) < count:
            self._grow(self.count + count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        self.peak = max(self.peak, self.held)
        return taken

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

    def write(self, cache: DynamicCache, first: int, tables: Sequence[Sequence[int]]) -> None:
        """Fill pages from a cache of prompts: row r's tokens from page `first` of its sequence on go to tables[r]."""
        if not self.keys:
            self._make(cache)
        device = self.keys[0].device
        longest = max(map(len, tables))
        source = to_device([r * longest + at for r, table in enumerate(tables) for at in range(len(table))], device)
        target = to_device([page for table in tables for page in table], device)
        for layer, keys, values in zip(cache.layers, self.keys, self.values, strict=True):
            for mine, theirs in ((keys, layer.keys), (values, layer.values)):
                part = theirs[:, :, first * self.size : (first + longest) * self.size]
                part = functional.pad(part, (0, 0, 0, longest * self.size - part.shape[2]))
                rows, heads, _, size = part.shape
                pieces = part.view(rows, heads, longest, self.size, size).transpose(0, 1)
                pieces = pieces.reshape(heads, -1, self.size, size)
                mine.index_copy_(1, target, pieces.index_select(1, source))

    def read(self, pages: Sequence[int]) -> DynamicCache:
        """A cache of one row with what whole pages hold."""
        cache = DynamicCache()
        if pages:
            index = to_device(pages, self.keys[0].device)
            for layer, both in enumerate(zip(self.keys, self.values, strict=True)):
                keys, values = (one.index_select(1, index).flatten(1, 2).unsqueeze(0) for one in both)
                cache.update(keys, values, layer)
        return cache

    def clear(self) -> None:
        """Nobody holds any more, and the memory is given back."""
        self.keys, self.values = [], []
        self._holders, self._free = [1], []
        self.version += 1

    def _make(self, cache: DynamicCache) -> None:
        with _memory_for(self.count * self.size):
            for layer in cache.layers:
                for mine, theirs in ((self.keys, layer.keys), (self.values, layer.values)):
                    mine.append(theirs.new_zeros(theirs.shape[1], self.count, self.size, theirs.shape[3]))
        self.version += 1

    def _grow(self, least: int) -> None:
        """To twice as many pages, or where there is no memory for these to `least`."""
        wanted = max(_FIRST, 2 * self.count, least)
        try:
            self._stretch(wanted)
        except BackendError:
            if wanted == least:
                raise
            wanted = least
            self._stretch(wanted)
        self._free += range(wanted - 1, self.count - 1, -1)
        self._holders += [0] * (wanted - self.count)

    def _stretch(self, count: int) -> None:
        self.version += 1
        with _memory_for(count * self.size):
            for mine in (self.keys, self.values):
                for layer, one in enumerate(mine):
                    if one.shape[1] < count:
                        mine[layer] = functional.pad(one, (0, 0, 0, 0, 0, count - one.shape[1]))


@contextmanager
def _memory_for(tokens: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"no memory for the keys and values of {tokens} tokens",
            way_out="lower max_batch, max_new_tokens or budget_bytes",
        ) from error
