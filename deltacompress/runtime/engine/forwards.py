"""Forwards without generation: logits and log-likelihoods of many sequences, without ever holding many logits.

Sequences go through in batches of like length, and of one variant where there are enough of them (their rows then form
one large product). The head sees only the rows whose logits somebody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltacompress.numerics import likelihood
from deltacompress.runtime.batch import BASE, Batch, to_device
from deltacompress.runtime.cache.loaded_variant import LoadedVariant
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.plan import Kind, Plan

BATCH_TOKENS = 4096
"""Tokens, padding included, of one forward."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence. loaded: its variant, None for the base; vocabulary: of that; first, last: positions [first, last)
    whose logits are wanted.
    """

    index: int
    loaded: LoadedVariant | None
    vocabulary: int
    ids: list[int]
    first: int
    last: int

    @property
    def variant(self) -> str | None:
        return None if self.loaded is None else self.loaded.name

    @property
    def slot(self) -> int:
        """Of its variant, which must be held."""
        if self.loaded is None:
            return BASE
        assert self.loaded.slot is not None
        return self.loaded.slot

    @property
    def number(self) -> int:
        """Which variant it is of, held or not; 0 is the base."""
        return 0 if self.loaded is None else self.loaded.number

    @property
    def kept(self) -> int:
        """Positions whose logits are wanted."""
        return self.last - self.first


@contextmanager
def holding(cache: VariantCache, items: Sequence[Item]) -> Iterator[list[Item]]:
    """The items with their variants as they are loaded now, ready and held in this block.

    Raises:
        InputError: a variant was unloaded, or its name is another artifact's now.
        BackendError: they do not fit together.
    """
    found = [one if one.loaded is None else replace(one, loaded=cache.current(one.loaded)) for one in items]
    with held(cache, {one.variant for one in found if one.variant is not None}):
        yield found


@contextmanager
def held(cache: VariantCache, names: Collection[str]) -> Iterator[dict[str, int]]:
    """Variants of these names are ready, and stay so in this block; their slots; raises as VariantCache.acquire."""
    found = cache.acquire(names)
    try:
        yield found
    finally:
        cache.release(names)


@torch.inference_mode()
def run(model: DecoupledModel, items: Sequence[Item]) -> tuple[list[Item], Tensor]:
    """One forward over items of any variants: (items by slot, their logits one after another [positions, vocabulary]).

    The vocabulary is the widest of the batch; beyond an item's own, values are unspecified.
    """
    ordered = sorted(items, key=lambda one: one.slot)
    longest = max(len(one.ids) for one in ordered)
    flat = [token for one in ordered for token in one.ids + [0] * (longest - len(one.ids))]
    keep = [row * longest + at for row, one in enumerate(ordered) for at in range(one.first, one.last)]
    slots, kept = [one.slot for one in ordered], [one.kept for one in ordered]
    with model.others.forward(lambda: Plan(Kind.SEQUENCES, slots, flat, len(slots), longest, keep=keep, kept=kept)):
        batch = Batch(slots, model.device, keep=keep, kept=kept)
        return ordered, forward_sequences(model, batch, to_device(flat, model.device).view(-1, longest))


def forward_sequences(model: DecoupledModel, batch: Batch, ids: Tensor) -> Tensor:
    """Whole sequences int64 [requests, tokens] -> logits [kept positions, vocabulary]."""
    with model.serving(batch):
        logits: Tensor = model.model(input_ids=ids, use_cache=False).logits[0]
    return logits


def batches(items: Sequence[Item], fits: Callable[[set[str]], bool]) -> Iterator[list[Item]]:
    """Batches of like length, longest first; items of one variant next to each other.

    fits: whether these variants fit budget and slots together.
    """
    waiting: list[Item] = []
    names: set[str] = set()
    for one in sorted(items, key=lambda one: (one.number, -len(one.ids))):
        own = {one.variant} if one.variant is not None else set()
        longest = max(len(other.ids) for other in [*waiting, one])
        if waiting and (longest * (len(waiting) + 1) > BATCH_TOKENS or not fits(names | own)):
            yield waiting
            waiting, names = [], set()
        waiting.append(one)
        names |= own
    if waiting:
        yield waiting


@torch.inference_mode()
def log_likelihoods(items: list[Item], logits: Tensor, targets: list[list[int]]) -> list[likelihood.LogLikelihood]:
    """Of each item's continuation, from the logits before each of its tokens (as `run` gives them).

    Raises:
        NumericsError: these are not finite.
    """
    logits = likelihood.mask_beyond(logits, [one.vocabulary for one in items for _ in range(one.kept)])
    likelihood.check_logits(logits.split([one.kept for one in items]), [one.variant for one in items])
    wanted = to_device([token for one in targets for token in one], logits.device)
    scores = likelihood.score_tokens(logits, wanted)
    return likelihood.log_likelihoods(scores, [len(one) for one in targets])
