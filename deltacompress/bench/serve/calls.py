"""What is asked of the engine: a trace's lengths, scaled and cut to a context, and prompts of chance. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.errors import InputError, option
from deltacompress.runtime.engine.live.call import Call

CONTEXT = 4096
"""Of every shape that is served: the tiny one's own would not take the prompts of traces."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a replay. number: in the order in which they come; variant: its name, None for the base."""

    number: int
    variant: str | None
    arrival: Arrival

    @property
    def id(self) -> str:
        """Of its call."""
        return f"r{self.number}"


def scaled(arrivals: Sequence[Arrival], scale: float, context: int) -> tuple[list[Arrival], int]:
    """The same with all lengths times `scale`, and how many of them were cut to a context of so many tokens.

    Of those, an answer keeps half of the context at most, and the prompt what is left.

    Raises:
        InputError: scale is not above 0 and at most 1.
    """
    if not 0 < scale <= 1:
        raise InputError(f"is {scale:g}", where=option("scale"), way_out="give a number above 0, at most 1")
    found, cut = list[Arrival](), 0
    for one in arrivals:
        prompt, output = (max(1, round(tokens * scale)) for tokens in (one.prompt_tokens, one.output_tokens))
        if prompt + output > context:
            cut += 1
            output = min(output, context // 2)
            prompt = min(prompt, context - output)
        found.append(Arrival(one.at_s, prompt, output))
    return found, cut


def prompt(tokens: int, vocabulary: int, seed: str) -> tuple[int, ...]:
    """Token ids of chance, the same for the same seed; two seeds have no beginning in common but by chance.

    seed: text, because of some pairs of numbers (5 and -5) Random makes the same.
    """
    return tuple(Random(seed).choices(range(vocabulary), k=tokens))


def call_of(asked: Asked, vocabulary: int, seed: int) -> Call:
    """It takes as many tokens as its arrival says: models of chance have no end token."""
    ids = prompt(asked.arrival.prompt_tokens, vocabulary, f"{seed} {asked.id}")
    return Call(asked.id, asked.variant, ids, asked.arrival.output_tokens)
