"""Bodies of /v1/completions and /v1/chat/completions: what is asked for, checked field by field."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, get_args

from deltacompress.runtime.engine.generation_config import Latency, Sampling
from deltacompress.serving.http.errors import ApiError, wrong
from deltacompress.serving.http.fields import Fields
from deltacompress.serving.messages import Submit
from deltacompress.serving.settings import Limits

Prompt = str | tuple[int, ...] | tuple[dict[str, str], ...]

_MOST_TOKENS = 2**31 - 1
_SEEDS = 2**63
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""What chat templates are told of each: they know no developer, which is a later name of the system."""
_ROLES_OF_TOOLS = ("tool", "function")
_LEAST_TOKENS = 1
"""What the engine is asked for where nothing but the prompt is wanted: the prompt's own forward brings it."""
_DEFAULT_TOKENS = 16
"""What OpenAI's completions take where max_tokens is not given; a chat goes on as far as the context does."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    chat: a conversation, not a text; usage: streams end with the count of tokens, running_usage: and each chunk has
    that so far; echo: the answer begins with the prompt; latency: its class; the seed of `sampling` is that of the
    first answer, the next one's is one more.
    """

    model: str
    chat: bool
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    running_usage: bool
    echo: bool
    latency: Latency

    @property
    def calls(self) -> int:
        """How many it takes."""
        return len(self.prompts) * self.n

    def submits(self, request: str, variant: str | None, timeout_s: float) -> list[Submit]:
        """A call for each answer; variant: None for the base."""
        return [
            Submit(
                f"{request}-{place * self.n + i}",
                variant,
                prompt,
                max(self.max_tokens, _LEAST_TOKENS) if self.max_tokens is not None else None,
                replace(self.sampling, seed=(self.sampling.seed + i) % _SEEDS),
                self.stop,
                timeout_s,
                self.latency,
            )
            for place, prompt in enumerate(self.prompts)
            for i in range(self.n)
        ]


def completion(body: dict[str, Any], limits: Limits) -> Asked:
    """What /v1/completions is asked for.

    Raises:
        ApiError: 400 with the field that cannot be served.
    """
    fields = Fields(body)
    model = _model(fields)
    prompts = _prompts(fields, limits)
    n = fields.whole("n", 1, limits.n) or 1
    fields.must_be("best_of", lambda value: value == n and not isinstance(value, bool), "the value of n")
    fields.must_be("suffix", lambda value: value == "", "an empty one")
    echo = fields.flag("echo")
    top = fields.whole("logprobs", 0, limits.logprobs)
    given = fields.whole("max_tokens", 0, _MOST_TOKENS)
    max_tokens = _DEFAULT_TOKENS if given is None else given
    if not (max_tokens or echo):
        raise wrong("max_tokens", "max_tokens 0 needs echo: true; else there is nothing to tell")
    needs_ids = echo and any(not isinstance(one, str) for one in prompts)
    told = top if echo and top is not None else 0 if needs_ids else None
    sampling = replace(_sampling(fields, max_tokens), logprobs=top, prompt_logprobs=told)
    return _finish(fields, limits, model, prompts, n, max_tokens, sampling, chat=False, echo=echo)


