"""What a call of `generate` may wish for, checked before anything is loaded. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deltacompress.errors import InputError, option

Latency = Literal["interactive", "batch"]
"""Whether somebody waits for it, or it may take its time."""
Finish = Literal["eos", "stop", "length", "context", "cancelled", "timeout", "failed"]
"""Why a request ended: its end token, a stop string, max_new_tokens, the model's context, somebody's wish, its time is
up, or an error: its variant could not be brought back to the device, say."""


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
    """How a call of `generate` wants its requests done; streams: somebody listens.

    max_new_tokens: None: as many as the context takes; bos: see Runtime.generate.
    """

    max_new_tokens: int | None
    stops: tuple[str, ...]
    sampling: Sampling
    bos: bool | None
    streams: bool

    @classmethod
    def checked(
        cls,
        max_new_tokens: int | None,
        stop: str | Sequence[str],
        sampling: Sampling,
        bos: bool | None,
        *,
        streams: bool,
    ) -> GenerationConfig:
        """The generation_config, if they make sense.

        Raises:
            InputError: they do not.
        """
        stops = (stop,) if isinstance(stop, str) and stop else tuple(stop)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise InputError("at least 1", where=f"{option('max_new_tokens')} {max_new_tokens}")
        if any(not one for one in stops):
            raise InputError("an empty stop string would stop everything", way_out="leave it out")
        for one in stops:
            check_text(option("stop"), one)
        check_sampling(sampling)
        return cls(max_new_tokens, stops, sampling, bos, streams)


_MOST = 10_000
"""What is added to a logit, or multiplied with it, at most: more decides no more, and fp32 ends somewhere."""


def check_sampling(sampling: Sampling) -> None:
    """Refuse what makes no sense.

    Raises:
        InputError: a field is out of its range, or no number.
    """
    tokens, biases = [token for token, _ in sampling.logit_bias], [bias for _, bias in sampling.logit_bias]
    told = sampling.logprobs, sampling.prompt_logprobs
    for name, value, holds, wanted in (
        (
            "temperature",
            sampling.temperature,
            0 <= sampling.temperature < math.inf,
            "give 0 (always the most likely token), or a finite number above it",
        ),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "give a share of the probability, above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "give a number of tokens, 0 for all of them"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "give a share of the likeliest token's, from 0 to 1"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0 < sampling.repetition_penalty <= _MOST,
            f"give a number above 0 and up to {_MOST:,}, 1 for none",
        ),
        *(
            (name, value, abs(value) <= _MOST, f"give a number from -{_MOST:,} to {_MOST:,}, 0 for none")
            for name, value in (
                ("presence_penalty", sampling.presence_penalty),
                ("frequency_penalty", sampling.frequency_penalty),
            )
        ),
        ("logit_bias", biases, all(abs(one) <= _MOST for one in biases), f"give numbers from -{_MOST:,} to {_MOST:,}"),
        ("logit_bias", tokens, len({*tokens}) == len(tokens), "give one number for each token"),
        ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0, "give a number of tokens, 0 for none"),
        *(
            (name, value, value is None or value >= 0, "give a number of tokens, or nothing")
            for name, value in zip(("logprobs", "prompt_logprobs"), told, strict=True)
        ),
    ):
        if not holds:
            raise InputError(wanted, where=f"{option(name)} {value}")
