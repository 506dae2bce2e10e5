"""How long an answer is likely to be: never more than asked for, else what its variant's answers were on average."""

from __future__ import annotations


class Lengths:
    """The running mean of the lengths of each variant's answers, in tokens."""

    def __init__(self) -> None:
        self._seen: dict[str | None, tuple[int, int]] = {}  # answers, and their tokens together

    def ended(self, variant: str | None, tokens: int) -> None:
        """One more answer, which came to its own end."""
        answers, total = self._seen.get(variant, (0, 0))
        self._seen[variant] = (answers + 1, total + tokens)

    def expected(self, variant: str | None, max_tokens: int) -> int:
        """New tokens of a request, at least 1: the mean, rounded up; `max_tokens` where none has ended yet."""
        answers, total = self._seen.get(variant, (0, 0))
        return min(max_tokens, max(1, -(-total // answers))) if answers else max_tokens
