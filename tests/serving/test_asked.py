"""What a body asks for, as the engine is told it: each field in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.serving.http import asked
from deltacompress.serving.settings import Limits

EVERYTHING: dict[str, Any] = {
    "model": "bot",
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 11,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "logit_bias": {"5": 1.5, "60": -100},
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 9,
    "n": 2,
    "stop": ["one", "two"],
    "latency": "batch",
    "stream": True,
    "stream_options": {"include_usage": True},
}
SAMPLING = Sampling(
    temperature=0.7,
    top_p=0.9,
    seed=11,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    logit_bias=((5, 1.5), (60, -100.0)),
    ignore_eos=True,
    min_tokens=2,
    logprobs=3,
)
MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


def test_a_completion_is_told_as_it_is_asked_for() -> None:
    found = asked.completion(EVERYTHING | {"prompt": ["a", [1, 2]], "logprobs": 3, "echo": True}, Limits())
    assert (found.stream, found.usage, found.echo, found.chat) == (True, True, True, False)
    sampling = replace(SAMPLING, prompt_logprobs=3)
    calls = [one.call() for one in found.submits("r", "bot", 5.0)]
    assert [(one.id, one.prompt, one.sampling.seed) for one in calls] == [
        ("r-0", "a", 11),
        ("r-1", "a", 12),
        ("r-2", (1, 2), 11),
        ("r-3", (1, 2), 12),
    ]
    for one in calls:
        assert replace(one.sampling, seed=11) == sampling
        assert one.latency == "batch"
        assert (one.variant, one.max_tokens, one.stop, one.bos, one.timeout_s) == ("bot", 9, ("one", "two"), None, 5.0)


def test_a_chat_is_told_as_it_is_asked_for() -> None:
    body = EVERYTHING | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    found = asked.chat(body, Limits())
    (call, _) = (one.call() for one in found.submits("r", None, 5.0))
    assert (call.prompt, call.sampling, call.variant, call.max_tokens) == (tuple(MESSAGES), SAMPLING, None, 9)
    assert call.latency == "batch"
    assert found.chat


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, (None, None)),
        ({"logprobs": 0}, (0, None)),
        ({"echo": True}, (None, None)),
        ({"echo": True, "logprobs": 0}, (0, 0)),
        ({"echo": True, "logprobs": 5}, (5, 5)),
        ({"echo": True, "prompt": [1, 2]}, (None, 0)),  # their texts are told with their scores
    ],
)
def test_what_of_likelihoods_is_asked_for(more: dict[str, Any], told: tuple[int | None, int | None]) -> None:
    sampling = asked.completion({"model": "bot", "prompt": "a"} | more, Limits()).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == told


def test_a_developer_is_the_system() -> None:
    messages = [MESSAGES[0] | {"role": "developer"}, MESSAGES[1]]
    (call,) = asked.chat({"model": "bot", "messages": messages}, Limits()).submits("r", None, 1)
    assert call.prompt == tuple(MESSAGES)


def test_the_prompt_alone_is_a_call_for_one_token() -> None:
    found = asked.completion({"model": "bot", "prompt": "a", "echo": True, "max_tokens": 0}, Limits())
    assert (found.max_tokens, [one.max_tokens for one in found.submits("r", None, 1)]) == (0, [1])
    for given, sent in ((1, 1), (2, 2)):
        other = asked.completion({"model": "bot", "prompt": "a", "max_tokens": given}, Limits())
        assert [one.max_tokens for one in other.submits("r", None, 1)] == [sent]


def test_defaults_are_openais() -> None:
    text = asked.completion({"model": "bot", "prompt": "a"}, Limits())
    talk = asked.chat({"model": "bot", "messages": MESSAGES}, Limits())
    assert (text.max_tokens, talk.max_tokens) == (16, None)
    for one in (text, talk):
        assert replace(one.sampling, seed=0) == Sampling(temperature=1.0)
        assert one.submits("r", None, 1)[0].call().latency == "interactive"
        assert (one.n, one.stop, one.stream, one.usage) == (1, (), False, False)
    assert text.sampling.seed != talk.sampling.seed
    chat = asked.chat({"model": "bot", "messages": MESSAGES, "logprobs": True}, Limits())
    assert chat.sampling.logprobs == 0
    least = asked.completion({"model": "bot", "prompt": "a", "seed": -(2**63)}, Limits())
    assert least.sampling.seed == 0
    last = asked.completion({"model": "bot", "prompt": "a", "seed": 2**63 - 1, "n": 2}, Limits())
    assert [one.sampling.seed for one in last.submits("r", None, 1)] == [2**63 - 1, 0]
