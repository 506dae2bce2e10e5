"""Continuous batching: requests of any variants and lengths enter and leave one running batch.

A step admits waiting requests (as many as rows and budget allow), computes a bounded piece of their prompts, and
decodes one token for every running one. A request whose variant is still on its way to the device waits, while the
others go on; one whose variant comes back damaged, or was unloaded, fails by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager
from threading import RLock

import torch

from deltacompress.errors import BackendError, DeltaCompressError, InputError
from deltacompress.runtime.batch import BASE
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.engine.generation_config import Finish
from deltacompress.runtime.engine.policy.portions import much
from deltacompress.runtime.engine.policy.state import Rules
from deltacompress.runtime.engine.requests import Listener, Request
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.flight import Flight, computes_beside
from deltacompress.runtime.engine.steps.graphs import Graphs
from deltacompress.runtime.engine.steps.pace import Pace
from deltacompress.runtime.engine.steps.pages import PAGE, SCRATCH, Pages
from deltacompress.runtime.engine.steps.pieces import WARM_WIDTH, Piece, Pieces
from deltacompress.runtime.engine.steps.prefixes import Prefixes
from deltacompress.runtime.engine.steps.prompts import Prompts
from deltacompress.runtime.engine.steps.swap import Swap
from deltacompress.runtime.engine.turns import Turns
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.others import ALONE

PROMPT_TOKENS = 8192
"""Tokens, padding included, of one forward over prompts, where nobody waits for the tokens of others."""
OFFLINE = Rules(skipping="free")
"""Nobody gives way: all requests are there from the start, and it is their sum that counts."""
EXPECTED = 1024
"""Tokens of a request, prompt and answer, that memory is taken for at once where there is enough."""
WARM_ROWS = 128
"""Rows up to which steps are captured before there are any."""
WAIT_S = 0.001
"""Seconds until another look, where nothing else can be done."""


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
        rules: Rules = OFFLINE,
        prefix_bytes: int = 0,
        swap_bytes: int = 0,
        kv_tokens: int | None = None,
        expected_tokens: int = EXPECTED,
        cuda_graphs: bool = False,
    ) -> None:
        """step_tokens: of prompts, that a step computes; max_batch: requests that run at once; rules: who gives
        way to whom; prefix_bytes: see Prefixes; swap_bytes: see Swap; kv_tokens: see Pages; expected_tokens: of a
        request.

        Raises:
            InputError: swap space, and the model lies on several devices.
        """
        if swap_bytes and model.others is not ALONE:
            raise InputError("has no use where a model lies on several devices", where="swap_bytes", way_out="give 0")
        self.max_batch, self._step_tokens = max_batch, step_tokens
        self._beside = computes_beside(model.device)
        self._all_seen = False  # whether nobody has come since the last plan, and who waited then need not be looked at
        self._listener, self._variants = listener, variants
        self.pages = Pages(expected=max_batch * expected_tokens // PAGE, most_tokens=kv_tokens)
        # over several devices the first one does not know what the others have
        self.pages.coming = lambda: variants.residents.coming_bytes if model.others is ALONE else None
        self._others = model.others
        self.pages.cleared = self._others.forget
        self.swap, self._pace = Swap(self.pages, swap_bytes, model.device), Pace(step_tokens)
        self._turns = Turns(variants, self.pages, self.swap, self._pace, rules)
        self.prefixes = Prefixes(self.pages, prefix_bytes)
        self.graphs = Graphs(model, self.pages) if cuda_graphs else None
        self._model, self._pieces = model, Pieces(model, self.pages, self.graphs)
        self._prompts = Prompts(self._pieces, listener, step_tokens, self.pages, self.prefixes)
        self.decoder = Decoder(model, self.pages, self.graphs)
        self._flight = Flight(self.decoder, listener, self._others.check)
        self._through: list[Request] = []  # requests whose prompts are, which get their rows in the coming step

    @torch.inference_mode()
    def warm(self) -> None:
        """Take memory for keys and values, and have forwards captured, before anybody asks; where they are captured.

        Of each kind of variant that is on the device, or on its way there, they are captured with one.

        Raises:
            BackendError, torch.OutOfMemoryError: there is no memory for all that; what was taken is given back, and
                requests are served without.
        """
        if self.graphs is None or self.busy:
            return
        self._variants.await_all()
        self._variants.collect(())  # what was loaded and nobody has used yet
        held, served = [one for one in self._variants.variants.values() if one.installed], frozenset[Hashable]()
        for one in held:
            one.users += 1
        tokens = getattr(self._model.config, "max_position_embeddings", None) or EXPECTED
        try:
            self._pieces.forward(Piece([BASE], [[0]], 0, [[SCRATCH]], [range(1)]))  # the pages' memory comes with it
            self.pages.take_expected()
            self.swap.prepare()
            self.decoder.fit(self.max_batch + 1, min(self.pages.needed(tokens), WARM_WIDTH))
            self.graphs.at_once = True
            for slot in (BASE, *(one.slot for one in held)):
                assert slot is not None
                traits = self._model.traits([slot])
                if slot == BASE or (traits is not None and not traits <= served):
                    served |= traits or frozenset()
                    self.decoder.warm(slot, min(self.max_batch, WARM_ROWS), self._step_tokens)
                    self._pieces.warm(slot, tokens, self.max_batch)
        except BaseException:
            self._forget()
            self._others.check()  # of theirs nobody knows what is left
            raise
        finally:
            self.graphs.at_once = False
            for one in held:
                one.users -= 1

    def submit(self, request: Request) -> None:
        """Put a request into the queue; it may join a batch that is running."""
        self._all_seen = False
        self._turns.submit(request)

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
        self._turns.end(request, finish)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that wait, and that hold their variant; any thread may ask."""
        return self._turns.counts

    @property
    def preempted(self) -> tuple[int, int]:
        """Times that a request gave way, and those of which what was computed went to the host; any thread may ask."""
        return self._turns.gave_way, self.swap.count

    @property
    def busy(self) -> bool:
        """Whether any request is not done, or its end not told."""
        return self._turns.busy

    def close(self) -> list[Request]:
        """Let go of all requests, and of the variants of those that run; returns them."""
        self._forget()
        return self._turns.close()

    def retreat(self, error: BackendError) -> list[Request]:
        """After the device had no memory for a step: half as many requests run; returns those that ended.

        One that has no room even alone fails, but not for what a variant on its way takes.
        """
        self.pages.expected = self.pages.count // 2  # the step needs some of it
        ran = max(self._turns.ran, len(self.decoder.rows))  # those that have ended since had the device, too
        self._forget()
        self._turns.settle()
        arrived = ran <= 1 and self._variants.await_all()
        if ran <= 1 and not arrived:
            self._turns.fail(error)
        else:
            self._turns.back(self._turns.running)
        self.max_batch = max(1, ran // 2)
        return self._turns.ended()

    def fail(self, error: DeltaCompressError) -> list[Request]:
        """After a step that broke: all that run fail; returns those that ended."""
        self._forget()
        self._turns.settle()
        self._turns.fail(error)
        return self._turns.ended()

    def _forget(self) -> None:
        self._flight.forget()
        self._through.clear()
        self._pace.forget()
        self._prompts.clear()
        self.prefixes.clear()
        self.decoder.clear()
        self.swap.forget_pages()
        for request in self._turns.running:  # also those that are in neither, between prompts and rows
            request.pages = []
        self.pages.clear()
        if self.graphs is not None:
            self.graphs.clear()
        self._flight.tell(self._turns.end)  # runs what is not ours, and may raise

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Take the tokens of the step before, admit what can be admitted, and begin to decode; returns who ended.

        What the host does for tokens that it has, texts above all, it does while the device computes the next ones.
        Where nobody enters or leaves, the device has these to compute before the host has the last ones.
        """
        if self._goes_on():
            self._flight.go_on()
            now = time.monotonic()
            self._pace.ends(now)
            self._pace.begins(now)
            self._all_seen = not self._turns.counts[0]  # who waits is looked at every other step
            return self._ended()
        if self._flight.collect():
            self._pace.ends(time.monotonic())
        self._turns.settle()
        self._rearrange()
        self.swap.prepare()
        started = self._turns.take(self.max_batch, self._prompts.requests, self._give_way)
        self._pace.begins(time.monotonic())
        self._prompts.add([request for request in started if not self.swap.fetch(request, self.prefixes)])
        if self._prompts.requests:
            self._flight.tell(self._turns.end)  # before the device is busy with them
            self._prompts.drop(())  # one that gave way before its text was told, which ended it
        alone = not self.decoder.rows
        in_line = 0 if alone or not self._prompts.requests else self._turns.to_compute(much(self._step_tokens))
        through, joining, tokens = self._prompts.step(alone=alone, in_line=in_line)
        self._pace.computes(tokens)
        if self._beside and self.decoder.rows:  # whose step is launched before first tokens of others are waited for
            self._through, through = through, []
        else:
            self._prompts.take()
        through += self.swap.arrived(wait=not (through or joining or self.decoder.rows or self._prompts.requests))
        if through or joining or any(request.finished is not None for request in self.decoder.rows):
            self.decoder.arrange(through, joining=joining)
        self._turns.settle()
        if self.decoder.rows:
            self._flight.launch()
            self._prompts.joined()
        self._prompts.take()
        self._all_seen = True
        return self._ended()

    def _goes_on(self) -> bool:
        """Whether all that run are in the step on its way, can be in the next, and nobody else is to be computed."""
        others = self._prompts.requests or self._through or self._turns.counts[1] != len(self.decoder.rows)
        return self._beside and self._all_seen and not others and self._flight.may_go_on

    def _ended(self) -> list[Request]:
        """Tell the tokens that were taken; returns who ended."""
        self._flight.tell(self._turns.end)
        ended = self._turns.ended()
        if not self._turns.running:
            self._flight.forget()  # of rows that their texts ended
            self._rearrange()
            self._pace.forget()
            if not ended:
                time.sleep(WAIT_S)  # for a slot that a variant has which is being loaded
        return ended

    def _rearrange(self) -> None:
        """Whose prompts are through get rows; those that have ended give theirs, and their pages."""
        self._prompts.drop(())
        if self._through or any(request.finished is not None for request in self.decoder.rows):
            through, self._through = self._through, []
            self.decoder.arrange(through)

    def _give_way(self, requests: Collection[Request], swapped: Collection[Request]) -> None:
        """Take requests out of the batch.

        swapped: those of which what was computed goes to the host, where all was and there is room; that of others is
        computed again when their turn comes.
        """
        gone, rows = set(requests), set(self.decoder.rows)
        for request in requests:
            self.swap.recall(request)
            if request in swapped and request in rows:
                self.swap.out(request)
        self._prompts.drop(gone)
        if any(request in gone for request in self.decoder.rows):
            self.decoder.arrange([], without=gone)
