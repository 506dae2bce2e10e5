"""How many tokens of prompts a step computes: the engine's rule, which the simulator follows, too."""

from __future__ import annotations

ALONE_TOKENS = 1024
"""Tokens that a step computes of prompts, at least, where no request waits for its next token."""
_FEWEST = 256
"""Tokens of the smallest part of a step's: fewer take a GPU about as long."""
_LITTLE = ((1, 4), (2, 2))
"""Where prompts of up to so many steps' tokens wait, a step computes this part of its tokens, a quarter or half."""


def most_tokens(step_tokens: int, waiting: int, *, alone: bool) -> int:
    """Of the coming step: fewer where little waits, so that those that decode wait less for their next token.

    Each costs the less, the more there are of them: a step decodes once, however many prompts go with it. waiting:
    tokens of all prompts that are on their way or in line; alone: nobody waits for another token.
    """
    if alone:
        return max(step_tokens, ALONE_TOKENS)
    part = next((part for steps, part in _LITTLE if waiting <= steps * step_tokens), 1)
    return max(step_tokens // part, min(step_tokens, _FEWEST))


def fits(tokens: int, left: int, most: int) -> bool:
    """Whether so many are computed in a step that has so many left of `most`; else they wait for a step of their own.

    A step that has computed nothing yet takes whatever comes first.
    """
    return tokens <= left or left == most
