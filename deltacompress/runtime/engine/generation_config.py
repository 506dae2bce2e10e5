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
    """How the next token is chosen. temperature 0 is greedy; top_p in (0, 1]; seed: of each request's own generator."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


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
