"""What users hand in, checked, and what they get back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from deltacompress.errors import DeltaCompressError
from deltacompress.numerics.likelihood import mask_beyond
from deltacompress.runtime.batch import BASE
from deltacompress.runtime.cache.loaded_variant import LoadedVariant
from deltacompress.runtime.engine.generation_config import Sampling

Finish = Literal["eos", "stop", "length", "context", "failed"]
OnToken = Callable[[int, int, str], None]
"""on_token(request index, token id, new text): called for each token as it comes; texts add up to the result."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request became.

    finished: "eos", "stop" (a stop string), "length" (max_new_tokens), "context", or "failed": its variant could not be
    brought back to the device, which `error` tells; nothing was written then.
    """

    text: str
    tokens: tuple[int, ...]
    finished: Finish
    error: DeltaCompressError | None = None


@dataclass(eq=False)
class Request:
    """One request on its way through the scheduler.

    variant: None for the base; ids: the prompt; vocabulary: tokens that may come out; limit: new tokens at most, by
    wish or by context; limit_reason: which of the two; loaded: the variant that all of this was taken from; slot: of
    the variant, from when the request holds it.
    """

    index: int
    variant: str | None
    ids: list[int]
    vocabulary: int
    limit: int
    limit_reason: Literal["length", "context"]
    eos: frozenset[int]
    text: TextStream
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    finished: Finish | None = None
    generator: torch.Generator | None = None
    loaded: LoadedVariant | None = None
    slot: int = BASE
    error: DeltaCompressError | None = None

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.ids) + len(self.tokens)

    def take(self, token: int, on_token: OnToken | None) -> None:
        """One more token."""
        self.tokens.append(token)
        if token in self.eos:
            self.finished = "eos"
        piece = self.text.push(self.tokens, ended=self.finished is not None or len(self.tokens) >= self.limit)
        if self.finished is None and self.text.stopped:
            self.finished = "stop"
        if self.finished is None and len(self.tokens) >= self.limit:
            self.finished = self.limit_reason
        if on_token is not None:
            on_token(self.index, token, piece)

    def fail(self, error: DeltaCompressError) -> None:
        """It ends without a token, because its variant is not to be had."""
        self.finished = "failed"
        self.error = error.with_traceback(None)  # which would keep alive whatever the load had made

    def completion(self) -> Completion:
        """The result."""
        assert self.finished is not None
        return Completion(self.text.text, tuple(self.tokens), self.finished, self.error)


class TextStream:
    """Turns a growing list of tokens into text, piece by piece, and watches for stop strings.

    A piece is held back while its last character may still change (a token can be half a character) or while it may
    be the beginning of a stop string. text: the whole text, once it has ended.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str], *, streams: bool) -> None:
        self.text = ""
        self.stopped = False
        self._decode, self._stop, self._streams = decode, tuple(stop), streams
        self._told = ""

    def push(self, tokens: list[int], *, ended: bool) -> str:
        """The new text after `tokens` (all of them so far)."""
        if not (ended or self._streams or self._stop):
            return ""  # nobody listens: decode once, at the end
        text = self._decode(tokens)
        for stop in self._stop:
            if (at := text.find(stop)) >= 0:
                text, self.stopped, ended = text[:at], True, True
        if ended:
            self.text = text
        else:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
            text = text[: len(text) - self._pending(text)]
        piece = text[len(self._told) :] if text.startswith(self._told) else ""
        self._told += piece
        return piece

    def _pending(self, text: str) -> int:
        """Characters at the end of `text` that may begin a stop string."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)


@torch.inference_mode()
def choose(logits: Tensor, requests: list[Request]) -> list[int]:
    """The next token of each request, from logits [requests, vocabulary]. The one wait for the device of a step."""
    logits = mask_beyond(logits, [request.vocabulary for request in requests])
    picked: list[int] = logits.argmax(-1).tolist()
    for row, request in enumerate(requests):
        if request.sampling.temperature > 0:
            picked[row] = _sample(logits[row, : request.vocabulary].float().cpu(), request)
    return picked


def _sample(logits: Tensor, request: Request) -> int:
    """On the CPU with the request's own generator: a draw does not depend on device or neighbours."""
    if request.generator is None:
        request.generator = torch.Generator().manual_seed(request.sampling.seed)
    probabilities = torch.softmax(logits / request.sampling.temperature, -1)
    if request.sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= request.sampling.top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=request.generator))
