"""How many tokens of prompts a step computes: the engine's rule, which the simulator follows, too."""

from __future__ import annotations

ALONE_TOKENS = 1024
"""Tokens that a step computes of prompts, at least, where no request waits for its next token."""
_LITTLE = 8
"""Steps' worth of prompts that are little, at most: they are through in twice as many steps."""


def most_tokens(step_tokens: int, waiting: int, *, alone: bool) -> int:
    """Of the coming step; half of them where little waits, so that those that decode wait half as long.

    waiting: tokens of all prompts that are on their way; alone: nobody waits for another token.
    """
    if alone:
        return max(step_tokens, ALONE_TOKENS)
    return max(step_tokens // 2, 1) if waiting <= _LITTLE * step_tokens else step_tokens


def fits(tokens: int, left: int, most: int) -> bool:
    """Whether so many are computed in a step that has so many left of `most`; else they wait for a step of their own.

    A step that has computed nothing yet takes whatever comes first.
    """
    return tokens <= left or left == most
