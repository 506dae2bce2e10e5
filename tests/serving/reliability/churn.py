"""Very many clients, some of whom leave at any moment or send nonsense: everybody has their own, and all comes back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from serving.reliability.models import Models, Question
from serving.reliability.server import KEY, Metrics, Server, eventually
from serving.reliability.wire import Answer, connected, exchange, parsed, post

PATH = "/v1/completions"
_NATURAL = ("length", "eos", "stop", "context")
NONSENSE: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": "hot"}, 400),
    ({"nonsense": 1}, 400),
    ({"model": "nobody"}, 404),
    ({"prompt": [10**6]}, 400),
    ({"max_tokens": 10**6}, 400),
    ({"prompt": [[]]}, 400),
    ({"n": 99}, 400),
)
"""What is changed of a request, and what it is told."""
_REFUSED_BY_THE_ENGINE = ({"prompt": [10**6]}, {"max_tokens": 10**6})


@dataclass
class Found:
    """What the clients saw. finished: calls that ended, by model; tokens: of them; late: requests that left."""

    faults: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    refused: int = 0
    left: dict[str, bool] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    seen: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, holds: bool, told: str) -> None:
        """Note a fault, if it is one."""
        if not holds:
            self.faults.append(told)


async def churn(
    server: Server,
    models: Models,
    requests: int,
    at_once: int,
    *,
    seed: int = 23,
    first: int = 0,
    found: Found | None = None,
) -> Found:
    """Ask so many times, `at_once` at a time; a fifth of the clients leave, a twentieth ask for nonsense.

    first: number of the first request; found: takes what is seen, too.
    """
    draw, room, found = random.Random(seed), asyncio.Semaphore(at_once), found or Found()
    kinds = draw.choices(["whole", "streams", "leaves", "nonsense"], [35, 40, 20, 5], k=requests)

    async def one(number: int, kind: str) -> None:
        async with room:
            try:
                await _Client(server, models, found, number).ask(kind)
            except Exception as error:  # noqa: BLE001 - it is a fault of this client's, and the others go on
                found.faults.append(f"r{number} {kind}: {type(error).__name__}: {error}")

    begun = time.monotonic()
    await asyncio.gather(*(one(number, kind) for number, kind in enumerate(kinds, first)))
    found.kinds.update(kinds)
    found.seconds += time.monotonic() - begun
    return found


class _Client:
    """One of them."""

    def __init__(self, server: Server, models: Models, found: Found, number: int) -> None:
        self._server, self._models, self._found, self._id = server, models, found, f"r{number}"
        self._draw = random.Random(number)
        self._model = self._draw.choice(models.names)
        self._question: Question = self._draw.choice(models.questions)
        self._wanted = models.answers[self._model, self._question]

    async def ask(self, kind: str) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self._question.prompt,
            "max_tokens": self._question.tokens,
            "temperature": 0,
            "n": self._draw.choice([1, 1, 1, 2]),
            "latency": self._draw.choice(["interactive", "batch"]),
        }
        if kind == "nonsense":
            await self._nonsense(body)
        elif kind == "leaves":
            await self._leaves(body | {"stream": self._draw.random() < 0.7})
        else:
            await self._stays(body | ({"stream": True} if kind == "streams" else {}))

    async def _nonsense(self, body: dict[str, Any]) -> None:
        way = self._draw.randrange(len(NONSENSE) + 3)
        if way < len(NONSENSE):
            changed, status = NONSENSE[way]
            self._found.refused += int(changed in _REFUSED_BY_THE_ENGINE) * body["n"]
            request = self._request(body | changed)
        elif way == len(NONSENSE):
            request, status = self._request(body, key="wrong"), 401
        elif way == len(NONSENSE) + 1:
            request, status = self._request(body).replace(b'"model":', b'"model";', 1), 400
        else:
            request, status = self._request(body).replace(b"application/json", b"application/nose"), 415
        answer = await exchange(self._server.address, request)
        self._saw(answer, status)
        self._found.check("error" in answer.json(), f"{self._id}: {answer.body[:200]!r} is no error")

    async def _stays(self, body: dict[str, Any]) -> None:
        answer = await exchange(self._server.address, self._request(body))
        self._saw(answer, 200)
        if answer.status != 200:
            return
        if "stream" in body:
            self._found.check(answer.is_done, f"{self._id}: its stream broke off: {answer.body[-200:]!r}")
        texts, ends = self._told(answer, "stream" in body)
        self._found.check(ends == [1] * body["n"], f"{self._id}: its answers ended {ends} times")
        self._found.check(
            texts == [self._wanted] * body["n"], f"{self._id} of {self._model}: {texts!r:.200}, not {self._wanted!r}"
        )
        self._found.finished[self._model] += body["n"]
        if "stream" not in body:
            self._found.tokens += answer.json()["usage"]["completion_tokens"]

    async def _leaves(self, body: dict[str, Any]) -> None:
        """At any moment: amid its head or body, at once, after a while, or after some events."""
        request = self._request(body)
        when = self._draw.choice(["asking", "at once", "waiting", "reading", "reading"])
        if when in ("asking", "at once"):
            async with connected(self._server.address) as (_, writer):
                writer.write(request if when == "at once" else request[: self._draw.randrange(len(request))])
                await asyncio.sleep(self._draw.choice([0, 0.01]))
            self._found.left[self._id] = False
            return
        raw, events = b"", self._draw.randint(1, 8)
        async with connected(self._server.address) as (reader, writer):
            writer.write(request)
            try:
                async with asyncio.timeout(self._draw.random() if when == "waiting" else 60):
                    while raw.count(b"data: ") < events and (piece := await reader.read(4096)):
                        raw += piece
            except TimeoutError:
                pass
        self._found.left[self._id] = bool(raw)
        if raw and body["stream"]:
            self._begins(parsed(raw), body["n"])

    def _begins(self, answer: Answer, n: int) -> None:
        """What a client read that left is how its own answer begins."""
        end = answer.body.rfind(b"\n\n")
        texts, _ = self._told(Answer(answer.status, answer.headers, answer.body[: max(end, 0)]), True, n)
        good = answer.status == 200 and all(self._wanted.startswith(text) for text in texts)
        self._found.check(good, f"{self._id} of {self._model} left after {answer.status} {texts!r:.200}")

    def _told(self, answer: Answer, is_stream: bool, n: int = 1) -> tuple[list[str], list[int]]:
        """The text of each choice, and how often each was said to end."""
        events = answer.events if is_stream else [answer.json()]
        choices = [one for event in events for one in event["choices"]]
        count = max((one["index"] for one in choices), default=n - 1) + 1
        mine = [[one for one in choices if one["index"] == place] for place in range(count)]
        texts = ["".join(one["text"] for one in told) for told in mine]
        return texts, [sum(one["finish_reason"] is not None for one in told) for told in mine]

    def _request(self, body: dict[str, Any], key: str = KEY) -> bytes:
        headers = {"authorization": f"Bearer {key}", "x_request_id": self._id}
        return post(PATH, json.dumps(body).encode(), **headers)

    def _saw(self, answer: Answer, wanted: int) -> None:
        self._found.seen[self._id] = answer.status
        self._found.statuses[answer.status] += 1
        self._found.check(answer.status == wanted, f"{self._id}: {answer.status}, not {wanted}: {answer.body[:300]!r}")


def settled(server: Server, models: Models, found: Found, room: int) -> None:
    """Hold the server against what the clients saw, and take everything back from it; faults go to `found`."""

    def counted(name: str) -> float:
        return server.metrics()[f"deltacompress_{name}",]

    idle = eventually(lambda: not counted("requests_running") + counted("requests_queued"))
    found.check(idle, "some calls never ended")
    time.sleep(1.2)  # what the engine tells of itself is up to half a second old
    _check_counts(server.metrics(), server, found)
    told = server.metrics()
    there = told["deltacompress_variants", "device"]
    found.check(there <= room, f"{there:g} variants on the device, which has room for {room}")
    loads, evictions = (told[f"deltacompress_variant_{name}_total",] for name in ("loads", "evictions"))
    found.check(loads - evictions == there, f"{loads:g} loads and {evictions:g} evictions leave {there:g}")
    taken = told["deltacompress_variant_bytes", "device"]
    found.check(taken == there * models.nbytes, f"{taken:g} bytes for {there:g} variants of {models.nbytes}")
    for name in models.variants:  # refused while any call holds one
        answer = server.admin("unload", name=name)
        found.check(answer.status_code == 200, f"{name} cannot be unloaded: {answer.text}")
    told = server.metrics()
    for place in ("device", "host"):
        found.check(not told["deltacompress_variant_bytes", place], f"bytes are left on the {place}")
    found.check(not server.lines("bug"), f"bugs in the log: {server.lines('bug')[:3]}")
    log = server.log.read_text()
    found.check(not any(key in log for key in (KEY, "sk-of-admins")), "a key is in the log")


def _check_counts(told: Metrics, server: Server, found: Found) -> None:
    """Of answers, by request; of calls, by how they ended."""
    lines = [one for one in server.lines("request") if one["route"] == PATH]
    logged = Counter(one["request"] for one in lines)
    by_id: dict[str, int] = {one["request"]: one["status"] for one in lines}
    for name, status in found.seen.items():
        found.check((logged[name], by_id.get(name)) == (1, status), f"{name} saw {status}, logged {logged[name]} times")
    for name, had_read in found.left.items():
        ways = (200, 499) if had_read else (None, 200, 499)
        found.check(logged[name] <= 1 and by_id.get(name) in ways, f"{name} left, logged as {by_id.get(name)}")
    answered = {
        int(key[2]): int(value) for key, value in told.items() if _is(key, "http_responses_total") and key[1] == PATH
    }
    found.check(
        answered == dict(Counter(by_id.values())), f"metrics count {answered}, the log {Counter(by_id.values())}"
    )
    outcomes: Counter[str] = Counter()
    for key, value in told.items():
        if _is(key, "requests_total"):
            outcomes[key[2]] += int(value)
    most = sum(2 for name in found.left if by_id.get(name) is not None)
    natural = sum(outcomes[one] for one in _NATURAL)
    stayed = found.finished.total()
    found.check(stayed <= natural, f"{natural} calls ended by themselves, and clients saw {stayed}")
    all_of_them = natural + outcomes["cancelled"]
    found.check(all_of_them <= stayed + most, f"{all_of_them} calls ended: {stayed} seen, {most} at most left")
    found.check(outcomes["refused"] == found.refused, f"{outcomes['refused']} refused, not {found.refused}")
    odd = set(outcomes) - {*_NATURAL, "cancelled", "refused"}
    found.check(not odd, f"calls ended by {odd}")
    tokens = told["deltacompress_generated_tokens_total",]
    found.check(tokens >= found.tokens, f"{tokens:g} tokens counted, {found.tokens} seen")


def _is(key: tuple[str, ...], name: str) -> bool:
    return key[0] == f"deltacompress_{name}"
