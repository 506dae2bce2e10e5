"""The thin adapter: what lm-eval takes for a language model, answering from a panel.

A subclass of TemplateLM and not of HFLM: HFLM's constructor calls tie_weights(), which undoes an untied head, and wants
to own the model. Requests of local tasks are encoded as the models are trained (encoding.py), all others as lm-eval
does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from deltacompress.evaluation.scoring.panel import Panel
from deltacompress.evaluation.tasks.encoding import Encoder

_DEFAULT_NEW_TOKENS = 256


class Answer(str):
    """A generated text that remembers its token ids, end of text included if it was written."""

    __slots__ = ("ids",)
    ids: tuple[int, ...]

    @classmethod
    def of(cls, text: str, ids: tuple[int, ...]) -> Answer:
        """A text and its ids."""
        made = cls(text)
        made.ids = ids
        return made


class PanelLM(TemplateLM):  # type: ignore[misc] # lm-eval ships no types
    """One subject of a panel. local: names of the tasks whose encoding is ours."""

    def __init__(self, panel: Panel, label: str, encoder: Encoder, *, local: Collection[str]) -> None:
        super().__init__()
        self._panel, self._label, self._encoder, self._local = panel, label, encoder, frozenset(local)
        self.tokenizer = encoder.tokenizer

    @property
    def eot_token_id(self) -> int:
        """End of text."""
        return self._encoder.eos

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self._encoder.max_length

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval names its caches after."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; a bos only where it is asked for."""
        ids = self._encoder.ids(string)
        return [*self._encoder.bos, *ids] if add_special_tokens else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Score every (context, continuation)."""
        pairs = []
        for request in requests:
            encode = self._encoder.pair if request.task_name in self._local else self._encoder.harness_pair
            context, continuation = encode(*request.args)
            pairs.append((tuple(context), tuple(continuation)))
        return list(self._panel.loglikelihood(self._label, pairs))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        return list(self._panel.loglikelihood(self._label, pairs))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts, in windows as long as the context."""
        totals = []
        for request in requests:
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self._encoder.ids(request.args[0]),
                    prefix_token=(self._encoder.bos or [self._encoder.eos])[0],
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                ),
            )
            found = self._loglikelihood_tokens([(None, *window) for window in windows])
            totals.append(sum(logprob for logprob, _ in found))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, cut at the first stop text."""
        prompts, stops = [], []
        for request in requests:
            context, options = request.args
            limit = int(options.get("max_gen_toks", _DEFAULT_NEW_TOKENS))
            if request.task_name in self._local:
                ids = self._encoder.context(context, room=limit)
            else:
                room = max(self.max_length - limit, 1)
                ids = ([*self._encoder.bos, *self._encoder.ids(context)] or [self._encoder.eos])[-room:]
            prompts.append((tuple(ids), limit))
            until = options.get("until") or []
            stops.append([until] if isinstance(until, str) else until)
        written = self._panel.generate(self._label, prompts)
        return [
            Answer.of(_cut(self._encoder.text(list(ids)), stop), ids) for ids, stop in zip(written, stops, strict=True)
        ]


def _cut(text: str, stops: list[str]) -> str:
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]
