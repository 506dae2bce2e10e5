"""Servers over the stub engine: in a thread of this process, or as a process of their own."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from deltacompress.serving.client import Client
from deltacompress.serving.http.app import App
from deltacompress.serving.http.server import Server, listen, server
from deltacompress.serving.logs import Log
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.settings import Settings

STUB = (sys.executable, str(Path(__file__).with_name("stub.py")))
VARIANTS = (("bot", "path/of/bot"), ("sql", "path/of/sql"))
API_KEY, ADMIN_KEY = "sk-clients-0123456789", "sk-admin-0123456789"


@dataclass
class Live:
    """A server that runs; log: what it wrote."""

    url: str
    loop: asyncio.AbstractEventLoop
    client: Client
    app: App
    log: io.StringIO
    server: Server
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=20)

    @property
    def app_connections(self) -> int:
        """But for that of `http`."""
        return len(self.server.server_state.connections) - len(self.http._transport._pool.connections)  # type: ignore[attr-defined]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def metrics(self) -> dict[tuple[str, ...], float]:
        """By name and the values of the labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.http.get("/metrics").text
        return {
            (one.name, *one.labels.values()): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }


def eventually(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something that other processes do; fails where it never comes."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


@contextmanager
def served(**given: Any) -> Iterator[Live]:
    """A server in a thread."""
    settings = Settings(Path("/models/tiny"), **{"variants": VARIANTS, "port": 0, **given})
    made: list[Live] = []
    begun, log = threading.Event(), io.StringIO()
    end = asyncio.Event()

    async def run() -> None:
        client = Client(settings, metrics := Metrics())
        try:
            await client.start(STUB)
            app = App(settings, client, metrics, Log(log))
            http = server(app, settings)
            socket = listen(settings.host, settings.port)
            task = asyncio.create_task(http.serve(sockets=[socket]))
            while not http.started:
                await asyncio.sleep(0.01)
            url = "http://{}:{}".format(*socket.getsockname())
            made.append(Live(url, asyncio.get_running_loop(), client, app, log, http))
            begun.set()
            await end.wait()
            http.should_exit = True
            await task
        finally:
            await client.stop()
            begun.set()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert begun.wait(20)
    assert made
    try:
        yield made[0]
    finally:
        made[0].http.close()
        made[0].loop.call_soon_threadsafe(end.set)
        thread.join(20)


SCRIPT = """
import json
import sys
from pathlib import Path
from deltacompress.serving.run import serve
from deltacompress.serving.settings import Limits, Settings
from deltacompress.cli.shown.console import run
stub, base, drain, limits = sys.argv[1:5]
settings = Settings(Path(base), (("bot", "a"),), port=0, drain_s=float(drain), limits=Limits(**json.loads(limits)))
ready = lambda url, notes: print(url, flush=True)
sys.exit(run(lambda: serve(settings, ready, [sys.executable, stub]), debug=False))
"""


@dataclass
class Process:
    """A server in a process of its own; log: its standard error."""

    popen: subprocess.Popen[str]
    url: str
    log: Path

    def ended(self, seconds: float = 20) -> tuple[int, str]:
        """Its exit code and what it wrote besides the lines of its log."""
        self.popen.communicate(timeout=seconds)
        told = self.log.read_text().splitlines()
        return self.popen.returncode, "\n".join(one for one in told if not one.startswith("{"))

    @property
    def engines(self) -> list[int]:
        """The processes that it started."""
        return [one.pid for one in psutil.Process(self.popen.pid).children()]
