"""The real `openai` client against the server: answers, streams, and the exception that each error becomes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving.harness import API_KEY, Live

HELLO: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
ECHOED = "<system>be brief<user>hi"


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_models(client: OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny", "bot", "sql"]
    assert client.models.retrieve("sql").id == "sql"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


@pytest.mark.parametrize("model", ["tiny", "bot"])
def test_a_completion(client: OpenAI, model: str) -> None:
    done = client.completions.create(model=model, prompt="hello ", max_tokens=9)
    assert done.choices[0].text == "hello hel"
    assert done.choices[0].finish_reason == "length"
    assert done.model == model
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (6, 9, 15)


def test_a_chat(client: OpenAI) -> None:
    done = client.chat.completions.create(model="bot", messages=HELLO, max_completion_tokens=24)
    assert done.choices[0].message.content == ECHOED
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ECHOED)


def test_a_stream_adds_up_to_the_answer(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == (ECHOED * 2)[:30]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [one.choices[0].finish_reason for one in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(ECHOED), 30)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_that_counts_as_it_goes(live: Live, is_chat: bool) -> None:
    """As vLLM has it, and load generators ask for it."""
    asked = {"messages": HELLO} if is_chat else {"prompt": "abc"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    route = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = {"model": "bot", "max_tokens": 7, "n": 2, "stream": True, "stream_options": options, **asked}
    answer = live.post(route, **body)
    *chunks, last = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    prompt = len(ECHOED) if is_chat else 3
    told = [one["usage"] for one in chunks]
    assert {one["prompt_tokens"] for one in told} == {prompt}
    counts = [one["completion_tokens"] for one in told]
    texts = [bool(one["choices"][0].get("text") or one["choices"][0].get("delta", {}).get("content")) for one in chunks]
    assert counts == list(accumulate(map(int, texts)))
    assert counts[-1] == last["usage"]["completion_tokens"] == 14
    assert all(one["total_tokens"] == prompt + one["completion_tokens"] for one in told)


def test_a_streamed_completion(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="bot", prompt="abc", max_tokens=7, stream=True))
    assert "".join(one.choices[0].text for one in chunks) == "abcabca"
    assert all(one.usage is None for one in chunks)


def test_many_at_once_get_their_own_text(live: Live) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:

            async def one(i: int) -> str:
                if i % 2:
                    done = await client.completions.create(model="bot", prompt=f"<{i}>", max_tokens=50)
                    return done.choices[0].text
                stream = await client.completions.create(model="sql", prompt=f"<{i}>", max_tokens=50, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(60)))

    assert asyncio.run(ask()) == [(f"<{i}>" * 50)[:50] for i in range(60)]


def test_stop_strings_across_tokens(client: OpenAI) -> None:
    for stream in (False, True):
        done = client.completions.create(
            model="bot", prompt="one two three ", max_tokens=40, stop=["two t", "zzz"], stream=stream
        )
        chunks = list(done) if stream else [done]
        assert "".join(one.choices[0].text for one in chunks) == "one "
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_each_token_is_scored_also_while_its_text_is_held_back(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(model="bot", prompt="abcd", max_tokens=6, stop="zz", logprobs=0, stream=True)
    )
    told = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
    assert [token for one in told for token in one.tokens or ()] == list("abcdab")
    assert "".join(one.choices[0].text for one in chunks) == "abcdab"


def test_prompts_of_every_kind_and_n(client: OpenAI) -> None:
    def texts(prompt: Any, n: int) -> list[str]:
        done = client.completions.create(model="bot", prompt=prompt, max_tokens=2, n=n)
        assert [one.index for one in done.choices] == list(range(len(done.choices)))
        return [one.text for one in done.choices]

    assert texts("ab", 3) == ["ab"] * 3
    assert texts(["ab", "cd"], 2) == ["ab", "ab", "cd", "cd"]
    assert texts([97, 98], 1) == ["ab"]
    assert texts([[97, 98], [99, 100]], 1) == ["ab", "cd"]
    done = client.completions.create(model="bot", prompt=["ab", "xyz"], max_tokens=2, n=3)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 12)  # each prompt counts once


def test_streams_of_several_answers(client: OpenAI) -> None:
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="bot", prompt=["ab", "cd"], n=2, max_tokens=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ababa", "ababa", "cdcdc", "cdcdc"]


@pytest.mark.parametrize(
    ("asked", "error", "status"),
    [
        ({"model": "nobody"}, openai.NotFoundError, 404),
        ({"temperature": -1.0}, openai.BadRequestError, 400),
        ({"suffix": "x"}, openai.BadRequestError, 400),
        ({"prompt": "x" * 5000}, openai.BadRequestError, 400),
        ({"prompt": "LATE " * 3}, openai.InternalServerError, 504),
        ({"prompt": "FAIL"}, openai.InternalServerError, 503),
    ],
)
def test_errors_are_the_clients_exceptions(
    client: OpenAI, asked: dict[str, Any], error: type[openai.APIStatusError], status: int
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**({"model": "bot", "prompt": "x"} | asked))
    assert caught.value.status_code == status
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_keys(guarded: Live) -> None:
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=API_KEY) as client:
        assert client.completions.create(model="bot", prompt="ab", max_tokens=2).choices[0].text == "ab"
    wrong = OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_an_error_in_a_stream_is_raised(client: OpenAI) -> None:
    chunks = iter(client.completions.create(model="bot", prompt="LATE", max_tokens=9, stream=True))
    assert [next(chunks).choices[0].text for _ in range(3)] == ["L", "A", "T"]
    with pytest.raises(openai.APIError, match="took longer") as caught:
        next(chunks)
    assert caught.value.code == "timeout"
    with pytest.raises(openai.InternalServerError):  # before anything came: a status
        client.completions.create(model="bot", prompt=["FAIL"], stream=True)


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    done = client.chat.completions.create(model="bot", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [one.token for one in told.content] == ["<", "s"]
    assert told.content[0].logprob == -0.5
    assert told.content[0].bytes == [0x3C]
    assert [(one.token, one.logprob) for one in told.content[1].top_logprobs] == [("s", -0.5), ("t", -1.5)]


def test_logprobs_and_echo_of_a_completion(client: OpenAI) -> None:
    for stream in (False, True):
        done = client.completions.create(
            model="bot", prompt=[97, 98], max_tokens=1, logprobs=1, echo=True, stream=stream
        )
        chunks = list(done) if stream else [done]
        assert "".join(one.choices[0].text for one in chunks) == "aba"
        parts = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
        assert [token for one in parts for token in one.tokens] == ["a", "b", "a"]
        assert [offset for one in parts for offset in one.text_offset] == [0, 1, 2]
        assert [logprob for one in parts for logprob in one.token_logprobs] == [-0.5] * 3
        assert [top for one in parts for top in one.top_logprobs] == [{"a": -0.5}, {"b": -0.5}, {"a": -0.5}]


def test_the_clients_own_retry_waits_as_it_is_told(live: Live) -> None:
    """429 and 503 carry Retry-After, which the client obeys."""
    waited = live.post("/v1/completions", model="bot", prompt="FAIL")
    assert int(waited.headers["retry-after"]) > 0


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_the_prompt_alone(client: OpenAI, prompt: Any) -> None:
    """`max_tokens` 0: what the prompt's tokens cost, and no other; as a stream, too."""
    asked: dict[str, Any] = {"model": "bot", "prompt": prompt, "max_tokens": 0, "logprobs": 1, "echo": True}
    done = client.completions.create(**asked)
    assert done.usage is not None
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("ab", "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (2, 0)
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.tokens == ["a", "b"]
    chunks = list(client.completions.create(**asked, stream=True))
    assert [one.choices[0].text for one in chunks] == ["ab", ""]
    assert chunks[-1].choices[0].finish_reason == "length"
    ended = client.completions.create(**asked, stop="a")  # the token that nobody asked for would end it
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("ab", "length")
