"""Keys and values of requests that gave way, on the host until their turn comes again.

Pages are gathered on the stream that computes, so that others can have them at once, and cross on a stream of their
own beside the steps of others, in the order in which that was asked for. Who comes back has the bits that it had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from deltacompress.devices import free_host_bytes
from deltacompress.errors import BackendError
from deltacompress.runtime.batch import to_device
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.prefixes import Prefixes

_PROBED = 8
"""Pages, at most, that are copied to see how fast that is."""
_BLOCK = 1 << 30
"""Bytes of the largest block: pinned memory comes in powers of two."""


class _Arriving(NamedTuple):
    """pages: that `staged` is for; event: None where it is there already."""

    pages: list[int]
    staged: Tensor
    event: torch.cuda.Event | None


class Swap:
    """Room on the host for pages of one scheduler, and who has some of it.

    page_s: seconds to copy a page one way, infinite while that was not measured; count: requests that were copied out.
    """

    def __init__(self, pages: Pages, limit_bytes: int, device: torch.device) -> None:
        """limit_bytes: of that room, whole pages; on a GPU it is pinned. 0: none.

        Raises:
            BackendError: the host has no memory for it.
        """
        self.page_s, self.count = math.inf, 0
        self._pages, self._device = pages, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and limit_bytes else None
        self._blocks = _memory(limit_bytes, pinned=self._stream is not None)
        self._host: list[Tensor] = []  # of pages: [pages, values of one in all layers] of each block
        self._free: list[tuple[int, int]] = []  # block, page
        self._kept: dict[Request, list[tuple[int, int]]] = {}  # where they are, page by page
        self._arriving: dict[Request, _Arriving] = {}  # of those, who is on the way back

    @property
    def room(self) -> int:
        """Pages that can be copied out."""
        return len(self._free)

    def prepare(self) -> None:
        """See how large pages are and how fast copies, once pages have memory; the first time that it can."""
        if not self._blocks or not self._pages.keys:
            return
        one = next(iter(self._pages.keys.values()))
        nbytes, width = self._pages.nbytes, self._pages.nbytes // one.itemsize
        whole = [(block, len(block) // nbytes) for block in self._blocks]
        self._host = [block[: count * nbytes].view(one.dtype).view(count, width) for block, count in whole]
        places = [(at, page) for at, block in enumerate(self._host) for page in range(len(block))]
        probed = places[:_PROBED]
        if probed:
            if (staged := self._staged(len(probed))) is None:
                return  # it is seen later
            for _ in range(2):  # once so that all memory is there
                began = time.perf_counter()
                self._copy_out(staged, probed)
                if (event := self._copy_in(staged, probed)) is not None:
                    event.synchronize()
            self.page_s = (time.perf_counter() - began) / (2 * len(probed))
        self._blocks, self._free = [], places

    def holds(self, request: Request) -> bool:
        """Whether what a request had in its pages is here."""
        return request in self._kept

    def out(self, request: Request) -> bool:
        """Copy what a request has in its pages; False if there is no room, and it is to be computed again."""
        if not request.pages or len(request.pages) > len(self._free):
            return False
        if (staged := self._staged(len(request.pages), filled_from=request.pages)) is None:
            return False
        self._kept[request] = places = sorted(self._free.pop() for _ in request.pages)
        self._copy_out(staged, places)
        self.count += 1
        return True

    def fetch(self, request: Request, prefixes: Prefixes) -> bool:
        """Begin to copy a request back, into pages that it takes; False if it is to be computed: it is not here, say.

        What others' prompts have left of it in pages is shared with them again.

        Raises:
            BackendError: there are no pages.
        """
        places = self._kept.get(request)
        if places is None:
            return False
        known = prefixes.find(request, request.known)
        staged = self._staged(len(places) - len(known)) if self._pages.keys else None  # no memory before a forward
        if staged is None:
            self._pages.release(known)
            self.drop(request)
            return False
        own = self._pages.take(len(places) - len(known))
        request.pages = [*known, *own]
        self._arriving[request] = _Arriving(own, staged, self._copy_in(staged, places[len(known) :]))
        return True

    def arrived(self, *, wait: bool) -> list[Request]:
        """Those that are in their pages again. wait: for one at least, if any is on the way."""
        found = list[Request]()
        for request, (pages, staged, event) in list(self._arriving.items()):
            if event is not None:
                if wait and not found:
                    event.synchronize()
                if not event.query():
                    break  # those after it come later
            numbers = to_device(pages, self._device)
            for there, own in self._layers(staged):
                there.index_copy_(1, numbers, own)
            del self._arriving[request]
            self.drop(request)
            found.append(request)
        return found

    def recall(self, request: Request) -> None:
        """One that is on the way back, if it is, stays here after all, and gives its pages."""
        if self._arriving.pop(request, None) is not None:
            self._pages.release(request.pages)
            request.pages = []

    def drop(self, request: Request) -> None:
        """Forget one, wherever it is."""
        self.recall(request)
        self._free += self._kept.pop(request, [])

    def forget_pages(self) -> None:
        """Those that are on the way back have none any more; they are still here."""
        self._arriving.clear()

    def _staged(self, count: int, filled_from: Sequence[int] = ()) -> Tensor | None:
        """Memory of the device for so many pages, for a moment, with what these hold; None where there is none."""
        try:
            staged = self._host[0].new_empty(count, self._host[0].shape[1], device=self._device)
            if filled_from:
                numbers = to_device(filled_from, self._device)
                for there, own in self._layers(staged):
                    own.copy_(there.index_select(1, numbers))
        except torch.OutOfMemoryError:
            return None
        return staged

    def _copy_out(self, staged: Tensor, places: Sequence[tuple[int, int]]) -> None:
        with self._beside(staged):
            for there, own in self._runs(staged, places):
                there.copy_(own, non_blocking=True)

    def _copy_in(self, staged: Tensor, places: Sequence[tuple[int, int]]) -> torch.cuda.Event | None:
        with self._beside(staged):
            for there, own in self._runs(staged, places):
                own.copy_(there, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    def _runs(self, staged: Tensor, places: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Places that lie side by side, and what is for them, page by page in `staged`."""
        begin = 0
        for end in range(1, len(places) + 1):
            block, first = places[begin]
            if end == len(places) or places[end] != (block, first + end - begin):
                yield self._host[block][first : first + end - begin], staged[begin:end]
                begin = end

    @contextmanager
    def _beside(self, staged: Tensor) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        staged.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _layers(self, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys, then values, of each layer, and what is of it in `staged`, as [heads, pages, tokens, size] both."""
        at = 0
        for one in (*self._pages.keys.values(), *self._pages.values.values()):
            heads, _, size, width = one.shape
            count = heads * size * width
            yield one, staged[:, at : at + count].view(-1, heads, size, width).transpose(0, 1)
            at += count


def _memory(nbytes: int, *, pinned: bool) -> list[Tensor]:
    """So many bytes, in blocks; raises as Swap."""
    found, left = list[Tensor](), nbytes
    if nbytes and nbytes > (there := free_host_bytes()):  # what a CPU gives is there once it is written to
        told = (
            f"the host has {there:,} bytes, and {nbytes:,} are asked for, for keys and values of requests that give way"
        )
        raise BackendError(told, way_out="give less swap space")
    try:
        while left:
            size = min(_BLOCK, 1 << (left.bit_length() - 1))
            found.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
            left -= size
    except RuntimeError as error:
        told = f"the host pins no {nbytes:,} bytes for keys and values of requests that give way"
        raise BackendError(told, way_out="give less swap space") from error
    return found
