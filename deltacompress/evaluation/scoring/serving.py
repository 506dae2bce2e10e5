"""What a scorer asks, and of whom: rows and prompts, and the models that run them.

`Serving` is the seam between the scorer and what runs its forwards: a checkpoint as transformers loads it
(checkpoints.py), or the decoupled runtime, one base with many deltas beside it (decoupled.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

BATCH_TOKENS = 8192
"""Tokens, padding included, of one forward."""
BATCH_ROWS = 64
"""Rows of one forward, unless told otherwise."""
_LOGITS = 1 << 28
"""The most of one forward that more rows may lead to: a GiB in fp32."""


@dataclass(frozen=True, slots=True)
class Row:
    """A continuation to be scored after a context, by one variant; token ids, both not empty."""

    variant: str | None
    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """What a forward over it reads, and the last one."""
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A context to go on from greedily: until an end of text (included), or max_new_tokens.

    draft: what a like model wrote; a scorer checks it in one forward instead of writing token by token.
    """

    variant: str | None
    context: tuple[int, ...]
    max_new_tokens: int
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer to go on with. written: what there is of it; ends: the tokens that end it."""

    prompt: Prompt
    written: tuple[int, ...]
    ends: frozenset[int]

    @property
    def ids(self) -> tuple[int, ...]:
        """All that is read before the next token."""
        return (*self.prompt.context, *self.written)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.prompt.max_new_tokens - len(self.written)

    @property
    def tokens(self) -> int:
        """Of context and answer, when it is as long as it may be."""
        return len(self.prompt.context) + self.prompt.max_new_tokens


class Serving(ABC):
    """A model, perhaps with variants beside it, ready for forwards. Variant None is the model itself.

    model: as transformers loaded it.
    """

    model: PreTrainedModel

    @abstractmethod
    def ends(self, variant: str | None) -> frozenset[int]:
        """Tokens that end a text by a model's own configuration, as generation uses it."""

    @abstractmethod
    def vocabulary(self, variant: str | None) -> int:
        """Tokens that a model has; ids from there on must not be asked of it."""

    @abstractmethod
    def slot(self, variant: str | None) -> int:
        """A number of its own: rows of one forward stand in the order of these."""

    @abstractmethod
    def forward(self, variants: Sequence[str | None], **inputs: Any) -> tuple[Tensor, Any]:
        """(f32 logits, cache) of one forward; variants: of its rows; inputs: of transformers, the keys and values of
        the tokens before as `cache`. Tokens that a variant does not have get -inf.
        """

    @abstractmethod
    def complete(self, answers: Sequence[Begun], *, batch_size: int) -> list[tuple[int, ...]]:
        """For each answer its next tokens, greedily, up to an end or as many as are left; more may follow."""

    def room(self, batch_size: int) -> int:
        """Tokens of one forward of at most so many rows."""
        return BATCH_TOKENS if batch_size <= BATCH_ROWS else room(batch_size, self.vocabulary(None))


def room(batch_size: int, vocabulary: int) -> int:
    """Tokens of one forward: of a small vocabulary, as many more as there are more rows than usual."""
    return max(BATCH_TOKENS, min(BATCH_TOKENS * batch_size // BATCH_ROWS, _LOGITS // vocabulary))


def batches(
    items: Sequence[T], tokens: Callable[[T], int], *, batch_size: int = BATCH_ROWS, most: int = BATCH_TOKENS
) -> Iterator[list[T]]:
    """Items of like length, the longest first, so that running out of memory happens at once; most: tokens of each."""
    order = sorted(items, key=tokens)
    while order:
        size = max(1, min(batch_size, most // max(tokens(order[-1]), 1)))
        picked, order = order[-size:], order[:-size]
        yield picked


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-padded ids and attention mask, int64 [rows, longest]; what pads is masked, so any id will do."""
    longest = max(map(len, rows))
    ids = torch.tensor([[row[0]] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def forward(
    serving: Serving, variants: Sequence[str | None], ids: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, Any]:
    """(f32 logits, cache) of left-padded rows; the positions of what is real count from 0.

    ids: what is read now; mask: of that, and before it of what a cache in `options` holds.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return serving.forward(variants, input_ids=ids, attention_mask=mask, position_ids=positions, **options)
