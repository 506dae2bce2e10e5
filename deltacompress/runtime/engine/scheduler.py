"""Continuous batching: requests of any variants and lengths enter and leave one running batch.

A step admits waiting requests (as many as rows and budget allow), computes a bounded piece of their prompts, and
decodes one token for every running one. A request whose variant is still on its way to the device waits, while the
others go on; one whose variant comes back damaged, or was unloaded, fails by itself.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from threading import RLock

import torch

from deltacompress.errors import BackendError, InputError, IntegrityError
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.engine.generation_config import Finish
from deltacompress.runtime.engine.requests import Listener, Request
from deltacompress.runtime.engine.sampling.choose import choose
from deltacompress.runtime.engine.steps.decoder import ROOM, Decoder
from deltacompress.runtime.engine.steps.graphs import GraphedStep
from deltacompress.runtime.engine.steps.prompts import Prompts
from deltacompress.runtime.modules.model import DecoupledModel

PROMPT_TOKENS = 8192
"""Tokens, padding included, of one forward over prompts, where nobody waits for the tokens of others."""
DROP_SHARE = 4
"""Rows of ended requests are dropped when they are at least one in this many."""


class Scheduler:
    """Runs requests to their end."""

    def __init__(
        self,
        model: DecoupledModel,
        variants: VariantCache,
        listener: Listener,
        *,
        max_batch: int,
        step_tokens: int = PROMPT_TOKENS,
        room: int = ROOM,
        cuda_graphs: bool = False,
    ) -> None:
        """step_tokens: of prompts, that a step computes; max_batch: requests that run at once; room: see Decoder."""
        self.max_batch = max_batch
        self._variants, self._listener = variants, listener
        self._waiting: deque[Request] = deque()
        self._live: list[Request] = []
        self._prompts = Prompts(model, listener, step_tokens)
        self.decoder = Decoder(model, room=room, cuda_graphs=cuda_graphs)

    def submit(self, request: Request) -> None:
        """Put a request into the queue; it may join a batch that is running."""
        self._waiting.append(request)

    def run(self, requests: Iterable[Request], lock: RLock, memory: Callable[[], AbstractContextManager[None]]) -> None:
        """Take requests to their end; lock: is held for a step at a time."""
        for request in requests:
            self.submit(request)
        try:
            while self.busy:
                with lock, memory():
                    self.step()
        finally:
            with lock:
                self.close()

    def end(self, request: Request, finish: Finish) -> None:
        """End a request before its time; the next step returns it as ended."""
        if request.finished is None:
            request.finished = finish

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold their variant."""
        return len(self._live)

    @property
    def busy(self) -> bool:
        """Whether any request is not done."""
        return bool(self._waiting or self._live)

    @property
    def graph(self) -> GraphedStep | None:
        """The captured step of the present arrangement of rows, if there is one."""
        return self.decoder.graph

    def close(self) -> list[Request]:
        """Let go of all requests, and of the variants of those that run; returns them."""
        left = [*self._live, *self._waiting]
        for request in self._live:
            self._release(request)
        self._live = []
        self._prompts.clear()
        self.decoder.clear()
        self._waiting.clear()
        return left

    def preempt(self, requests: Collection[Request]) -> None:
        """Take requests out of the batch and back to their places in the queue; what they have is computed again."""
        gone = set(requests)
        self._prompts.drop(gone)
        if any(request in gone for request in self.decoder.rows):
            self.decoder.arrange([], without=gone)
        for request in gone:
            self._release(request)
        self._live = [request for request in self._live if request not in gone]
        self._queue(gone)

    def retreat(self, error: BackendError) -> list[Request]:
        """After the device had no memory for a step: half as many requests run; returns those that ended.

        One that has no room even alone fails.
        """
        self._prompts.clear()
        self.decoder.clear()
        ended = self._leave()
        running = self._live
        if len(running) == 1:
            running[0].fail(error)
            ended += self._leave()
        self.preempt(self._live)
        self.max_batch = max(1, len(running) // 2)
        return ended

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what can be admitted, decode one token for each running request; returns those that ended."""
        ended = self._leave()
        new, failed = self._admitted()
        self._live += new
        self._prompts.add(new)
        through = [(group.cache, group.requests) for group in self._prompts.step()]
        idle = sum(request.finished is not None for request in self.decoder.rows)
        # to drop rows of requests that ended costs more than to compute them for nothing, unless they are many
        if through or idle * DROP_SHARE >= len(self.decoder.rows) > 0:
            self.decoder.arrange(through)
        ended += failed + self._leave()
        if any(request.finished is None for request in self.decoder.rows):
            self._decode()
            ended += self._leave()
        return ended

    # --- entering and leaving ----------------------------------------------------------------------------------------

    def _admitted(self) -> tuple[list[Request], list[Request]]:
        """The waiting requests whose turn it is, variants ready and held; and those whose variant is not to be had."""
        chosen: list[Request] = []
        failed: list[Request] = []
        passed: deque[Request] = deque()
        blocked: set[str | None] = set()
        try:
            while self._waiting and len(self._live) + len(chosen) < self.max_batch:
                request = self._waiting.popleft()
                try:
                    held = request.variant not in blocked and self._hold(request, alone=not (self._live or chosen))
                except (IntegrityError, InputError) as error:
                    failed += self._fail(request, error)
                    continue
                if held:
                    chosen.append(request)
                else:
                    blocked.add(request.variant)
                    passed.append(request)
        except BaseException:
            for request in chosen:
                self._release(request)
            self._queue([*chosen, request, *passed])
            raise
        self._waiting.extendleft(reversed(passed))
        return chosen, failed

    def _queue(self, requests: Iterable[Request]) -> None:
        """Put requests back to where they came from: the queue is in the order in which they were submitted."""
        for request in requests:
            insort(self._waiting, request, key=lambda one: one.index)

    def _fail(self, request: Request, error: IntegrityError | InputError) -> list[Request]:
        """End a request, and all that wait for the same variant: to read it once more for each would tell no more."""
        ended = [request, *(one for one in self._waiting if one.variant == request.variant)]
        self._waiting = deque(one for one in self._waiting if one.variant != request.variant)
        for one in ended:
            one.fail(error)
        return ended

    def _hold(self, request: Request, *, alone: bool) -> bool:
        """Reserve the variant of a request, and with it its slot, if it is ready; where nothing else runs, wait."""
        if (name := request.variant) is None:
            return True
        if request.loaded is not None:  # it may have been loaded again while the request waited
            request.loaded = self._variants.current(request.loaded)
        if not alone and not (self._variants.start(name) and self._variants.ready(name)):
            return False
        request.slot = self._variants.acquire([name])[name]
        return True

    def _release(self, request: Request) -> None:
        if request.variant is not None:
            self._variants.release([request.variant])

    def _leave(self) -> list[Request]:
        """The requests that ended since the last call; the variants of those that ran are let go."""
        ended = [request for request in self._live if request.finished is not None]
        for request in ended:
            self._release(request)
        if ended:
            self._live = [request for request in self._live if request.finished is None]
        gone = [request for request in self._waiting if request.finished is not None]
        if gone:
            self._waiting = deque(request for request in self._waiting if request.finished is None)
        return ended + gone

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every running request."""
        rows = self.decoder.rows
        for request, picked in zip(rows, choose(self.decoder.step(), rows), strict=True):
            if request.finished is None:
                self._listener.token(request, picked, request.take(picked.token))
