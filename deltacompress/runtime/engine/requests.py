"""What users hand in, checked, and what they get back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from deltacompress.errors import DeltaCompressError
from deltacompress.numerics.likelihood import not_finite
from deltacompress.runtime.batch import BASE
from deltacompress.runtime.cache.loaded_variant import LoadedVariant
from deltacompress.runtime.engine.generation_config import Finish, Latency, Sampling
from deltacompress.runtime.engine.text import TextStream

LimitReason = Literal["length", "context"]
OnToken = Callable[[int, int, str], None]
"""on_token(request index, token id, new text): called for each token as it comes; texts add up to the result."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request became. finished: "failed" has its `error`, and what came before it."""

    text: str
    tokens: tuple[int, ...]
    finished: Finish
    error: DeltaCompressError | None = None


NO_TOKEN = -1
"""In the place of a token, where a model's logits say nothing of it."""


class Picked(NamedTuple):
    """A token that was taken, or NO_TOKEN.

    If asked for: its log-probability in nats, and (token, log-probability) of the likeliest ones.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """One request on its way through the scheduler.

    variant: None for the base; ids: the prompt; vocabulary: tokens that may come out; limit: new tokens at most, by
    wish or by context; limit_reason: which of the two; loaded: the variant that all of this was taken from; slot: of
    the variant, while the request holds it; pages: of its keys and values (steps/pages.py), while it runs.
    prompt_scores: of ids[1:], if they were asked for. stands_since: in line, by time.monotonic, None while it runs;
    stood_s: seconds in line before that; gave_way: times that it went back.
    """

    index: int
    variant: str | None
    ids: list[int]
    vocabulary: int
    limit: int
    limit_reason: LimitReason
    eos: frozenset[int]
    text: TextStream
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    finished: Finish | None = None
    loaded: LoadedVariant | None = None
    slot: int = BASE
    holds: bool = False
    pages: list[int] = field(default_factory=list)
    latency: Latency = "interactive"
    error: DeltaCompressError | None = None
    prompt_scores: list[Picked] = field(default_factory=list)
    stands_since: float | None = None
    stood_s: float = 0.0
    gave_way: int = 0

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.ids) + len(self.tokens)

    @property
    def known(self) -> list[int]:
        """The tokens so far."""
        return self.ids + self.tokens

    def stand(self, now: float) -> None:
        """It stands in line from now on, if it does not already."""
        if self.stands_since is None:
            self.stands_since = now

    def stand_no_more(self, now: float) -> None:
        """It runs, or has ended."""
        if self.stands_since is not None:
            self.stood_s += now - self.stands_since
            self.stands_since = None

    def take(self, token: int) -> str:
        """One more token; the text that it adds."""
        self.note(token)
        return self.tell()

    def note(self, token: int) -> None:
        """One more token, of which the text is still to be told."""
        self.tokens.append(token)
        if token in self.eos and not self.sampling.ignore_eos:
            self.finished = "eos"
        elif len(self.tokens) >= self.limit:
            self.finished = self.limit_reason

    def tell(self) -> str:
        """The text that the last token adds, which may be what the request was to stop at."""
        may_stop = len(self.tokens) > self.sampling.min_tokens
        piece = self.text.push(self.tokens, ended=self.finished is not None, may_stop=may_stop)
        if self.text.stopped and self.finished in (None, self.limit_reason):
            self.finished = "stop"
        return piece

    def fail(self, error: DeltaCompressError) -> None:
        """It ends by an error: its variant is not to be had, say."""
        self.finished = "failed"
        self.error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None  # their frames would keep alive whatever the step had made

    def fail_without_answer(self) -> None:
        """It ends, since its logits are not finite."""
        who = "the base" if self.variant is None else f"variant {self.variant}"
        self.fail(not_finite(who, f" after {self.length} tokens"))

    def completion(self) -> Completion:
        """The result."""
        assert self.finished is not None
        return Completion(self.text.text, tuple(self.tokens), self.finished, self.error)


class Listener(Protocol):
    """Who is told what becomes of requests, from the thread that steps."""

    def computed(self, tokens: int) -> None:
        """So many tokens of prompts were, in this step."""

    def started(self, request: Request) -> None:
        """Its prompt was computed; its first token follows."""

    def token(self, request: Request, picked: Picked, text: str) -> None:
        """One more token, and the text that it adds."""


class Told:
    """Tells a function of each token."""

    def __init__(self, on_token: OnToken | None) -> None:
        self._on_token = on_token

    def computed(self, tokens: int) -> None:
        """Nobody asks."""

    def started(self, request: Request) -> None:
        """Nobody asks."""

    def token(self, request: Request, picked: Picked, text: str) -> None:
        """One more token."""
        if self._on_token is not None:
            self._on_token(request.index, picked.token, text)
