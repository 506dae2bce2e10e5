"""Bodies and heads of requests, changed by chance: each is answered, or told what is wrong, and no row stays."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from serving.reliability.inside import Inside
from serving.reliability.wire import Answer

from deltacompress.serving.keys import Key

KEY = "sk-of-clients-4713"
AT_ONCE = 32
TEXT: dict[str, Any] = {"model": "bot", "prompt": "ab", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "bot", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 17, 0.5, -0.5, 1e300, 10**25, "", "a", "none", "auto", "é", "\u2028", "x" * 3000),
    *([], {}, [[]], [1], [1, 2], ["a"], [None], [{}], {"5": 1}, {"type": "text"}, {"include_usage": True}),
    [{"role": "user", "content": "a"}],
]
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("n", "best_of", "stop", "stream", "stream_options", "seed", "user", "echo", "logprobs", "top_logprobs", "tools"),
    *("logit_bias", "min_tokens", "ignore_eos", "response_format", "suffix", "nonsense", "repetition_penalty"),
]


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """A route and a body: one that is well formed, with fields changed, or bytes."""
    is_chat = draw.random() < 0.5
    body = copy.deepcopy(CHAT if is_chat else TEXT)
    for _ in range(draw.randint(1, 3)):
        body[draw.choice(FIELDS)] = draw.choice(VALUES)
    if is_chat and draw.random() < 0.3 and isinstance(body["messages"], list) and body["messages"]:
        body["messages"] = [{**CHAT["messages"][0], draw.choice(["role", "content", "name"]): draw.choice(VALUES)}]
    raw = bytearray(json.dumps(body).encode())
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(raw))
            raw[at : at + draw.randint(0, 2)] = bytes(draw.randrange(256) for _ in range(draw.randint(0, 2)))
    return ("/v1/chat/completions" if is_chat else "/v1/completions"), bytes(raw)


HEADS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"application/json"),
    (b"content-length", b"50"),
    (b"authorization", f"Bearer {KEY}".encode()),
    (b"x-request-id", b"mine"),
    (b"accept", b"*/*"),
]
ROUTES = [
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/bot", "/metrics", "/health", "/ready"),
    *("/version", "/admin/load", "/admin/unload", "/admin/drain", "/v1/nonsense", "/v1/models/\u00e9\ufffd", ""),
]
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW", "get"]


@dataclass
class Found:
    """statuses: how often each; faults: what should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def _bodies(inside: Inside, draw: random.Random, count: int, found: Found) -> None:
    headers = {b"content-type": b"application/json", b"authorization": f"Bearer {KEY}".encode()}
    for _ in range(count):
        path, raw = mutated(draw)
        await _judged(inside, "POST", path, raw, headers, found)


async def _heads(inside: Inside, draw: random.Random, count: int, found: Found) -> None:
    for _ in range(count):
        is_asked = draw.random() < 0.5
        method, path = ("POST", ROUTES[draw.randrange(2)]) if is_asked else (draw.choice(METHODS), draw.choice(ROUTES))
        headers = dict(HEADS)
        for _ in range(draw.randint(1, 3)):
            name, value = draw.choice(HEADS)
            headers[name] = _changed(value, draw)
        if draw.random() < 0.2:
            del headers[draw.choice(list(headers))]
        body = json.dumps(CHAT if "chat" in path else TEXT).encode()
        await _judged(inside, method, path, body, headers, found)


def _changed(value: bytes, draw: random.Random) -> bytes:
    raw = bytearray(value)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(raw) + 1)
        raw[at : at + draw.randint(0, 2)] = bytes(draw.randrange(32, 256) for _ in range(draw.randint(0, 9)))
    return bytes(raw)


async def _judged(
    inside: Inside, method: str, path: str, raw: bytes, headers: dict[bytes, bytes], found: Found
) -> None:
    told = f"{method} {path!r} {headers} {raw!r:.500}"
    try:
        async with asyncio.timeout(60):
            answer = await inside.ask(method, path, raw, headers)
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        found.faults.append(f"{told}: {type(error).__name__}: {error}")
        return
    found.statuses[answer.status] += 1
    if wrong := _wrong(method, answer):
        found.faults.append(f"{told}: {wrong}")


def _wrong(method: str, answer: Answer) -> str | None:
    """What is wrong with an answer."""
    if answer.status not in range(200, 500):
        return f"status {answer.status}"
    if KEY.encode() in answer.body or KEY in str(answer.headers):
        return "the key is told"
    if answer.status >= 400 and method != "HEAD":
        error = answer.json()["error"]
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            return f"{answer.body!r} is no error"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        ends = [one for one in answer.events if "error" in one]
        if answer.is_done == bool(ends):
            return f"a stream that ends with {answer.body[-100:]!r}"
    return None


Way = Callable[[Inside, random.Random, int, Found], Any]


def fuzzed(inputs: int, seed: int = 29) -> Found:
    """So many requests, four fifths of them with changed bodies, the others with changed heads."""

    async def run() -> Found:
        found = Found()
        inside = Inside(api_keys=(Key(KEY.encode()),))
        steps = asyncio.create_task(inside.run())
        ways: list[Way] = [_heads if number % 5 == 0 else _bodies for number in range(AT_ONCE)]
        share = -(-inputs // AT_ONCE)
        await asyncio.gather(
            *(way(inside, random.Random(f"{seed} {place}"), share, found) for place, way in enumerate(ways))
        )
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not (inside.client.busy or inside.engine.counts.queued or inside.engine.counts.running):
                break
        left = (inside.client.busy, inside.engine.counts.queued, inside.engine.counts.running)
        if any(left):
            found.faults.append(f"left over: {left} calls open, queued, running")
        log = inside.log.getvalue()
        if '"event": "bug"' in log:
            found.faults.append("a bug is in the log")
        if KEY in log + inside.metrics.text().decode():
            found.faults.append("the key is in the log or the metrics")
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await steps
        return found

    return asyncio.run(run())
