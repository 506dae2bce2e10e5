"""What becomes of a call, in order: Started once, then a NewToken each, then Ended once. No torch here.

A call that is submitted ends exactly once, whatever ends it; after its Ended nothing more is told of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltacompress.errors import DeltaCompressError
from deltacompress.runtime.engine.generation_config import Finish


@dataclass(frozen=True, slots=True)
class Scored:
    """A token, as text by itself, and its log-probability in nats (None for the first of a prompt)."""

    token: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The token that was taken, and the likeliest ones in its place, likeliest first; as many as were asked for."""

    chosen: Scored
    top: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """It left the queue and its prompt was computed.

    prompt: scores of the prompt's tokens, if they were asked for; waited_s: seconds since it was submitted, queued_s of
    them in line.
    """

    id: str
    prompt: tuple[TokenScore, ...]
    waited_s: float
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NewToken:
    """One more token.

    text: what it adds to the text, "" while a character or a stop string may still be going on; the texts of a call
    add up to its whole text. score: if log-probabilities were asked for.
    """

    id: str
    token: int
    text: str
    score: TokenScore | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The end. error: of "failed" alone, its variant could not be had or a step broke; tokens: that came out.

    queued_s: all seconds in line; preempted: times that it gave way and stood there again.
    """

    id: str
    finish: Finish
    tokens: int
    error: DeltaCompressError | None = None
    queued_s: float = 0.0
    preempted: int = 0


Event = Started | NewToken | Ended


@dataclass(frozen=True, slots=True)
class Counts:
    """Calls that wait, and calls that run; tokens of prompts so far, and those that were known from others' prompts.

    kv_tokens: that pages have room for which calls and known prompts hold; kv_room: that all pages have room for.
    preempted: times that a call gave way; swapped: those of which keys and values went to the host.
    """

    queued: int
    running: int
    prompt_tokens: int = 0
    known_tokens: int = 0
    kv_tokens: int = 0
    kv_room: int = 0
    preempted: int = 0
    swapped: int = 0
