"""From what users hand in to checked requests: every way in which one can be wrong is one clear line here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.runtime.batch import BASE
from deltacompress.runtime.evaluation import Item
from deltacompress.runtime.layout import Layout
from deltacompress.runtime.model import DecoupledModel
from deltacompress.runtime.requests import Request, Sampling, TextStream
from deltacompress.runtime.resident import Resident
from deltacompress.runtime.tokenizers import Tokenizers
from deltacompress.runtime.variant import token_ids

T = TypeVar("T")
Ids = Sequence[int] | Tensor
"""Token ids."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a call of `generate` wants its requests done; bos: see Runtime.generate; streams: somebody listens."""

    max_new_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    bos: bool | None
    streams: bool

    @classmethod
    def checked(
        cls, max_new_tokens: int, stop: str | Sequence[str], sampling: Sampling, bos: bool | None, *, streams: bool
    ) -> Wishes:
        """The wishes, if they make sense.

        Raises:
            InputError: they do not.
        """
        stops = (stop,) if isinstance(stop, str) and stop else tuple(stop)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens {max_new_tokens}: at least 1")
        if any(not one for one in stops):
            raise InputError("an empty stop string would stop everything; leave it out")
        if not (0 <= sampling.temperature < math.inf and 0 < sampling.top_p <= 1):
            raise InputError(f"temperature {sampling.temperature}, top_p {sampling.top_p}: at least 0, and in (0, 1]")
        return cls(max_new_tokens, stops, sampling, bos, streams)


def shaped(requests: Sequence[T], fields: int) -> Sequence[T]:
    """The requests, if each is a tuple of so many fields, the variant's name (or None) first.

    Raises:
        InputError: one is not; a lone string, say.
    """
    for index, one in enumerate(requests):
        if not isinstance(one, tuple | list) or len(one) != fields:
            wanted = "(variant, prompt or ids)" if fields == 2 else "(variant, context ids, continuation ids)"
            raise InputError(f"request {index}: {one!r:.60} is not {wanted}; give a list of those")
    return requests


class Intake:
    """Knows the model and the variants that requests name."""

    def __init__(self, model: DecoupledModel, variants: Mapping[str, Resident], tokenizers: Tokenizers) -> None:
        self._model, self._variants, self._tokenizers = model, variants, tokenizers

    def resident(self, name: str) -> Resident:
        """The loaded variant of this name.

        Raises:
            InputError: there is none.
        """
        if name not in self._variants:
            known = ", ".join(sorted(self._variants)) or "none"
            raise InputError(f"no variant named {name} is loaded (loaded: {known}); load it first")
        return self._variants[name]

    def item(self, index: int, variant: str | None, ids: Ids) -> Item:
        """A sequence all of whose logits are wanted; raises as `Runtime.logits`."""
        listed, asked = _listed(ids), self._asked(variant)
        self._check(index, asked, listed)
        return Item(index, asked, self._vocabulary(asked), listed, 0, len(listed))

    def scored(self, index: int, variant: str | None, context: Ids, continuation: Ids) -> tuple[Item, list[int]]:
        """A sequence whose continuation is to be scored, and the continuation; raises as `Runtime.loglikelihood`."""
        before, after = _listed(context), _listed(continuation)
        if not before or not after:
            raise InputError(f"request {index}: context and continuation need at least one token each")
        ids, asked = before + after, self._asked(variant)
        self._check(index, asked, ids)
        return Item(index, asked, self._vocabulary(asked), ids[:-1], len(before) - 1, len(ids) - 1), after

    def request(self, index: int, variant: str | None, prompt: str | Ids, wishes: Wishes) -> Request:
        """A request for the scheduler; raises as `Runtime.generate`."""
        asked = self._asked(variant)
        is_text = isinstance(prompt, str)
        ids = self._tokenizers.encode(variant, prompt, bos=wishes.bos) if isinstance(prompt, str) else _listed(prompt)
        if is_text and not ids:
            raise InputError(f"request {index}: the prompt is empty; give some text, or bos=True")
        self._check(index, asked, ids, room=1)
        layout = self._layout(asked)
        wanted, context = wishes.max_new_tokens, layout.context
        room = wanted if context is None else min(wanted, context - len(ids))
        directory = self._model.base.checkpoint.path if asked is None else asked.variant.delta.path
        config: Any = layout.config
        return Request(
            index,
            variant,
            BASE if asked is None else asked.slot,
            ids,
            vocabulary=self._vocabulary(asked),
            limit=room,
            limit_reason="length" if room == wanted else "context",
            eos=frozenset(token_ids(directory, config, "eos_token_id")),
            text=TextStream(self._tokenizers.decoder(variant), wishes.stops, streams=wishes.streams),
            sampling=replace(wishes.sampling, seed=wishes.sampling.seed + index),
            asked=asked,
        )

    def _asked(self, variant: str | None) -> Resident | None:
        return None if variant is None else self.resident(variant)

    def _layout(self, asked: Resident | None) -> Layout:
        return self._model.base.layout if asked is None else asked.variant.layout

    def _vocabulary(self, asked: Resident | None) -> int:
        """Tokens that may come out."""
        return self._model.vocabulary if asked is None else asked.variant.vocabulary(self._model.head_path)

    def _check(self, index: int, asked: Resident | None, ids: list[int], *, room: int = 0) -> None:
        who = "the base" if asked is None else f"variant {asked.name}"
        if not ids:
            raise InputError(f"request {index} has no tokens; give at least one")
        known = self._model.vocabulary
        if asked is not None:
            known = asked.variant.vocabulary(self._model.embedding_path)
        if odd := [token for token in ids if not 0 <= token < known]:
            raise InputError(f"request {index}: token {odd[0]} is not in the vocabulary of {who} ({known} tokens)")
        context = self._layout(asked).context
        if context is not None and len(ids) + room > context:
            raise InputError(
                f"request {index} has {len(ids)} tokens, the context of {who} is {context}; shorten the prompt"
            )


def _listed(ids: Ids) -> list[int]:
    return [int(token) for token in (ids.flatten().tolist() if isinstance(ids, Tensor) else ids)]
