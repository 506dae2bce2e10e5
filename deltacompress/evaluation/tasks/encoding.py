"""From texts to token ids, for all tasks and models alike: what is compared must be asked the same way.

Local tasks are encoded as the models are trained and calibrated: bos + prompt + completion + eos, prompt and completion
tokenized apart (no token spans the seam), and cut to the context from the left of the prompt. Suites of lm-eval are
encoded as lm-eval does it: one tokenization of both, split after the context, no eos.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltacompress.errors import CheckpointError, InputError, PairError
from deltacompress.models.tokenizers import failing_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SANE_LENGTH = 10**9
_PROBES = (
    "The quick brown fox, 3.14 * 42 = ?\n\tdef f(x): return x",
    " SELECT a FROM table WHERE b = 'c'",
    "Ünïcödé — 你好, 🙂",
)


class Encoder:
    """A tokenizer and the longest row that a model takes. positions: of the model alone, by its config, if that says.

    Raises:
        InputError: the tokenizer has no end-of-text token, or the row has no room.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, positions: int | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer names no end-of-text token", way_out="set eos_token in tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.max_length, self.positions = max_length, positions
        self.eos: int = tokenizer.eos_token_id
        self.bos: list[int] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any]) -> Encoder:
        """The tokenizer beside a checkpoint or in an artifact, and the context of its model's config."""
        tokenizer = load_tokenizer(directory)
        positions = config.get("max_position_embeddings")
        known = [n for n in (tokenizer.model_max_length, positions) if isinstance(n, int) and 1 < n < _SANE_LENGTH]
        own = positions if isinstance(positions, int) else None
        return cls(tokenizer, max_length=min(known, default=2048), positions=own)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, no special tokens added."""
        with failing_tokenizer(self.tokenizer):
            return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """(bos + prompt, completion + eos), the prompt cut from the left to fit.

        Raises:
            InputError: the completion alone is longer than the context.
        """
        answer = [*self.ids(completion), self.eos]
        return self.context(prompt, room=len(answer)), answer

    def context(self, prompt: str, *, room: int) -> list[int]:
        """bos + prompt, cut from the left so that `room` tokens still fit behind it.

        Raises:
            InputError: they do not fit even without a prompt.
        """
        left = self.max_length - len(self.bos) - room
        if left < 0 or (left == 0 and not self.bos):
            raise self._too_long(room)
        ids = self.ids(prompt)
        ids = [*self.bos, *ids[max(0, len(ids) - left) :]]
        return ids or [self.eos]  # nothing to condition on, and no bos: an end of text stands before every text

    def harness_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Context and continuation as lm-eval encodes them; white space at the seam belongs to the continuation.

        Raises:
            InputError: the continuation fills the context alone.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return self.bos or [self.eos], self.ids(continuation)
        before = [*self.bos, *self.ids(context)]
        whole = [*self.bos, *self.ids(context + continuation)]
        answer = whole[len(before) :] or whole[-1:]
        kept = whole[: len(whole) - len(answer)]
        if len(answer) >= self.max_length:
            raise self._too_long(len(answer))
        return kept[max(0, len(kept) + len(answer) - self.max_length) :], answer

    def _too_long(self, room: int) -> InputError:
        return InputError(
            f"an answer of {room} tokens does not fit the model's context of {self.max_length}: shorten it"
        )

    def text(self, ids: list[int]) -> str:
        """The text of generated ids, without special tokens."""
        with failing_tokenizer(self.tokenizer):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check_same_tokenizer(own: Path, own_encoder: Encoder, other: Path) -> None:
    """Make sure that the tokenizer in `other` writes the ids that `own` writes; a larger vocabulary is fine.

    Raises:
        PairError: it does not: two models cannot be compared on tokens that mean different things.
    """
    try:
        tokenizer = load_tokenizer(other)
    except CheckpointError as error:
        raise error.retold(PairError, also="evaluating needs the tokenizer of every model, to compare them") from error
    mine, theirs = own_encoder.tokenizer.get_vocab(), tokenizer.get_vocab()
    shared = mine.keys() & theirs.keys()
    odd = sorted(token for token in shared if mine[token] != theirs[token])
    lost = sorted(theirs.keys() - mine.keys()) if len(theirs) <= len(mine) else sorted(mine.keys() - theirs.keys())
    if odd or lost:
        token = (odd or lost)[0]
        raise PairError(
            f"its tokenizer is not that of {own}: token {token!r} is id {theirs.get(token)} here and "
            f"{mine.get(token)} there; models are compared on the same tokens only",
            where=other,
        )
    for text in _PROBES:
        if own_encoder.ids(text) != list(tokenizer.encode(text, add_special_tokens=False)):
            raise PairError(
                f"its tokenizer splits {text[:20]!r} unlike that of {own}",
                where=other,
                way_out="give the model's own one",
            )
    if (tokenizer.bos_token_id, tokenizer.eos_token_id) != (own_encoder.tokenizer.bos_token_id, own_encoder.eos):
        raise PairError(
            f"its tokenizer begins or ends a text unlike that of {own}", where=other, way_out="give the model's own one"
        )
