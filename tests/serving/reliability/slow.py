"""Connections that are slow on purpose or dead at one end: they are cut, and those who behave notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from serving.harness import Live
from serving.reliability.wire import Address, connected, exchange, post

PATH = "/v1/completions"
LONG = "".join(chr(0x4E00 + i) for i in range(90))


def request(**changed: Any) -> bytes:
    """A completion of the stub's."""
    return post(PATH, json.dumps({"model": "bot", "prompt": "ab", "max_tokens": 2, **changed}).encode())


async def dripped_head(live: Live) -> str:
    """A head, a byte at a time."""
    return await _dripped(live, b"", b"GET /health HTTP/1.1\r\nhost: " + b"a" * 10_000)


async def dripped_body(live: Live) -> str:
    """A body, a byte at a time."""
    head, _, body = request(user="x" * 10_000).partition(b"\r\n\r\n")
    return await _dripped(live, head + b"\r\n\r\n", body)


async def dripped_rest(live: Live) -> str:
    """A head that is not asked for more, and what follows it a byte at a time."""
    head = b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 10000\r\n\r\n"
    return await _dripped(live, head, b"x" * 10_000)


async def _dripped(live: Live, first: bytes, rest: bytes) -> str:
    async with connected(Address.of(live.url)) as (reader, writer):
        writer.write(first)
        heard = asyncio.ensure_future(_until_cut(reader))
        try:
            for byte in rest:
                if heard.done():
                    break
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
        except OSError:
            pass
        return await heard


async def silent(live: Live) -> str:
    """Nothing at all."""
    async with connected(Address.of(live.url)) as (reader, _):
        return await _until_cut(reader)


async def half_open(live: Live) -> str:
    """A request, and then no more from this side, though it listens."""
    async with connected(Address.of(live.url)) as (reader, writer):
        writer.write(request(prompt="SLOW", max_tokens=4000, stream=True))
        writer.write_eof()
        return await _until_cut(reader)


async def never_reads(live: Live) -> str:
    """A stream that nobody takes."""
    return await _unread(live, request(prompt=[LONG] * 8, max_tokens=2000, stream=True, logprobs=5))


async def never_reads_a_whole_one(live: Live) -> str:
    """An answer that nobody takes."""
    return await _unread(live, request(prompt=[LONG] * 8, max_tokens=1000, logprobs=20))


async def _unread(live: Live, asked: bytes) -> str:
    """Ends once the server has let go, which only that can tell: the system goes on offering what it was given."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    try:
        to = Address.of(live.url)
        await asyncio.get_running_loop().sock_connect(made, (to.host, to.port))
        await asyncio.get_running_loop().sock_sendall(made, asked)
        mine = made.getsockname()
        while mine not in _clients(live):
            await asyncio.sleep(0.01)
        while mine in _clients(live):
            await asyncio.sleep(0.05)
        return "cut"
    finally:
        made.close()


def _clients(live: Live) -> set[tuple[str, int]]:
    """The other ends of its connections."""
    return {one.client for one in tuple(live.server.server_state.connections) if one.client is not None}


async def _until_cut(reader: asyncio.StreamReader) -> str:
    raw = b""
    try:
        while piece := await reader.read(65536):
            raw += piece
    except OSError:
        return "cut"
    return raw[9:12].decode("latin-1") if raw else "cut"


WAYS: tuple[tuple[Callable[[Live], Awaitable[str]], tuple[str, ...]], ...] = (
    (dripped_head, ("cut",)),
    (dripped_body, ("408", "cut")),
    (dripped_rest, ("200", "cut")),
    (silent, ("cut",)),
    (half_open, ("cut", "200")),
    (never_reads, ("cut",)),
    (never_reads_a_whole_one, ("cut",)),
)
"""Kinds of connections, and what each may come to."""


def endured(live: Live, each: int, within_s: float = 60) -> tuple[Counter[str], list[str]]:
    """So many connections of each kind at once, while others are served; what became of them, and the faults."""
    to = Address.of(live.url)

    async def run() -> tuple[Counter[str], list[str]]:
        told, faults, ended = Counter[str](), list[str](), asyncio.Event()

        async def one(way: Callable[[Live], Awaitable[str]], wanted: tuple[str, ...]) -> None:
            try:
                async with asyncio.timeout(within_s):
                    how = await way(live)
            except TimeoutError:
                how = "still there"
            told[f"{way.__name__}: {how}"] += 1
            if how not in wanted:
                faults.append(f"{way.__name__}: {how}")

        async def behaves() -> None:
            draw = random.Random(31)
            while not ended.is_set():
                prompt, tokens = f"<{draw.random()}>", draw.randint(1, 40)
                answer = await exchange(to, request(prompt=prompt, max_tokens=tokens))
                text = answer.json()["choices"][0]["text"] if answer.status == 200 else answer.status
                told["behaved"] += 1
                if text != (prompt * tokens)[:tokens]:
                    faults.append(f"one who behaves: {text!r}")

        others = asyncio.create_task(behaves())
        await asyncio.gather(*(one(way, wanted) for way, wanted in WAYS for _ in range(each)))
        ended.set()
        await others
        return told, faults

    told, faults = asyncio.run(run())
    until = time.monotonic() + 20
    while any(left := _left(live)) and time.monotonic() < until:
        time.sleep(0.05)
    if any(left):
        faults.append(f"left over: {left} connections, calls open, running, queued")
    if '"bug"' in live.log.getvalue():
        faults.append("a bug is in the log")
    return told, faults


def _left(live: Live) -> tuple[int, int, int, int]:
    return live.app_connections, live.client.busy, live.client.state.running, live.client.state.queued
