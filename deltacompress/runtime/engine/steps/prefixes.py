"""Pages of prompts that were computed, for others that begin alike: least recently used out first.

A page is known by a hash of all tokens up to its end and of what computed them: the content of a variant, never its
name. So variants share nothing with each other or with the base, and what is loaded again, under any name, has its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.pages import Pages


class Prefixes:
    """asked, found: tokens of prompts since the start, and how many of them were not computed again."""

    def __init__(self, pages: Pages, limit_bytes: int) -> None:
        """limit_bytes: of the pages that are known; 0 keeps none."""
        self.asked = self.found = 0
        self._pages, self._limit = pages, limit_bytes
        self._known: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        pages.reclaim, pages.reclaimable = self._give_up, self._count_unshared

    def find(self, request: Request, ids: Sequence[int]) -> list[int]:
        """The pages of the longest beginning that is known, for this holder too: at least one token is left over."""
        self.asked += len(ids)
        keys = list(_keys(request, ids[:-1], self._pages.size)) if self._known else []
        pages: list[int] = []
        for key in keys:
            if (page := self._known.get(key)) is None:
                break
            pages.append(page)
        self._touch(keys[: len(pages)])
        self._pages.share(pages)
        self.found += len(pages) * self._pages.size
        return pages

    def keep(self, request: Request, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Know the whole pages of a prompt that was computed."""
        keys = list(_keys(request, ids, self._pages.size)) if self._limit else []
        for key, page in zip(keys, pages, strict=False):
            if key not in self._known:
                self._known[key] = page
                self._pages.share([page])
        self._touch(keys)
        while len(self._known) * self._pages.nbytes > self._limit:
            self._pages.release([self._known.popitem(last=False)[1]])

    def clear(self) -> None:
        """Forget all of them."""
        self._pages.release(self._known.values())
        self._known.clear()

    def _give_up(self, count: int) -> bool:
        """Free so many pages, of those that nobody else holds, if there are as many."""
        wanted = self._pages.held - count
        while self._known and self._pages.held > wanted:
            self._pages.release([self._known.popitem(last=False)[1]])
        return self._pages.held <= wanted

    def _count_unshared(self) -> int:
        """Pages that nobody else holds."""
        return sum(not self._pages.is_shared(page) for page in self._known.values())

    def _touch(self, keys: Sequence[bytes]) -> None:
        """A page is of no use without those before it, so those leave later."""
        for key in reversed(keys):
            self._known.move_to_end(key)


def _keys(request: Request, ids: Sequence[int], size: int) -> Iterator[bytes]:
    """Of each whole page, of `size` tokens."""
    content = "" if request.loaded is None else request.loaded.variant.identity
    key = hashlib.blake2b(content.encode(), digest_size=32).digest()
    for first in range(0, len(ids) - size + 1, size):
        key = hashlib.blake2b(key + array("q", ids[first : first + size]).tobytes(), digest_size=32).digest()
        yield key
