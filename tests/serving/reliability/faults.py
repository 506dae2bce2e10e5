"""A server under load that is told to end, or loses its engine: what was taken is answered, or told that it is not."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serving.reliability.wire import Address, Answer, exchange, get, post

PATH = "/v1/completions"


@dataclass(frozen=True)
class Target:
    """A server: its process, that of its engine, where it listens, and a request of the number with its one answer.

    key: that clients need, "" for none.
    """

    popen: subprocess.Popen[str]
    engine: int
    address: Address
    ask: Callable[[int], tuple[dict[str, Any], str]]
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of a request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass
class Outcome:
    """answers: by what became of them; ready_s: from the signal until /ready said 503; code: of the server's exit."""

    faults: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    ready_s: float = -1.0
    code: int | None = None


async def loaded(target: Target, at_once: int, hit: Callable[[], None], seconds: float) -> Outcome:
    """Keep so many requests going, `hit` the server after so many seconds, and go on until it has ended."""
    found, numbers, ended = Outcome(), iter(range(10**9)), asyncio.Event()

    async def client() -> None:
        while not ended.is_set():
            how = await _one(target, next(numbers), found)
            found.answers[how] += 1
            if how == "no server":
                return

    clients = [asyncio.create_task(client()) for _ in range(at_once)]
    await asyncio.sleep(seconds)
    hit()
    since = time.monotonic()
    while target.popen.poll() is None:
        answer = await _quietly(exchange(target.address, get("/ready")))
        if answer is not None and answer.status == 503 and found.ready_s < 0:
            found.ready_s = time.monotonic() - since
        await asyncio.sleep(0.02)
        if time.monotonic() - since > 60:
            found.faults.append("it did not end")
            break
    ended.set()
    await asyncio.gather(*clients)
    found.code = target.popen.poll()
    return found


async def _one(target: Target, number: int, found: Outcome) -> str:
    """Ask once; what became of it."""
    body, wanted = target.ask(number)
    body |= {"stream": number % 3 > 0}
    answer = await _quietly(exchange(target.address, post(PATH, json.dumps(body).encode(), **target.headers)))
    if answer is None or not answer.status:
        return "no server" if answer is None else "unanswered"
    if answer.status != 200:
        code = answer.json()["error"]["code"]
        if (answer.status, code) not in ((503, "draining"), (503, "engine_gone")):
            found.faults.append(f"request {number}: {answer.status} {code}")
        return str(code)
    if not body["stream"]:
        whole = len(answer.body) == int(answer.headers["content-length"])
        text = answer.json()["choices"][0]["text"] if whole else ""
        return _judged(number, text, wanted, found, is_whole=whole)
    if answer.is_done:
        text = "".join(one["choices"][0]["text"] for one in answer.events)
        return _judged(number, text, wanted, found, is_whole=True)
    last = answer.events[-1] if answer.events else {}
    if "error" in last:
        return f"stream told {last['error']['code']}"
    found.faults.append(f"request {number}: its stream ended with {answer.body[-100:]!r}")
    return "cut"


def _judged(number: int, text: str, wanted: str, found: Outcome, *, is_whole: bool) -> str:
    if not is_whole or text != wanted:
        found.faults.append(f"request {number}: {text!r:.200}, not {wanted!r:.200}")
        return "wrong"
    return "whole"


async def _quietly(work: Any) -> Answer | None:
    try:
        found: Answer = await work
    except OSError:
        return None
    return found


def drained(target: Target, at_once: int, seconds: float) -> Outcome:
    """SIGTERM under load: what was taken is answered whole, all else is sent elsewhere, and the exit code is 0."""
    found = asyncio.run(loaded(target, at_once, target.popen.terminate, seconds))
    for how in ("cut", "wrong", "stream told draining", "stream told engine_gone", "engine_gone"):
        if found.answers[how]:
            found.faults.append(f"{found.answers[how]} requests: {how}")
    _check(found, found.code == 0, f"exit code {found.code}")
    _check(found, found.answers["whole"] > 0, "none was answered")
    return found


def killed(target: Target, at_once: int, seconds: float) -> Outcome:
    """The engine's process is killed under load: every stream says so, /ready at once, and the server fails."""
    found = asyncio.run(loaded(target, at_once, lambda: os.kill(target.engine, signal.SIGKILL), seconds))
    _check(found, 0 <= found.ready_s < 1, f"/ready said 503 after {found.ready_s:.2f} s")
    _check(found, found.code not in (0, None), f"exit code {found.code}")
    _check(found, found.answers["stream told engine_gone"] > 0, "no stream was told")
    others = found.answers["stream told draining"] + found.answers["draining"]
    _check(found, not others, f"{others} requests were told another reason")
    return found


def _check(found: Outcome, holds: bool, told: str) -> None:
    if not holds:
        found.faults.append(told)


def echoes(model: str = "bot", longest: int = 60) -> Callable[[int], tuple[dict[str, Any], str]]:
    """Requests to the stub engine."""

    def ask(number: int) -> tuple[dict[str, Any], str]:
        tokens = random.Random(number).randint(1, longest)
        prompt = f"<{number}{'SLOW' if not number % 7 else ''}>"
        return {"model": model, "prompt": prompt, "max_tokens": tokens}, (prompt * tokens)[:tokens]

    return ask
