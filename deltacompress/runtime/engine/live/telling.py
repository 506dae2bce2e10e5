"""From what the scheduler does to events: a request is known by its call's id, and tokens are told as text."""

from __future__ import annotations

import time
from collections.abc import Callable

from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Scored, Started, TokenScore
from deltacompress.runtime.engine.requests import Picked, Request
from deltacompress.runtime.engine.tokenizers import Tokenizers


class Telling:
    """The scheduler's listener. computed_tokens: of prompts, so far."""

    def __init__(self, tokenizers: Tokenizers, emit: Callable[[Event], None]) -> None:
        self.computed_tokens = 0
        self._tokenizers, self._emit = tokenizers, emit
        self._ids: dict[Request, tuple[str, float]] = {}

    def add(self, call_id: str, request: Request, now: float) -> None:
        """Know a request, submitted at `now`."""
        self._ids[request] = call_id, now

    def id_of(self, request: Request) -> str:
        """Of its call."""
        return self._ids[request][0]

    def computed(self, tokens: int) -> None:
        """So many more of prompts."""
        self.computed_tokens += tokens

    def started(self, request: Request) -> None:
        """Its prompt was computed."""
        call_id, since = self._ids[request]
        scores: tuple[TokenScore, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            first = TokenScore(self._scored(request, request.ids[0], None), ())
            scores = (first, *(self._score(request, one) for one in request.prompt_scores))
        self._emit(Started(call_id, scores, time.monotonic() - since, request.stood_s))

    def token(self, request: Request, picked: Picked, text: str) -> None:
        """One more token."""
        score = None if picked.logprob is None else self._score(request, picked)
        self._emit(NewToken(self.id_of(request), picked.token, text, score))

    def ended(self, request: Request) -> None:
        """The last that is told of it."""
        call_id, _ = self._ids.pop(request)
        assert request.finished is not None
        tokens, told = len(request.tokens), (request.error, request.stood_s, request.gave_way)
        self._emit(Ended(call_id, request.finished, tokens, *told))

    def _score(self, request: Request, picked: Picked) -> TokenScore:
        top = tuple(self._scored(request, *one) for one in picked.top)
        return TokenScore(self._scored(request, picked.token, picked.logprob), top)

    def _scored(self, request: Request, token: int, logprob: float | None) -> Scored:
        return Scored(token, self._tokenizers.piece(request.variant, token), logprob)
