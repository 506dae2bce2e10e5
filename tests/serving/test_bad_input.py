"""Requests that make no sense: each is told what is wrong with it, in OpenAI's shape; none brings the server down."""

from __future__ import annotations

import json
import os
import random
import socket
from typing import Any

import httpx
import pytest
from serving.harness import API_KEY, Live, eventually
from serving.reliability.fuzz import CHAT, TEXT, fuzzed

FUZZED = int(os.environ.get("DELTACOMPRESS_FUZZ", "3000"))


def told(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "2"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 4}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [2**30]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"echo": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"latency": "never"}, "latency"),
        ({"latency": ["batch"]}, "latency"),
        ({"user": 5}, "user"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"nonsense": 1}, "nonsense"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_completion_that_makes_no_sense(live: Live, changed: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/completions", **(TEXT | changed))
    assert answer.status_code == 400
    error = told(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.rsplit(".", maxsplit=1)[-1] in error["message"]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prediction": {}}, "prediction"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"prompt": "a"}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_chat_that_makes_no_sense(live: Live, changed: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/chat/completions", **(CHAT | changed))
    assert answer.status_code == 400
    assert told(answer)["param"] == param


@pytest.mark.parametrize("role", ["tool", "function"])
def test_what_a_tool_said_is_refused_as_that(live: Live, role: str) -> None:
    said = {"role": role, "content": "a", "tool_call_id": "1"}
    answer = live.post("/v1/chat/completions", **(CHAT | {"messages": [*CHAT["messages"], said]}))
    error = told(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages[1].role", "unsupported_value")
    assert "tools are not served" in error["message"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "service_tier": "auto"},
        {"audio": None, "stop": None, "n": None, "seed": -5, "user": "me", "temperature": 0, "max_tokens": 2.0},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 1},
        {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}, "top_p": 0.5},
    ],
)
def test_what_is_served(live: Live, harmless: dict[str, Any]) -> None:
    answer = live.post("/v1/chat/completions", **(CHAT | harmless))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"3", b"\xff", b'{"model": NaN}', b'{"a": Infinity}', b"[" * 100_000]
)
def test_no_json(live: Live, raw: bytes) -> None:
    answer = live.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert told(answer)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", TEXT | {"prompt": "a\ud800"}, "prompt"),
        ("completions", TEXT | {"stop": ["b", "\udc00"]}, "stop"),
        ("completions", TEXT | {"model": "\ud800"}, "model"),
        ("completions", TEXT | {"\ud800": 1}, "?"),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
    ],
)
def test_half_of_a_surrogate_pair_is_told_by_its_field(live: Live, path: str, body: dict[str, Any], field: str) -> None:
    """It is JSON, and so is the whole pair."""
    headers = {"content-type": "application/json"}
    answer = live.http.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    error = told(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert error["message"].startswith(f"{field}: has half of a surrogate pair")
    whole = json.dumps(TEXT | {"prompt": "\U0001f600"})
    assert live.http.post("/v1/completions", content=whole, headers=headers).status_code == 200


def test_the_base_never_takes_the_place_of_an_unknown_model(live: Live) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        answer = live.post(path, **(body | {"model": "nobody"}))
        assert answer.status_code == 404
        assert told(answer) | {"message": ""} == {
            "message": "",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }


def test_paths_methods_and_types(live: Live) -> None:
    assert told(live.http.get("/v1/nonsense"))["code"] == "unknown_url"
    assert live.http.get("/v1/nonsense").status_code == 404
    wrong_method = live.http.get("/v1/completions")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    form = live.http.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"})
    assert (form.status_code, told(form)["code"]) == (415, "unsupported_media_type")
    assert live.http.head("/health").status_code == 200


def test_bodies_that_are_too_large(guarded: Live) -> None:
    """By what they say, and by what they are."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"}
    large = json.dumps(TEXT | {"user": "x" * 100_000}).encode()

    def pieces() -> Any:
        yield from (large[i : i + 30_000] for i in range(0, len(large), 30_000))

    for content in (large, pieces()):
        with httpx.Client(base_url=guarded.url) as http:
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert (answer.status_code, told(answer)["code"]) == (413, "too_large")
    many = b'{"prompt": [' + b"[],[]," * 10_000 + b"[]]}"
    answer = guarded.http.post("/v1/completions", content=many, headers=headers)
    assert (answer.status_code, told(answer)["code"]) == (413, "too_large")


def test_context_and_vocabulary(live: Live) -> None:
    answer = live.post("/v1/completions", **(TEXT | {"prompt": "x" * 100, "max_tokens": 4096}))
    assert answer.status_code == 400
    error = told(answer)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "the prompt has 100 tokens and max_tokens is 4096, but the context takes 4096" in error["message"]
    for limit in ({}, {"max_tokens": 1}):
        answer = live.post("/v1/completions", **(TEXT | {"prompt": "x" * 4096} | limit))
        assert answer.status_code == 400
        assert (told(answer)["param"], told(answer)["code"]) == ("prompt", "context_length_exceeded")
    eventually(lambda: live.client.state.running == 0)
    assert live.post("/v1/completions", **(TEXT | {"prompt": "x" * 4080, "max_tokens": 16})).status_code == 200
    assert live.post("/v1/completions", **(TEXT | {"prompt": [2**30]})).status_code == 400


def test_request_ids(live: Live) -> None:
    assert live.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert live.http.get("/health", headers={"x-request-id": 'a"b'}).headers["x-request-id"] != 'a"b'


def test_mutated_requests_are_answered_or_told_what_is_wrong() -> None:
    found = fuzzed(FUZZED)
    assert found.faults == []
    assert set(found.statuses) >= {200, 400, 401, 403, 404, 405, 415}
    assert found.statuses.total() >= FUZZED


def test_mutated_heads(live: Live) -> None:
    """Bytes that are no HTTP, or nearly: answered or cut off, and the server goes on."""
    draw = random.Random(20)
    body = json.dumps(TEXT)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    for _ in range(FUZZED // 15):
        raw = bytearray(f"{head}connection: close\r\n\r\n{body}".encode())
        for _ in range(draw.randint(1, 5)):
            raw[draw.randrange(len(head))] = draw.randrange(256)
        with socket.create_connection(live.url.removeprefix("http://").split(":"), timeout=10) as made:
            made.sendall(raw)
            made.shutdown(socket.SHUT_WR)
            heard = b"".join(iter(lambda: made.recv(65536), b""))
        assert not heard.startswith(b"HTTP/1.1 5"), (bytes(raw), heard)
    assert live.http.get("/ready").status_code == 200
    eventually(lambda: live.client.busy == 0)
