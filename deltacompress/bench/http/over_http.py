"""What HTTP costs: the same calls put into the engine by hand, and asked of a server over it, as many at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec

from deltacompress.bench.http.processes import ECHO, HERE, argv, build
from deltacompress.bench.serve.calls import prompt
from deltacompress.errors import BackendError, InputError, option
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken
from deltacompress.serving.messages import Start

_FIRST = b"data: "
_LAST = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Load:
    """streams: at once; calls: in all; of so many tokens each.

    connections: of the part without a model; echoed: tokens of each of those.
    """

    streams: int = 64
    calls: int = 256
    prompt_tokens: int = 128
    tokens: int = 128
    connections: int = 256
    echoed: int = 200

    def scaled(self, scale: float) -> Load:
        """The same with all lengths times `scale`.

        Raises:
            InputError: it is not above 0 and at most 1.
        """
        if not 0 < scale <= 1:
            raise InputError(f"is {scale:g}", where=option("scale"), way_out="give a number above 0, at most 1")
        names = ("prompt_tokens", "tokens", "echoed")
        return replace(self, **{name: max(1, round(getattr(self, name) * scale)) for name in names})

    def all_calls(self, models: Sequence[str | None], vocabulary: int) -> list[Call]:
        """They take turns among the models, and no end token ends one."""
        sampling = Sampling(ignore_eos=True)
        return [
            Call(
                f"c{number}",
                models[number % len(models)],
                prompt(self.prompt_tokens, vocabulary, f"http {number}"),
                self.tokens,
                sampling,
            )
            for number in range(self.calls)
        ]


@dataclass(frozen=True, slots=True)
class Taken:
    """first_s: of each call, from its submission to its first token; tokens and seconds: of all."""

    first_s: tuple[float, ...]
    tokens: int
    seconds: float

    def row(self, way: str) -> dict[str, Any]:
        """As a table has it."""
        return {"way": way, "ttft_ms_median": median(self.first_s) * 1e3, "tokens_s": self.tokens / self.seconds}


def by_hand(start: Start, load: Load, vocabulary: int) -> Taken:
    """The engine as a server's process makes it, in this one; a call that ends is followed by the next."""
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    tokens = 0
    waiting: Iterator[Call] = iter(())

    def enter() -> None:
        if (call := next(waiting, None)) is not None:
            begun[call.id] = time.perf_counter()
            served.engine.submit(call)

    def emit(event: Event) -> None:
        nonlocal tokens
        if isinstance(event, NewToken):
            tokens += 1
            first.setdefault(event.id, time.perf_counter() - begun[event.id])
        elif isinstance(event, Ended):
            if event.error is not None:
                raise event.error
            enter()

    served = build(start, emit)
    for name, source in start.variants:
        served.models.load(source, name, over=None, zoo=None, pin=False)
    calls = load.all_calls([name for name, _ in start.variants], vocabulary)
    for measured in (calls[: load.streams], calls):  # whatever is compiled or captured once is there then
        waiting, tokens = iter(measured), 0
        first.clear()
        since = time.perf_counter()
        for _ in range(load.streams):
            enter()
        while served.engine.step():
            pass
    taken = Taken(tuple(first.values()), tokens, time.perf_counter() - since)
    served.engine.close()
    return taken


async def over_http(start: Start, load: Load, vocabulary: int) -> Taken:
    """The same of a server, asked over as many connections at once."""
    async with _server(argv(start, HERE)) as url:
        bodies = [_body(call) for call in load.all_calls([name for name, _ in start.variants], vocabulary)]
        await _asked(url, bodies[: load.streams], load.streams, load.tokens)
        return await _asked(url, bodies, load.streams, load.tokens)


async def echoed(start: Start, load: Load) -> Taken:
    """What a server streams whose engine has no model; of `start` its limits alone count."""
    body = json.dumps({"model": "echo", "prompt": "a", "max_tokens": load.echoed, "stream": True}).encode()
    start = msgspec.structs.replace(start, base="echo", variants=(), max_batch=load.connections)
    async with _server(argv(start, ECHO)) as url:
        return await _asked(url, [body] * load.connections, load.connections, load.echoed)


def _body(call: Call) -> bytes:
    asked = {"model": call.variant, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0}
    return json.dumps(asked | {"ignore_eos": True, "stream": True}).encode()


@asynccontextmanager
async def _server(argv: Sequence[str]) -> AsyncIterator[str]:
    """A process that prints an object with its url once it serves; its log goes nowhere."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=null, stdin=null)
    assert process.stdout is not None
    try:
        raw = b""
        while not raw.endswith(b"}\n") and (line := await process.stdout.readline()):
            raw += line
        if not raw:
            raise BackendError("the server did not start", way_out=f"run it by itself: {' '.join(argv)}")
        yield str(json.loads(raw)["url"])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _asked(url: str, bodies: Sequence[bytes], at_once: int, tokens: int) -> Taken:
    """Each body is posted, `at_once` at a time, each on a connection of its own."""
    host, _, port = url.removeprefix("http://").split("/")[0].rpartition(":")
    waiting, first = iter(bodies), list[float]()

    async def client() -> None:
        for body in waiting:
            reader, writer = await asyncio.open_connection(host, int(port))
            since = time.perf_counter()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            raw = b""
            while _FIRST not in raw:
                raw += await _piece(reader, raw)
            first.append(time.perf_counter() - since)
            while _LAST not in raw[-64:]:
                raw += await _piece(reader, raw)
            writer.close()
            if raw.count(_FIRST) != tokens + 2:  # one says that it ended, one that all is said
                raise BackendError(f"{raw.count(_FIRST) - 2} tokens came over HTTP, and not {tokens}")

    since = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return Taken(tuple(first), tokens * len(bodies), time.perf_counter() - since)


async def _piece(reader: asyncio.StreamReader, raw: bytes) -> bytes:
    if not (piece := await reader.read(65536)):
        raise BackendError(f"a stream broke off after {raw[-200:]!r}")
    return piece
