"""HTTP/1.1 by hand over asyncio: clients that may leave at any byte, which no library's would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Address:
    """Of a server."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        """From `http://HOST:PORT`, with or without a path."""
        host, port = url.removeprefix("http://").split("/")[0].split(":")
        return cls(host, int(port))


@dataclass(frozen=True)
class Answer:
    """status: 0 where the connection ended before one came; body: what came of it, chunks joined."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Of a whole answer."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream, the objects."""
        return [json.loads(line[6:]) for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]

    @property
    def is_done(self) -> bool:
        """Whether a stream ended as one does that is whole."""
        return self.body.endswith(b"data: [DONE]\n\n")


def post(path: str, body: bytes, **headers: str) -> bytes:
    """A request with a body of JSON."""
    told = {"host": "a", "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def get(path: str, **headers: str) -> bytes:
    """A request without one."""
    told = {"host": "a", "connection": "close", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()


@asynccontextmanager
async def connected(to: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is cut at the end of the block, whatever of it is unread."""
    reader, writer = await asyncio.open_connection(to.host, to.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(to: Address, request: bytes, leaves: Callable[[bytes], bool] | None = None) -> Answer:
    """Send a request and take its answer. leaves: asked after each piece, whether to go away now."""
    raw = b""
    async with connected(to) as (reader, writer):
        writer.write(request)
        while piece := await reader.read(65536):
            raw += piece
            if leaves is not None and leaves(raw):
                break
    return parsed(raw)


def parsed(raw: bytes) -> Answer:
    """What came of an answer, even if that is not all of it."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split()[1]) if first.startswith("HTTP/1.1 ") else 0
    body = _joined(rest) if headers.get("transfer-encoding") == "chunked" else rest
    return Answer(status, headers, body)


def _joined(chunks: bytes) -> bytes:
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        if not (length := int(size or b"0", 16)):
            break
        body, chunks = body + chunks[:length], chunks[length + 2 :]
    return body
