"""From what users hand in to checked requests: every way in which one can be wrong is one clear line here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.models.generation import token_ids
from deltacompress.runtime.batch import BASE
from deltacompress.runtime.cache.loaded_variant import LoadedVariant
from deltacompress.runtime.engine.forwards import Item
from deltacompress.runtime.engine.generation_config import GenerationConfig, check_text
from deltacompress.runtime.engine.requests import Request, TextStream
from deltacompress.runtime.engine.tokenizers import Tokenizers
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.variants.layout import Layout

T = TypeVar("T")
Ids = Sequence[int] | Tensor
"""Token ids."""


def _numbered(requests: Sequence[T], fields: int) -> Iterator[tuple[int, str, T]]:
    """(index, how messages call it, request): by its number, if there are others.

    Each must be a tuple of so many fields, the variant's name (or None) first.

    Raises:
        InputError: one is not; a lone string, say.
    """
    for index, one in enumerate(requests):
        if not isinstance(one, tuple | list) or len(one) != fields:
            wanted = "(variant, prompt or ids)" if fields == 2 else "(variant, context ids, continuation ids)"
            raise InputError(f"{one!r:.60} is not {wanted}", where=f"request {index}", way_out="give a list of those")
    for index, one in enumerate(requests):
        yield index, "the request" if len(requests) == 1 else f"request {index}", one


class InputProcessor:
    """Knows the model and the variants that requests name. `told`: how messages call a request."""

    def __init__(self, model: DecoupledModel, variants: Mapping[str, LoadedVariant], tokenizers: Tokenizers) -> None:
        self._model, self._variants, self._tokenizers = model, variants, tokenizers

    def loaded(self, name: str) -> LoadedVariant:
        """The loaded variant of this name.

        Raises:
            InputError: there is none.
        """
        if name not in self._variants:
            known = ", ".join(sorted(self._variants)) or "none"
            raise InputError(f"no variant named {name} is loaded (loaded: {known})", way_out="load it first")
        return self._variants[name]

    def items(self, requests: Sequence[tuple[str | None, Ids]]) -> list[Item]:
        """Sequences all of whose logits are wanted; raises as `Runtime.logits`."""
        return [self._item(index, told, *one) for index, told, one in _numbered(requests, 2)]

    def scored(self, requests: Sequence[tuple[str | None, Ids, Ids]]) -> Iterator[tuple[Item, list[int]]]:
        """Sequences whose continuations are to be scored, and these; raises as `Runtime.loglikelihood`."""
        for index, told, (variant, context, continuation) in _numbered(requests, 3):
            before, after = _listed(context), _listed(continuation)
            if not before or not after:
                raise InputError("context and continuation need at least one token each", where=told)
            ids, asked = before + after, self._asked(variant)
            self._check(told, asked, ids)
            item = Item(index, asked, self._vocabulary(asked), ids[:-1], len(before) - 1, len(ids) - 1)
            yield item, after

    def requests(self, requests: Sequence[tuple[str | None, str | Ids]], generation: GenerationConfig) -> list[Request]:
        """Requests for the scheduler; raises as `Runtime.generate`."""
        return [self._request(index, told, *one, generation) for index, told, one in _numbered(requests, 2)]

    def _item(self, index: int, told: str, variant: str | None, ids: Ids) -> Item:
        listed, asked = _listed(ids), self._asked(variant)
        self._check(told, asked, listed)
        return Item(index, asked, self._vocabulary(asked), listed, 0, len(listed))

    def _request(
        self, index: int, told: str, variant: str | None, prompt: str | Ids, generation: GenerationConfig
    ) -> Request:
        asked = self._asked(variant)
        is_text = isinstance(prompt, str)
        if isinstance(prompt, str):
            check_text(f"{told}: the prompt", prompt)
        ids = (
            self._tokenizers.encode(variant, prompt, bos=generation.bos) if isinstance(prompt, str) else _listed(prompt)
        )
        if is_text and not ids:
            raise InputError(
                "the prompt is empty", where=told, way_out="give some text, or ask for the bos token before it"
            )
        self._check(told, asked, ids, room=1)
        layout = self._layout(asked)
        wanted, context = generation.max_new_tokens, layout.context
        room = wanted if context is None else min(wanted, context - len(ids))
        directory = self._model.base.checkpoint.path if asked is None else asked.variant.folder
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
            text=TextStream(self._tokenizers.decoder(variant), generation.stops, streams=generation.streams),
            sampling=replace(generation.sampling, seed=generation.sampling.seed + index),
            asked=asked,
        )

    def _asked(self, variant: str | None) -> LoadedVariant | None:
        return None if variant is None else self.loaded(variant)

    def _layout(self, asked: LoadedVariant | None) -> Layout:
        return self._model.base.layout if asked is None else asked.variant.layout

    def _vocabulary(self, asked: LoadedVariant | None) -> int:
        """Tokens that may come out."""
        return self._model.vocabulary if asked is None else asked.variant.vocabulary(self._model.head_path)

    def _check(self, told: str, asked: LoadedVariant | None, ids: list[int], *, room: int = 0) -> None:
        who = "the base" if asked is None else f"variant {asked.name}"
        if not ids:
            raise InputError(f"{told} to {who} has no tokens", way_out="give at least one")
        known = self._model.vocabulary
        if asked is not None:
            known = asked.variant.vocabulary(self._model.embedding_path)
        if odd := [token for token in ids if not 0 <= token < known]:
            raise InputError(f"token {odd[0]} is not in the vocabulary of {who} ({known} tokens)", where=told)
        context = self._layout(asked).context
        if context is not None and len(ids) + room > context:
            raise InputError(
                f"{told} has {len(ids)} tokens, the context of {who} is {context}", way_out="shorten the prompt"
            )


def _listed(ids: Ids) -> list[int]:
    return [int(token) for token in (ids.flatten().tolist() if isinstance(ids, Tensor) else ids)]
