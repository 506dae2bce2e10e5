"""What evaluation asks of a model, whatever runs it: plain checkpoints and the decoupled runtime answer the same calls.

A scorer may hold several variants (the decoupled runtime: one base, many deltas); a row names the one it is for, and
rows of different variants share batches. A row's answer must not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """A continuation to be scored after a context, by one variant of a scorer; token ids, both not empty."""

    variant: str | None
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A context to go on from greedily: until an end of text (included), or max_new_tokens.

    draft: what a like model wrote; a scorer may check it in one forward instead of writing token by token.
    """

    variant: str | None
    context: tuple[int, ...]
    max_new_tokens: int
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Summed log-likelihood of a continuation in nats, and whether greedy decoding writes exactly it."""

    logprob: float
    greedy: bool


class Scorer(Protocol):
    """A model, or several variants of one, ready to answer."""

    @property
    def device(self) -> str:
        """Where it computes, for the report."""

    @property
    def dtype(self) -> str:
        """What it computes in, for the report."""

    def ends(self, variant: str | None) -> frozenset[int]:
        """Tokens that end a text by a model's own configuration, as generation uses it."""

    def vocabulary(self, variant: str | None) -> int:
        """Tokens that a model has; ids from there on must not be asked of it."""

    def loglikelihood(self, rows: Sequence[Row]) -> list[Likelihood]:
        """One answer per row, in order."""

    def generate(self, prompts: Sequence[Prompt], *, eos: int) -> list[tuple[int, ...]]:
        """Greedy continuations, in order, each up to `eos` or one of the model's own `ends`, which is included."""

    def log_probs(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """For each row, in order: f32 [len(continuation), vocabulary] log-probabilities of every continuation token."""