def chat(body: dict[str, Any], limits: Limits) -> Asked:
    """What /v1/chat/completions is asked for.

    Raises:
        ApiError: 400 with the field that cannot be served.
    """
    fields = Fields(body)
    model = _model(fields)
    messages = _messages(fields)
    n = fields.whole("n", 1, limits.n) or 1
    old, new = (fields.whole(name, 1, _MOST_TOKENS) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise wrong("max_tokens", "max_tokens and max_completion_tokens contradict each other; give one")
    max_tokens = old if new is None else new
    top = fields.whole("top_logprobs", 0, limits.logprobs)
    wants = fields.flag("logprobs")
    if top is not None and not wants:
        raise wrong("top_logprobs", "top_logprobs needs logprobs: true")
    sampling = replace(_sampling(fields, max_tokens), logprobs=(top or 0) if wants else None)
    for name in ("tools", "functions"):
        fields.must_be(name, lambda value: value == [], "an empty list")
    for name in ("tool_choice", "function_call"):
        fields.must_be(name, lambda value: value == "none", '"none"')
    fields.must_be("parallel_tool_calls", lambda value: isinstance(value, bool), "true or false")
    fields.must_be("modalities", lambda value: value == ["text"], '["text"]')
    return _finish(fields, limits, model, (messages,), n, max_tokens, sampling, chat=True, echo=False)


def _finish(
    fields: Fields,
    limits: Limits,
    model: str,
    prompts: tuple[Prompt, ...],
    n: int,
    max_tokens: int | None,
    sampling: Sampling,
    *,
    chat: bool,
    echo: bool,
) -> Asked:
    """What both have in common, and nothing besides."""
    stop = fields.texts("stop", limits.stops)
    stream = fields.flag("stream")
    usage = running_usage = False
    if (options := fields.part("stream_options")) is not None:
        if not stream:
            raise wrong("stream_options", "stream_options needs stream: true")
        usage, running_usage = options.flag("include_usage"), options.flag("continuous_usage_stats")
        if running_usage and not usage:
            raise wrong("stream_options", "stream_options: continuous_usage_stats needs include_usage: true")
        options.must_be("include_obfuscation", lambda value: value is False, "false")
        options.done()
    latency: Latency = fields.take("latency") or "interactive"
    if latency not in get_args(Latency):
        raise wrong("latency", f"latency must be one of {', '.join(get_args(Latency))}")
    fields.text("user")
    fields.must_be("response_format", lambda value: value == {"type": "text"}, '{"type": "text"}')
    fields.must_be("store", lambda value: value is False, "false")
    fields.must_be("service_tier", lambda value: value in ("auto", "default"), '"auto" and "default"')
    fields.done()
    return Asked(model, chat, prompts, n, max_tokens, sampling, stop, stream, usage, running_usage, echo, latency)


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if not model:
        raise wrong("model", "model: name one of /v1/models", "missing_required_parameter")
    return model


def _sampling(fields: Fields, max_tokens: int | None) -> Sampling:
    seed = fields.whole("seed", -_SEEDS, _SEEDS - 1)
    min_tokens = fields.whole("min_tokens", 0, _MOST_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise wrong("min_tokens", f"min_tokens {min_tokens} is more than max_tokens {max_tokens}")
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        seed=secrets.randbelow(_SEEDS) if seed is None else seed % _SEEDS,
        top_k=fields.whole("top_k", 0, _MOST_TOKENS) or 0,
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 10, above=True),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_bias(fields),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=min_tokens,
    )


def _bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    part = fields.take("logit_bias")
    if part is None:
        return ()
    if not isinstance(part, dict):
        raise wrong("logit_bias", "logit_bias must be an object of token ids and numbers", "invalid_type")
    if len(part) > 1024:
        raise wrong("logit_bias", "logit_bias: at most 1024 tokens")
    found: list[tuple[int, float]] = []
    for token in part:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise wrong("logit_bias", f"logit_bias: {token!r:.40} is no token id")
        if any(known == int(token) for known, _ in found):
            raise wrong("logit_bias", f"logit_bias: token {int(token)} is there twice")
        inner = Fields(part, "logit_bias.")
        found.append((int(token), inner.number(token, 0.0, -100, 100)))
    return tuple(found)


def _prompts(fields: Fields, limits: Limits) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    given = fields.take("prompt")
    if given is None:
        raise wrong("prompt", "prompt: give a text, token ids, or a list of either", "missing_required_parameter")
    found = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not found or len(found) > limits.prompts:
        raise wrong("prompt", f"prompt: give 1 to {limits.prompts} of them")
    return tuple(_prompt(one) for one in found)


def _prompt(given: Any) -> Prompt:
    if isinstance(given, str):
        return given
    if not _is_ids(given):
        raise wrong("prompt", "prompt must be a text, token ids, or a list of either", "invalid_type")
    for token in given:
        if not 0 <= token <= _MOST_TOKENS:
            raise wrong("prompt", f"prompt: {str(token)[:40]} is no token id")
    return tuple(given)


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)


def _messages(fields: Fields) -> tuple[dict[str, str], ...]:
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "messages must be a list with at least one message", "missing_required_parameter")
    return tuple(_message(one, f"messages[{place}]") for place, one in enumerate(given))


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise wrong(where, f"{where} must be an object", "invalid_type")
    fields = Fields(given, f"{where}.")
    role = fields.text("role")
    if role in _ROLES_OF_TOOLS:
        told = f"{where}.role: tools are not served, and so no message is of the role {role}"
        raise wrong(f"{where}.role", told, "unsupported_value")
    if role is None or role not in _ROLES:
        raise wrong(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    content = fields.take("content")
    if isinstance(content, list):
        content = "\n".join(_text_part(one, f"{where}.content[{place}]") for place, one in enumerate(content))
    if not isinstance(content, str):
        raise wrong(f"{where}.content", f"{where}.content must be a text, or a list of parts of text", "invalid_type")
    fields.must_be("tool_calls", lambda value: value == [], "an empty list")
    fields.done()
    return {"role": _ROLES[role], "content": content}


def _text_part(given: Any, where: str) -> str:
    if isinstance(given, dict) and given.get("type") == "text" and isinstance(given.get("text"), str):
        text: str = given["text"]
        if len(given) == 2:
            return text
    raise ApiError(
        400, f"{where}: only parts {{type: text, text}} are served", param=where, code="unsupported_parameter"
    )
