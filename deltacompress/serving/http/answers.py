"""What an answer looks like: objects of OpenAI's API from what happened to the calls of a request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltacompress._version import __version__
from deltacompress.serving.http.asked import Asked
from deltacompress.serving.messages import Began, Over, Score, Token

_LEAST = -9999.0
"""What OpenAI's API says of a token that cannot come: JSON has no infinity."""
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass(slots=True)
class Choice:
    """One answer as it comes. offset: characters of the tokens that were told, for `text_offset`."""

    texts: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    offset: int = 0


class Answers:
    """All answers of one request, whole or chunk by chunk; of one that is no stream, chunks are None."""

    def __init__(self, asked: Asked, request: str, prompt_tokens: Sequence[int], variant: str | None) -> None:
        """variant: that answers; of an entry of a zoo the version that its name meant. None: the base."""
        self._asked, self._model = asked, variant or asked.model
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{request}"
        self._created = int(time.time())
        self._prompt_tokens = sum(prompt_tokens[:: asked.n])
        self._choices = [Choice() for _ in range(len(asked.prompts) * asked.n)]

    def began(self, place: int, told: Began) -> dict[str, Any] | None:
        """The prompt was computed: what a stream begins with, if it does with anything."""
        choice = self._choices[place]
        if self._asked.chat:
            return self._chunk(place, {"role": "assistant", "content": ""})
        if not self._asked.echo:
            return None
        prompt = self._asked.prompts[place // self._asked.n]
        text = prompt if isinstance(prompt, str) else "".join(one.text for one in told.prompt)
        choice.texts.append(text)
        scores = told.prompt if self._asked.sampling.logprobs is not None else ()
        choice.scores += scores
        return self._chunk(place, text, scores)

    def token(self, place: int, told: Token) -> dict[str, Any] | None:
        """One more token: the chunk of a stream, if there is anything to tell."""
        if self._asked.max_tokens == 0:  # the engine gives one, and nobody asked for it
            return None
        choice = self._choices[place]
        choice.tokens += 1
        choice.texts.append(told.text)
        scores = () if told.score is None else (told.score,)
        choice.scores += scores
        if not told.text and not scores:
            return None
        return self._chunk(place, {"content": told.text} if self._asked.chat else told.text, scores)

    def over(self, place: int, told: Over) -> dict[str, Any] | None:
        """One answer is whole: the last chunk of it."""
        self._choices[place].finish = "length" if self._asked.max_tokens == 0 else _FINISH[told.finish]
        return self._chunk(place, {} if self._asked.chat else "")

    def usage_chunk(self) -> dict[str, Any]:
        """What a stream ends with, if its reader asked for the count of tokens."""
        return self._object([], chunk=True) | {"usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The answer of a request that is no stream."""
        return self._object([self._whole(i) for i in range(len(self._choices))], chunk=False) | {"usage": self._usage()}

    def _whole(self, place: int) -> dict[str, Any]:
        choice = self._choices[place]
        text = "".join(choice.texts)
        found = {"index": place, "finish_reason": choice.finish, "logprobs": self._logprobs(choice, choice.scores)}
        if self._asked.chat:
            return found | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return found | {"text": text}

    def _chunk(self, place: int, told: Any, scores: Sequence[Score] = ()) -> dict[str, Any] | None:
        if not self._asked.stream:
            return None
        choice = self._choices[place]
        name = "delta" if self._asked.chat else "text"
        logprobs = self._logprobs(choice, scores) if scores else None
        one = {"index": place, name: told, "finish_reason": choice.finish, "logprobs": logprobs}
        told_usage = {"usage": self._usage() if self._asked.running_usage else None} if self._asked.usage else {}
        return self._object([one], chunk=True) | told_usage

    def _object(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._asked.chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"deltacompress-{__version__}",
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        tokens = sum(one.tokens for one in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }

    def _logprobs(self, choice: Choice, scores: Sequence[Score]) -> dict[str, Any] | None:
        if self._asked.sampling.logprobs is None:
            return None
        if self._asked.chat:
            return {"content": [_of_chat(one) for one in scores], "refusal": None}
        offsets = []
        for one in scores:
            offsets.append(choice.offset)
            choice.offset += len(one.text)
        return {
            "tokens": [one.text for one in scores],
            "token_logprobs": [_finite(one.logprob) for one in scores],
            "top_logprobs": [_top(one) for one in scores] if self._asked.sampling.logprobs else None,
            "text_offset": offsets,
        }


def _top(score: Score) -> dict[str, float] | None:
    """The likeliest by text, and the one that was taken; None where there is nothing before the token."""
    if score.logprob is None:
        return None
    found = {one.text: _finite(one.logprob) or 0.0 for one in reversed((*score.top, score))}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _of_chat(score: Score) -> dict[str, Any]:
    return _plain(score) | {"top_logprobs": [_plain(one) for one in score.top]}


def _plain(score: Score) -> dict[str, Any]:
    return {"token": score.text, "logprob": _finite(score.logprob), "bytes": list(score.text.encode())}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
