"""From what users hand in to checked requests: every way in which one can be wrong is one clear line here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index as as_int
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from deltacompress.errors import InputError, PromptTooLongError, option
from deltacompress.models.generation import token_ids
from deltacompress.runtime.cache.loaded_variant import LoadedVariant
from deltacompress.runtime.engine.forwards import Item
from deltacompress.runtime.engine.generation_config import GenerationConfig, check_text
from deltacompress.runtime.engine.live.call import Call, Message
from deltacompress.runtime.engine.requests import LimitReason, Request
from deltacompress.runtime.engine.text import TextStream
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
    if not isinstance(requests, Sequence):
        raise InputError(f"{requests!r:.60} is no list of requests", way_out=f"give tuples of {fields}")
    for index, one in enumerate(requests):
        if not isinstance(one, tuple | list) or len(one) != fields or not isinstance(one[0], str | None):
            wanted = "(variant, prompt or ids)" if fields == 2 else "(variant, context ids, continuation ids)"
            raise InputError(f"{one!r:.60} is not {wanted}", where=f"request {index}", way_out="give a list of those")
    for index, one in enumerate(requests):
        yield index, "the request" if len(requests) == 1 else f"request {index}", one


class InputProcessor:
    """Knows the model and the variants that requests name. `label`: how messages call a request."""

    def __init__(self, model: DecoupledModel, variants: Mapping[str, LoadedVariant], tokenizers: Tokenizers) -> None:
        self._model, self._variants, self._tokenizers = model, variants, tokenizers
        self._ends: WeakKeyDictionary[LoadedVariant | DecoupledModel, frozenset[int]] = WeakKeyDictionary()

    def find(self, name: str) -> LoadedVariant:
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
        return [self._item(index, label, *one) for index, label, one in _numbered(requests, 2)]

    def scored(self, requests: Sequence[tuple[str | None, Ids, Ids]]) -> Iterator[tuple[Item, list[int]]]:
        """Sequences whose continuations are to be scored, and these; raises as `Runtime.loglikelihood`."""
        for index, label, (variant, context, continuation) in _numbered(requests, 3):
            before, after = _listed(label, context), _listed(label, continuation)
            if not before or not after:
                raise InputError("context and continuation need at least one token each", where=label)
            ids, loaded = before + after, self._loaded(variant)
            self._check(label, loaded, ids)
            item = Item(index, loaded, self._vocabulary(loaded), ids[:-1], len(before) - 1, len(ids) - 1)
            yield item, after

    def requests(self, requests: Sequence[tuple[str | None, str | Ids]], generation: GenerationConfig) -> list[Request]:
        """Requests for the scheduler; raises as `Runtime.generate`."""
        return [self.request(index, label, *one, generation) for index, label, one in _numbered(requests, 2)]

    def call(self, call: Call) -> Request:
        """A request for a long-lived engine, its `index` still to be given; raises as `Engine.submit`."""
        label, prompt = "the request", call.prompt
        generation = GenerationConfig.checked(call.max_tokens, call.stop, call.sampling, call.bos, streams=True)
        self._loaded(call.variant)
        if call.timeout_s is not None and not call.timeout_s > 0:
            raise InputError("give seconds, more than 0", where=f"{option('timeout_s')} {call.timeout_s}")
        given: str | Ids = prompt if isinstance(prompt, str) else self._ids(label, call.variant, prompt)
        request = self.request(0, label, call.variant, given, generation)
        request.latency = call.latency
        if not self._tokenizers.has(call.variant):  # token ids are all that goes in, and that comes out
            request.text = TextStream(lambda _: "", (), streams=False)
        return request

    def _ids(self, label: str, variant: str | None, prompt: Sequence[int | Message]) -> list[int]:
        """Token ids as they are, or of a conversation."""
        messages = [dict(one) for one in prompt if isinstance(one, Mapping)]
        if not messages:
            return [int(one) for one in prompt if not isinstance(one, Mapping)]
        if len(messages) < len(prompt):
            raise InputError("its prompt has messages and token ids in one", where=label, way_out="give either")
        ids = self._tokenizers.chat(variant, messages, self._layout(self._loaded(variant)).context)
        if ids is None:
            who = "the base" if variant is None else f"variant {variant}"
            raise InputError(f"{who} has no chat template", where=label, way_out="give a prompt")
        return ids

    def _item(self, index: int, label: str, variant: str | None, ids: Ids) -> Item:
        listed, loaded = _listed(label, ids), self._loaded(variant)
        self._check(label, loaded, listed)
        return Item(index, loaded, self._vocabulary(loaded), listed, 0, len(listed))

    def request(
        self, index: int, label: str, variant: str | None, prompt: str | Ids, generation: GenerationConfig
    ) -> Request:
        """One request for the scheduler; raises as `Runtime.generate`."""
        loaded = self._loaded(variant)
        layout = self._layout(loaded)
        if isinstance(prompt, str):
            check_text(f"{label}: the prompt", prompt)
            ids = self._tokenizers.encode(variant, prompt, bos=generation.bos, context=layout.context)
            if not ids:
                raise InputError("the prompt is empty", where=label, way_out="give some text, or the bos token")
        else:
            ids = _listed(label, prompt)
        self._check(label, loaded, ids, room=1)
        room, reason = self._room(label, len(ids), generation.max_new_tokens, layout.context)
        vocabulary = self._vocabulary(loaded)
        for token, _ in generation.sampling.logit_bias:
            if not 0 <= token < vocabulary:
                told = f"token {token} is not in the vocabulary ({vocabulary} tokens)"
                raise InputError(told, where=f"{label}: logit_bias")
        return Request(
            index,
            variant,
            ids,
            vocabulary=vocabulary,
            limit=room,
            limit_reason=reason,
            eos=self._end_tokens(loaded),
            text=TextStream(self._tokenizers.decoder(variant), generation.stops, streams=generation.streams),
            sampling=replace(generation.sampling, seed=generation.sampling.seed + index),
            loaded=loaded,
        )

    @staticmethod
    def _room(label: str, tokens: int, wanted: int | None, context: int | None) -> tuple[int, LimitReason]:
        """New tokens at most, and what limits them."""
        left = None if context is None else context - tokens
        if wanted is not None and (left is None or wanted <= left):
            return wanted, "length"
        if left is None:
            raise InputError(
                f"{label} says not how many tokens it wants, and the model's context has no end",
                way_out="give max_tokens",
            )
        return left, "context"

    def _loaded(self, variant: str | None) -> LoadedVariant | None:
        return None if variant is None else self.find(variant)

    def _layout(self, loaded: LoadedVariant | None) -> Layout:
        return self._model.base.layout if loaded is None else loaded.variant.layout

    def _end_tokens(self, loaded: LoadedVariant | None) -> frozenset[int]:
        """Tokens at which a text ends; their file is read once for each load of a variant."""
        key = self._model if loaded is None else loaded
        if (known := self._ends.get(key)) is None:
            directory = self._model.base.checkpoint.path if loaded is None else loaded.variant.generation_folder
            config: Any = self._layout(loaded).config
            known = self._ends[key] = frozenset(token_ids(directory, config, "eos_token_id"))
        return known

    def _vocabulary(self, loaded: LoadedVariant | None) -> int:
        """Tokens that may come out."""
        return self._model.vocabulary if loaded is None else loaded.variant.vocabulary(self._model.head_path)

    def _check(self, label: str, loaded: LoadedVariant | None, ids: list[int], *, room: int = 0) -> None:
        who = "the base" if loaded is None else f"variant {loaded.name}"
        if not ids:
            raise InputError(f"{label} to {who} has no tokens", way_out="give at least one")
        known = self._model.vocabulary
        if loaded is not None:
            known = loaded.variant.vocabulary(self._model.embedding_path)
        if odd := [token for token in ids if not 0 <= token < known]:
            raise InputError(f"token {odd[0]} is not in the vocabulary of {who} ({known} tokens)", where=label)
        context = self._layout(loaded).context
        if context is not None and len(ids) + room > context:
            raise PromptTooLongError(
                f"{label} has {len(ids)} tokens, the context of {who} is {context}", way_out="shorten the prompt"
            )


def _listed(label: str, ids: Ids) -> list[int]:
    try:
        return [as_int(token) for token in (ids.flatten().tolist() if isinstance(ids, Tensor) else ids)]
    except TypeError as error:
        told = f"{ids!r:.60} is neither text nor token ids"
        raise InputError(told, where=label, way_out="give a string, or a list of whole numbers") from error
