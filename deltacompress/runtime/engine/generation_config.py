"""What a call of `generate` may wish for, checked before anything is loaded. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltacompress.errors import InputError, option


def check_text(name: str, text: str) -> None:
    """Refuse text that no tokenizer takes: what the command line got was other bytes than UTF-8.

    Raises:
        InputError: a surrogate is in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} is not valid UTF-8 (character {error.start})", way_out="give it as UTF-8 text"
        ) from error


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and what is told of it.

    temperature: 0 is greedy. top_p: the likeliest tokens whose probabilities add up to this, in (0, 1]; top_k: so many
    of the likeliest, 0 for all; min_p: those at least this likely, as a share of the likeliest one, in [0, 1].
    seed: of the request's own draws. repetition_penalty: of tokens that the prompt or the answer has, 1 for none;
    presence_penalty, frequency_penalty: of tokens that the answer has, once and for each time, 0 for none. logit_bias:
    (token, what is added to its logit) of each. ignore_eos: the end token does not end the text. min_tokens: before
    that many neither the end token nor a stop string ends it.
    logprobs: tell the log-probability of each token that comes, and of so many likeliest ones (0: of it alone; None:
    nothing); prompt_logprobs: likewise of the prompt's tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How a call of `generate` wants its requests done; bos: see Runtime.generate; streams: somebody listens."""

    max_new_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    bos: bool | None
    streams: bool

    @classmethod
    def checked(
        cls, max_new_tokens: int, stop: str | Sequence[str], sampling: Sampling, bos: bool | None, *, streams: bool
    ) -> GenerationConfig:
        """The generation_config, if they make sense.

        Raises:
            InputError: they do not.
        """
        stops = (stop,) if isinstance(stop, str) and stop else tuple(stop)
        if max_new_tokens < 1:
            raise InputError("at least 1", where=f"{option('max_new_tokens')} {max_new_tokens}")
        if any(not one for one in stops):
            raise InputError("an empty stop string would stop everything", way_out="leave it out")
        for one in stops:
            check_text(option("stop"), one)
        if not 0 <= sampling.temperature < math.inf:
            raise InputError(
                "give 0 (always the most likely token), or a finite number above it",
                where=f"{option('temperature')} {sampling.temperature}",
            )
        if not 0 < sampling.top_p <= 1:
            raise InputError(
                "give a share of the probability, above 0 and at most 1", where=f"{option('top_p')} {sampling.top_p}"
            )
        return cls(max_new_tokens, stops, sampling, bos, streams)
