"""One request over HTTP and its answer, in the terms of ASGI: bodies with limits, answers, streams of events."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import msgspec

from deltacompress.serving.http.errors import ApiError
from deltacompress.serving.settings import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ABORT = "deltacompress.abort"
"""Of a scope: what cuts the connection, if it can be cut."""
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
_encode = msgspec.json.Encoder().encode


class GoneError(Exception):
    """The client went away, or was cut off."""


class Exchange:
    """A request and its answer.

    request: its id, the client's own or a new one; status: of the answer, 0 before it began; key: the name of its key.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.header("x-request-id")
        self.request = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self.status, self.key = 0, ""

    def header(self, name: str) -> bytes:
        """A header, or nothing."""
        return self._headers.get(name.encode(), b"")

    async def body(self) -> bytes:
        """The body.

        Raises:
            ApiError: it is of another type than JSON, too large, or does not come in time.
            GoneError: the client went away.
        """
        kind = self.header("content-type").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
        most = self._limits.body_bytes
        closes = {"connection": "close"}
        too_large = ApiError(413, f"the body has more than {most} bytes", code="too_large", headers=closes)
        length = self.header("content-length")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._limits.body_s):
                more = True
                while more:
                    told = await self._receive()
                    if told["type"] == "http.disconnect":
                        raise GoneError
                    parts.append(told.get("body", b""))
                    more = told.get("more_body", False)
                    if sum(map(len, parts)) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="too_slow", headers=closes) from None
        return b"".join(parts)

    async def until_gone(self) -> None:
        """Wait for the client to go away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, told: object, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """A whole answer, in JSON."""
        await self.raw(status, _encode(told), "application/json", headers)

    async def raw(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """A whole answer."""
        await self._begin(status, {"content-type": kind, "content-length": str(len(body)), **headers})
        await self._push(b"" if self.method == "HEAD" else body, more=False)

    async def begin_stream(self) -> None:
        """Events follow."""
        kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._begin(200, {**kind, "x-accel-buffering": "no"})

    async def events(self, told: Iterable[object]) -> None:
        """Events of a stream, in JSON."""
        await self._push(b"".join(b"data: %b\n\n" % _encode(one) for one in told), more=True)

    async def end_stream(self, *, is_whole: bool) -> None:
        """The last event of a stream; one that broke off has no [DONE]."""
        await self._push(b"data: [DONE]\n\n" if is_whole else b"", more=False)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        told = {"x-request-id": self.request, "x-content-type-options": "nosniff", **headers}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _push(self, body: bytes, *, more: bool) -> None:
        """Send a part of the body; a reader that does not take it in time is cut off.

        Raises:
            GoneError: it was.
        """
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            self.cut()
            raise GoneError from None

    def cut(self) -> None:
        """Close the connection at once, whatever waits to be sent."""
        if (abort := self._scope.get(ABORT)) is not None:
            abort()
