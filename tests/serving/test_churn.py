"""Many clients at once, some of whom leave or send nonsense: everybody gets their own, and everything comes back."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import httpx
from serving.harness import Live, eventually, served

REQUESTS = int(os.environ.get("DELTACOMPRESS_LOAD", "250"))
AT_ONCE = 64


async def ask(http: httpx.AsyncClient, number: int, what: str, draw: random.Random) -> str:
    """One client; what came of it."""
    prompt, tokens = f"<{number}>", draw.randint(1, 60)
    model = draw.choice(["tiny", "bot", "sql"])
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens}
    if what == "nonsense":
        answer = await http.post("/v1/completions", json=body | {"temperature": "hot"})
        assert answer.status_code == 400
    elif what == "fails":
        answer = await http.post("/v1/completions", json=body | {"prompt": f"FAIL{number}"})
        assert answer.status_code == 503
    elif what == "leaves":
        long = body | {"stream": True, "max_tokens": 4000}
        async with http.stream("POST", "/v1/completions", json=long) as answer:
            lines = answer.aiter_lines()
            for _ in range(draw.randint(1, 20)):
                await anext(lines)
    elif what == "streams":
        text = ""
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == (prompt * tokens)[:tokens]
    else:
        answer = await http.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == (prompt * tokens)[:tokens]
        assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    return what


async def all_of_them(url: str) -> Counter[str]:
    draw, room = random.Random(23), asyncio.Semaphore(AT_ONCE)
    kinds = draw.choices(["whole", "streams", "leaves", "nonsense", "fails"], [35, 35, 20, 5, 5], k=REQUESTS)

    async def one(number: int, what: str) -> str:
        async with room:
            return await ask(http, number, what, random.Random(number))

    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        return Counter(await asyncio.gather(*(one(i, what) for i, what in enumerate(kinds))))


def outcomes(live: Live) -> Counter[str]:
    found = Counter[str]()
    for key, value in live.metrics().items():
        if key[0] == "deltacompress_requests_total":
            found[key[2]] += int(value)
    return found


def test_each_call_ends_once_and_with_its_own_text() -> None:
    with served(max_batch=32) as found:
        told = asyncio.run(all_of_them(found.url))
        eventually(lambda: not found.client.busy)
        eventually(lambda: (found.client.state.queued, found.client.state.running) == (0, 0))
        eventually(lambda: not found.app_connections)
        ended = outcomes(found)
        assert ended.total() == REQUESTS - told["nonsense"]
        assert ended["failed"] == told["fails"]
        assert 0 < ended["cancelled"] <= told["leaves"]  # some leave so late that all was written
        assert set(ended) == {"length", "failed", "cancelled"}
        assert '"bug"' not in found.log.getvalue()
