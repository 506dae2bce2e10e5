"""The tokenizers of the base and of every variant: a variant that added tokens has its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from deltacompress.errors import CheckpointError, InputError
from deltacompress.models.chat.rendering import render
from deltacompress.models.tokenizers import failing_tokenizer, has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST, _MORE = 8, 4
"""Characters for each token of the context that are encoded of a longer text first, and how many times as many then."""
_CUT = 1024
"""Tokens, at most, that the beginning of a text has beyond those of the text: it may end within a word."""


class Tokenizers:
    """Opened at first use; a variant without tokenizer files uses the base's.

    Any thread may ask. A tokenizer changes its settings when it encodes for the first time, so it does that when it is
    opened: later on nothing in it changes, and nobody waits for others.
    """

    def __init__(self, base: Path) -> None:
        self._lock = RLock()
        self._folders: dict[str | None, Path] = {None: base}
        self._opened: dict[Path, PreTrainedTokenizerBase] = {}
        self._pieces: dict[tuple[Path, int], str] = {}

    def add(self, name: str, artifact: Path) -> None:
        """Know a variant."""
        self._folders[name] = artifact if has_tokenizer(artifact) else self._folders[None]

    def remove(self, name: str) -> None:
        """Forget a variant."""
        folder = self._folders.pop(name, None)
        if folder is not None and folder not in self._folders.values():
            self._opened.pop(folder, None)
            self._pieces = {key: text for key, text in self._pieces.items() if key[0] != folder}

    def encode(self, variant: str | None, text: str, *, bos: bool | None, context: int | None = None) -> list[int]:
        """Token ids of a prompt.

        bos: put the bos token first unless it is there; leave it out; None: as the tokenizer does. context: of a text
        that is far longer than so many tokens no more is encoded than tells that.

        Raises:
            InputError: there is no tokenizer, or no bos token to put; a text that is far too long.
        """
        tokenizer = self._get(variant)
        with failing_tokenizer(tokenizer):
            ids = _encoded(tokenizer, text, context, special=bos is not False)
        if bos:
            if tokenizer.bos_token_id is None:
                raise InputError(
                    "the tokenizer has no bos token to put before the prompt", where=self._folders[variant]
                )
            if ids[:1] != [tokenizer.bos_token_id]:
                ids = [tokenizer.bos_token_id, *ids]
        return ids

    def chat(self, variant: str | None, messages: list[dict[str, str]], context: int | None = None) -> list[int] | None:
        """Token ids of a conversation that the model is to go on with; None if the tokenizer has no chat template.

        context: as `encode` takes it.

        Raises:
            InputError: what the template writes is far too long.
            CheckpointError: the template fails, or takes more time or memory than it may.
            TemplateBusyError: those of other conversations compute, and did for long.
        """
        tokenizer = self._get(variant)
        if tokenizer.chat_template is None:
            return None
        with failing_tokenizer(tokenizer):
            text = render(tokenizer, messages, goes_on=True)
            return _encoded(tokenizer, text, context, special=False)

    def decoder(self, variant: str | None) -> Callable[[list[int]], str]:
        """Tokens -> text without special tokens; looked up when the first text is wanted."""

        def decode(tokens: list[int]) -> str:
            tokenizer = self._get(variant, instead="ask for logits, which need none")
            with failing_tokenizer(tokenizer):
                # nothing is tidied up: pieces of a text would not add up to it
                text: Any = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return str(text)

        return decode

    def piece(self, variant: str | None, token: int) -> str:
        """A token as text by itself, special ones too; "" where there is no tokenizer."""
        key = self._folders[variant], token
        if key not in self._pieces:
            known = self.has(variant)
            self._pieces[key] = str(self._get(variant).decode([token])) if known else ""
        return self._pieces[key]

    def has(self, variant: str | None) -> bool:
        """Whether there is one."""
        return has_tokenizer(self._folders[variant])

    def _get(self, variant: str | None, *, instead: str = "give token ids instead of text") -> PreTrainedTokenizerBase:
        folder = self._folders.get(variant)
        if folder is None:
            raise InputError(f"variant {variant} was unloaded meanwhile", way_out="load it and ask again")
        with self._lock:
            if folder not in self._opened:
                try:
                    tokenizer = load_tokenizer(folder)
                    with failing_tokenizer(tokenizer):
                        tokenizer.encode("a")
                    self._opened[folder] = tokenizer
                except CheckpointError as error:
                    way_out = instead if error.way_out is None else f"{error.way_out}, or {instead}"
                    raise error.retold(InputError, way_out=way_out) from error
            return self._opened[folder]


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, context: int | None, *, special: bool) -> list[int]:
    """A text's token ids; raises InputError where its beginning alone is too long for the context."""
    characters = _FIRST * (context or len(text))
    while context is not None and characters < len(text):
        if len(tokenizer.encode(text[:characters], add_special_tokens=False)) > context + _CUT:
            raise InputError(
                f"the first {characters} of {len(text)} characters are more tokens than the context of {context} takes",
                way_out="shorten the prompt",
            )
        characters *= _MORE
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids
