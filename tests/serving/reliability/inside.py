"""The server's application over the stub engine, both in this process: as fast as a fuzzer needs them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from serving.reliability.wire import Answer
from serving.stub import CONTEXT, QueueFullError, StubEngine, StubModels

from deltacompress.runtime.engine.live.events import Event
from deltacompress.serving.channel import ORDERS, REPORTS, encode
from deltacompress.serving.client import Client
from deltacompress.serving.http.app import App
from deltacompress.serving.logs import Log
from deltacompress.serving.messages import Cancel, Ready, Start, Submit
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.settings import Settings
from deltacompress.serving.worker.loop import Served, Worker


class _Inside(Client):
    """A client whose engine is a worker of this process; what they say to each other is encoded all the same."""

    __slots__ = ("worker",)
    worker: Worker

    def _send(self, message: msgspec.Struct) -> None:
        match ORDERS.decode(encode(message)):
            case Submit() as order:
                self.worker._submit(order)
            case Cancel(id=name):
                self.worker.engine.cancel(name)


class _Teller:
    """Takes what the worker tells to the client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def tell(self, message: msgspec.Struct) -> None:
        self._client._take(REPORTS.decode(encode(message)))


class Inside:
    """One server. Of one event loop."""

    def __init__(self, **given: Any) -> None:
        self.settings = Settings(Path("/models/tiny"), **{"variants": (("bot", "a"), ("sql", "b")), **given})
        self.log = io.StringIO()
        self.metrics = Metrics()
        self.client = _Inside(self.settings, self.metrics)
        self.client.metrics.watch(lambda: self.client.state)
        self.app = App(self.settings, self.client, self.metrics, Log(self.log))
        start = msgspec.structs.replace(_START, max_batch=self.settings.max_batch, max_queue=self.settings.max_queue)

        def build(start: Start, emit: Callable[[Event], None]) -> Served:
            self.engine = StubEngine(start, emit)
            return Served(self.engine, StubModels(), QueueFullError, lambda _: CONTEXT)

        self.worker = Worker(start, build, cast(Any, _Teller(self.client)))
        self.worker._orders.context.destroy(0)  # orders come without a socket
        self.client.worker = self.worker
        self.client._take(Ready(self.worker._state()))

    async def run(self) -> None:
        """Step for as long as this is awaited."""
        while True:
            did = self.engine.step()
            self.worker._flush()
            await asyncio.sleep(0 if did else 0.0005)

    async def ask(self, method: str, path: str, body: bytes, headers: Mapping[bytes, bytes]) -> Answer:
        """One request as ASGI gives it."""
        raw: list[bytes] = []
        told: dict[str, Any] = {"status": 0, "headers": []}
        parts = [body] if len(body) < 2 else [body[: len(body) // 2], body[len(body) // 2 :]]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                told.update(message)
            else:
                raw.append(message["body"])

        scope = {"type": "http", "method": method, "path": path, "headers": list(headers.items())}
        await self.app(scope, receive, send)
        found = {name.decode(): value.decode("latin-1") for name, value in told["headers"]}
        return Answer(told["status"], found, b"".join(raw))


_START = Start(
    orders="inproc://nobody", reports="", base="/models/tiny", variants=(("bot", "a"), ("sql", "b")), zoo=None,
    device="cpu", dtype="auto", backend="auto", budget_bytes=None, max_batch=64, max_queue=1024, step_tokens=512,
    prefix_bytes=0,
)  # fmt: skip
