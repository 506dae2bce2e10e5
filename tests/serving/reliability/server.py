"""`deltacompress serve` as it is started, over generated models, and what it tells of itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from serving.reliability.models import Models
from serving.reliability.wire import Address

KEY, ADMIN_KEY = "sk-of-clients-4711", "sk-of-admins-4712"
Metrics = dict[tuple[str, ...], float]


class Server:
    """One that runs. address: where; log: its standard error."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as told:
            self.popen = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=told, text=True)
        assert self.popen.stdout is not None
        raw = ""
        for line in self.popen.stdout:
            raw += line
            if line == "}\n":
                break
        assert raw, log.read_text()
        self.url = str(json.loads(raw)["url"]).removesuffix("/v1")
        self.address = Address.of(self.url)
        self.http = httpx.Client(base_url=self.url, timeout=60, headers={"authorization": f"Bearer {KEY}"})
        (self.engine,) = psutil.Process(self.popen.pid).children()

    def metrics(self) -> Metrics:
        """By name and the values of the labels."""
        from prometheus_client.parser import text_string_to_metric_families

        told = self.http.get("/metrics").text
        families = text_string_to_metric_families(told)
        return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}

    def admin(self, verb: str, **body: Any) -> httpx.Response:
        """Of /admin."""
        return self.http.post(f"/admin/{verb}", json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Of the log."""
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith('{"time"')]
        return [one for one in found if one["event"] == event]

    def statuses(self) -> Counter[int]:
        """How often each status was logged, of completions."""
        return Counter(one["status"] for one in self.lines("request") if one["route"] == "/v1/completions")

    def memory(self) -> dict[str, int]:
        """Bytes that each process has in memory."""
        both = {"server": psutil.Process(self.popen.pid), "engine": self.engine}
        return {name: process.memory_info().rss for name, process in both.items()}

    def end(self, seconds: float = 60) -> int:
        """Tell it to end; its exit code."""
        self.http.close()
        self.popen.send_signal(signal.SIGTERM)
        self.popen.communicate(timeout=seconds)
        return self.popen.returncode


@contextmanager
def started(models: Models, folder: Path, *more: str, room: int) -> Iterator[Server]:
    """A server of these models with room for so many variants on the device."""
    argv = [sys.executable, "-m", "deltacompress", "serve", str(models.base)]
    argv += [f"{name}={path}" for name, path in models.variants.items()]
    for option, key in (("--api-key-file", KEY), ("--admin-key-file", ADMIN_KEY)):
        file = folder / option.strip("-")
        file.write_text(key)
        file.chmod(0o600)
        argv += [option, str(file)]
    argv += ["--port", "0", "--json", "--device", "cpu", "--budget", str(room * models.nbytes), *more]
    found = Server(argv, folder / "log")
    try:
        yield found
    finally:
        if found.popen.poll() is None:
            os.kill(found.popen.pid, signal.SIGKILL)
            found.popen.communicate()


def eventually(holds: Callable[[], object], seconds: float = 60) -> bool:
    """Wait for something that other processes do; whether it came."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
