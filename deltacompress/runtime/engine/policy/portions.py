"""How much a step computes: the engine's usual limits, and its rule for tokens of prompts, as the simulator's."""

from __future__ import annotations

MAX_BATCH, STEP_TOKENS = 128, 1024
"""Calls that run at once, and tokens of prompts that a step computes, at most, unless somebody says otherwise."""
ALONE_TOKENS = 1024
"""Tokens that a step computes of prompts, at least, where no request waits for its next token."""
_FEWEST = 256
"""Tokens of the smallest part of a step's, if it has as many: each piece is a forward of its own."""
_LITTLE = ((1, 4), (2, 2))
"""(steps, divisor): where prompts of no more than so many steps' tokens wait, a step computes its tokens over that."""


def most_tokens(step_tokens: int, waiting: int, *, alone: bool) -> int:
    """Of the coming step: fewer where little waits, so that those that decode wait less for their next token.

    A token of a prompt costs the less, the more there are in a step, which decodes once, however many. waiting: of all
    prompts that are on their way or in line; alone: nobody waits for another token.
    """
    if alone:
        return max(step_tokens, ALONE_TOKENS)
    divisor = next((divisor for steps, divisor in _LITTLE if waiting <= steps * step_tokens), 1)
    return max(step_tokens // divisor, min(step_tokens, _FEWEST))


def much(step_tokens: int) -> int:
    """Tokens that wait from which on it makes no difference how many they are."""
    return _LITTLE[-1][0] * step_tokens + 1


def fits(tokens: int, left: int, most: int) -> bool:
    """Whether so many are computed in a step that has so many left of `most`; else they wait for a step of their own.

    A step that has computed nothing yet takes whatever comes first.
    """
    return tokens <= left or left == most
