"""Keys and values of requests that gave way, on the host until their turn comes again.

Pages are gathered on the stream that computes, so that others can have them at once, and cross on a stream of their
own beside the steps of others, in the order in which that was asked for. Who comes back goes on as if it had stayed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deltacompress.errors import BackendError
from deltacompress.runtime.batch import to_device
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.pages import Pages

_PROBED = 8
"""Pages, at most, that are copied to see how fast that is."""
_Coming = tuple[Tensor, torch.cuda.Event | None]


class Swap:
    """Room on the host for pages of one scheduler, and who has some of it.

    page_s: seconds to copy a page one way, infinite where there is no room; count: requests that were copied out.
    """

    def __init__(self, pages: Pages, limit_bytes: int, device: torch.device) -> None:
        """limit_bytes: of that room; on a GPU it is pinned. 0: none."""
        self.page_s, self.count = math.inf, 0
        self._pages, self._limit, self._device = pages, limit_bytes, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and limit_bytes else None
        self._host: Tensor | None = None  # [pages, values of a page in all layers]
        self._free: list[int] = []
        self._kept: dict[Request, list[int]] = {}  # their places on the host, page by page
        self._coming: dict[Request, _Coming] = {}  # of those, who is on the way back

    @property
    def room(self) -> int:
        """Pages that can be copied out."""
        return len(self._free)

    def prepare(self) -> None:
        """Take the room, and see how fast copies are; nothing is done before pages have memory.

        Raises:
            BackendError: the host has no memory for it; from then on there is no room.
        """
        if not self._limit or self._host is not None or not self._pages.keys:
            return
        one = next(iter(self._pages.keys.values()))
        limit, self._limit = self._limit, 0
        count, width = limit // self._pages.nbytes, self._pages.nbytes // one.itemsize
        if not count:
            told = f"{limit:,} bytes of swap space hold no page of keys and values, of {self._pages.nbytes:,}"
            raise BackendError(told, way_out="give more, or none")
        try:
            self._host = torch.empty(count, width, dtype=one.dtype, pin_memory=self._stream is not None)
        except RuntimeError as error:
            told = f"the host has no memory for {limit:,} bytes of keys and values of requests that give way"
            raise BackendError(told, way_out="give less swap space") from error
        self._free = list(range(count))
        probed = self._free[:_PROBED]
        staged = self._host.new_empty(len(probed), width, device=self._device)
        for _ in range(2):  # once so that all memory is there
            began = time.perf_counter()
            self._copy_out(staged, probed)
            if (event := self._copy_in(staged, probed)) is not None:
                event.synchronize()
        self.page_s = (time.perf_counter() - began) / (2 * len(probed))

    def out(self, request: Request) -> bool:
        """Copy what a request has in its pages; False if there is no room, and it is to be computed again."""
        if not request.pages or len(request.pages) > len(self._free):
            return False
        if (staged := self._staged(len(request.pages))) is None:
            return False
        self._gather(staged, request.pages)
        self._kept[request] = places = [self._free.pop() for _ in request.pages]
        self._copy_out(staged, places)
        self.count += 1
        return True

    def bring(self, request: Request) -> bool:
        """Begin to copy a request back, and take its pages; False if it is to be computed: it is not here, say.

        Raises:
            BackendError: there are no pages.
        """
        places = self._kept.get(request)
        if places is None:
            return False
        staged = self._staged(len(places)) if self._pages.keys else None  # those have no memory before a forward
        if staged is None:
            self.drop(request)
            return False
        request.pages = self._pages.take(len(places))
        self._coming[request] = staged, self._copy_in(staged, places)
        return True

    def came(self, *, wait: bool) -> list[Request]:
        """Those that are in their pages again. wait: for one at least, if any is on the way."""
        found = list[Request]()
        for request, (staged, event) in list(self._coming.items()):
            if event is not None:
                if wait and not found:
                    event.synchronize()
                if not event.query():
                    break  # those after it come later
            self._scatter(staged, request.pages)
            del self._coming[request]
            self.drop(request)
            found.append(request)
        return found

    def recall(self, request: Request) -> None:
        """One that is on the way back, if it is, stays here after all, and gives its pages."""
        if self._coming.pop(request, None) is not None:
            self._pages.release(request.pages)
            request.pages = []

    def drop(self, request: Request) -> None:
        """Forget one, wherever it is."""
        self.recall(request)
        self._free += self._kept.pop(request, [])

    def forget_pages(self) -> None:
        """Those that are on the way back have none any more; they are still here."""
        self._coming.clear()

    def _copy_out(self, staged: Tensor, places: Sequence[int]) -> None:
        assert self._host is not None
        with self._beside(staged):
            for page, place in zip(staged, places, strict=True):
                self._host[place].copy_(page, non_blocking=True)

    def _copy_in(self, staged: Tensor, places: Sequence[int]) -> torch.cuda.Event | None:
        assert self._host is not None
        with self._beside(staged):
            for page, place in zip(staged, places, strict=True):
                page.copy_(self._host[place], non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

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

    def _staged(self, count: int) -> Tensor | None:
        """Memory of the device for so many pages, for a moment; None where there is none."""
        assert self._host is not None
        try:
            return self._host.new_empty(count, self._host.shape[1], device=self._device)
        except torch.OutOfMemoryError:
            return None

    def _gather(self, staged: Tensor, pages: Sequence[int]) -> None:
        numbers = to_device(pages, self._device)
        for there, own in self._layers(staged):
            own.copy_(there.index_select(1, numbers))

    def _scatter(self, staged: Tensor, pages: Sequence[int]) -> None:
        numbers = to_device(pages, self._device)
        for there, own in self._layers(staged):
            there.index_copy_(1, numbers, own)
