"""The decode step that is on its way: from its launch until its tokens are here, and told.

A step may be launched while the one before it is still on its way, with tokens that are on the device alone: then the
device goes from one to the other without waiting for the host. Of a row that turns out to have ended, its token is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deltacompress.runtime.engine.generation_config import Finish
from deltacompress.runtime.engine.requests import NO_TOKEN, Listener, Picked, Request
from deltacompress.runtime.engine.sampling.choose import Choice, choose
from deltacompress.runtime.engine.steps.decoder import Decoder


def computes_beside(device: torch.device) -> bool:
    """Whether a device goes on while the host does something else."""
    return device.type == "cuda"


class Flight:
    """The step that a decoder has launched."""

    def __init__(self, decoder: Decoder, listener: Listener, check: Callable[[], None]) -> None:
        """check: raises where what other ranks sent is no answer."""
        self._decoder, self._listener, self._check = decoder, listener, check
        self._logits: Tensor | None = None  # of the decoder's rows, on their way
        self._untold: list[tuple[Request, Picked]] = []

    def launch(self) -> None:
        """A step of all rows, whose tokens are known; raises as Decoder.step."""
        self._logits = self._decoder.step()

    @property
    def may_go_on(self) -> bool:
        """Whether `go_on` can be called: one is on its way, and the same rows are in the next."""
        return self._logits is not None and self._decoder.may_go_on()

    def go_on(self) -> None:
        """Launch the next step, then take the tokens of the one before; raises as Decoder.step."""
        assert self._logits is not None
        choice, self._logits = Choice(self._logits, self._decoder.rows), None
        self._logits = self._decoder.step(choice.tokens)
        found = choice.wait()
        self._check()
        self._note(found)

    def collect(self) -> bool:
        """Take one token for every request that was running, and still is; False if no step was on its way."""
        logits, self._logits = self._logits, None
        if logits is None:
            return False
        found = choose(logits, self._decoder.rows)
        self._check()
        self._note(found)
        return True

    def forget(self) -> None:
        """Nobody wants the tokens that are on their way."""
        self._logits = None

    def tell(self, end: Callable[[Request, Finish], None]) -> None:
        """The texts of tokens that were taken; end: is called for a request that gave way before its text ended it."""
        untold, self._untold = self._untold, []
        for request, picked in untold:
            self._listener.token(request, picked, request.tell())
            if request.finished is not None and request.stands_since is not None:
                finish, request.finished = request.finished, None
                end(request, finish)

    def _note(self, found: Sequence[Picked]) -> None:
        for request, picked in zip(self._decoder.rows, found, strict=True):
            if request.finished is not None:  # somebody has cancelled it, or its text ended it
                continue
            if picked.token == NO_TOKEN:
                request.fail_without_answer()
            else:
                if not request.tokens:
                    self._listener.started(request)
                request.note(picked.token)
                self._untold.append((request, picked))
