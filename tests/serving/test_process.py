"""The server as a process: it starts, is told to end, loses its engine or its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.harness import STUB, Process, eventually
from serving.reliability.wire import Address, parsed, post

from deltacompress.serving import client
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.run import serve
from deltacompress.serving.settings import Settings

Start = Callable[..., Process]
SLOW: dict[str, Any] = {"model": "bot", "prompt": "SLOW", "max_tokens": 60, "stream": True}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def streaming(url: str, **changed: Any) -> Iterator[tuple[threading.Thread, list[str]]]:
    """A stream that runs, in a thread, and the lines that it brought."""
    lines: list[str] = []

    def read() -> None:
        with httpx.Client(timeout=20) as http, http.stream("POST", f"{url}/v1/completions", json=SLOW | changed) as got:
            lines.extend(line for line in got.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        eventually(lambda: running(url))
        yield thread, lines
    finally:
        thread.join(20)


def running(url: str) -> bool:
    return "deltacompress_requests_running 1.0" in httpx.get(f"{url}/metrics").text


def test_sigterm_ends_what_runs_and_takes_nothing_new(process: Start) -> None:
    server = process()
    (engine,) = server.engines
    with streaming(server.url) as (thread, lines):
        server.popen.terminate()
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json=SLOW)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        thread.join(20)
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 62  # 60 tokens, the end, [DONE]
    assert server.ended() == (0, "")
    assert not is_alive(engine)


def test_collections_pass_over_what_was_imported(process: Start) -> None:
    asked = {"model": "bot", "prompt": "HEAP", "max_tokens": 8}
    answer = httpx.post(f"{process().url}/v1/completions", json=asked).json()
    assert int(answer["choices"][0]["text"]) > 20_000


def test_who_reads_slowly_has_the_drain_to_read_an_answer(process: Start) -> None:
    """All of it was computed before the signal, and more than the system takes at once is still to be sent."""
    server = process(drain=300)
    to = Address.of(server.url)
    body = {"model": "bot", "prompt": ["x" * 60] * 20, "max_tokens": 1000, "logprobs": 20}
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((to.host, to.port))
        made.sendall(post("/v1/completions", json.dumps(body).encode()))
        raw = made.recv(1000)
        assert raw.startswith(b"HTTP/1.1 200 "), server.log.read_text()
        server.popen.terminate()
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        time.sleep(2)
        raw += b"".join(iter(lambda: made.recv(1 << 20), b""))
    answer = parsed(raw)
    assert len(answer.body) == int(answer.headers["content-length"]) > 4_000_000
    assert server.ended()[0] == 0


def test_what_takes_longer_than_the_drain_is_told_so(process: Start) -> None:
    server = process(drain=0.3)
    with streaming(server.url, max_tokens=3000) as (thread, lines):
        server.popen.send_signal(signal.SIGINT)
        thread.join(20)
    assert '"code":"draining"' in lines[-1]
    assert server.ended()[0] == 0


def test_what_is_served_is_closed_in_the_end(process: Start, tmp_path: Path) -> None:
    """Else the folder in which several devices met would stay."""
    server = process(str(tmp_path))
    server.popen.terminate()
    assert server.ended() == (0, "")
    assert (tmp_path / "closed").exists()


def test_a_second_signal_ends_at_once(process: Start) -> None:
    server = process(drain=1000)
    with streaming(server.url, max_tokens=3000) as (thread, lines):
        server.popen.terminate()
        server.popen.terminate()  # the same stop
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        time.sleep(0.6)
        assert thread.is_alive()
        server.popen.terminate()
        thread.join(20)
    assert '"error"' in lines[-1]
    code, told = server.ended()
    assert code == 2
    assert "1 request was cut off" in told


@pytest.mark.parametrize("how", ["killed", "crashed"])
def test_an_engine_that_dies_ends_every_stream_and_the_server(process: Start, how: str) -> None:
    server = process()
    with streaming(server.url, max_tokens=3000) as (thread, lines):
        since = time.monotonic()
        if how == "killed":
            os.kill(server.engines[0], signal.SIGKILL)
        else:
            httpx.post(f"{server.url}/v1/completions", json=SLOW | {"prompt": "CRASH", "stream": False}, timeout=20)
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json=SLOW)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_gone")
        thread.join(20)
        assert time.monotonic() - since < 5
    assert '"code":"engine_gone"' in lines[-1]
    code, told = server.ended()
    assert code == 2
    assert told.startswith("error: the engine's process was killed by signal 9;")


@pytest.mark.parametrize(
    ("limits", "prompt", "words"),
    [
        ({"silent_s": 3}, "SLOW", "has not answered for 3 seconds"),
        ({"step_s": 2}, "STUCK", "has not ended a step for 2 seconds"),
    ],
)
def test_an_engine_that_hangs_is_given_up(process: Start, limits: dict[str, float], prompt: str, words: str) -> None:
    """It is ended as if it had died, and what hung is told: in a step that does not end, where."""
    server = process(**limits)
    (engine,) = server.engines
    with streaming(server.url, prompt=prompt, max_tokens=3000) as (thread, lines):
        if prompt == "SLOW":
            os.kill(engine, signal.SIGSTOP)
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json=SLOW)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_gone")
        thread.join(20)
    assert '"code":"engine_gone"' in lines[-1]
    code, told = server.ended()
    assert code == 2
    assert f"error: the engine's process {words}; see above where its threads were" in told
    assert ("stub.py" in told and "in step" in told) == (prompt == "STUCK")
    assert not is_alive(engine)


def test_a_stop_that_had_to_wait_and_comes_while_the_engine_loads_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is raised amid the event loop, which then cancels everything there is."""
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(KeyboardInterrupt):
                serve(Settings(Path("/models/tiny"), port=0), print, (sys.executable, "-c", "input(), input()"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert not [*Path(folder).iterdir()]


@pytest.mark.parametrize("is_held", [False, True])
def test_an_engine_that_does_not_stop_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, *, is_held: bool) -> None:
    """It is killed; one that does not end even so (a driver holds it, say) is left."""
    monkeypatch.setattr(client, "_STOPS_WITHIN", 0.2 if is_held else 2)
    if is_held:
        monkeypatch.setattr(client.Client, "kill", lambda _: None)

    async def run() -> None:
        made = client.Client(Settings(Path("/models/tiny")), Metrics())
        await made.start(STUB)
        assert made._process is not None
        made._process.send_signal(signal.SIGSTOP)
        await made.stop()
        assert made._process.returncode == (None if is_held else -signal.SIGKILL)
        if is_held:
            made._process.kill()
        await made._process.wait()

    asyncio.run(run())


def test_an_engine_whose_server_dies_ends_too(process: Start) -> None:
    server = process()
    (engine,) = server.engines
    server.popen.kill()
    eventually(lambda: not is_alive(engine))


def test_an_engine_that_cannot_start_says_why(process: Start) -> None:
    server = process("/models/broken")
    assert server.url == ""
    assert server.ended() == (3, "error: model.safetensors: differs; fetch it again")


def test_a_signal_while_it_loads(process: Start) -> None:
    server = process("/models/loads", waits=False)
    eventually(lambda: server.engines)
    (engine,) = server.engines
    time.sleep(0.5)
    server.popen.terminate()
    assert server.ended(4) == (2, "error: interrupted before the server was ready; run it again")
    assert not is_alive(engine)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", PORT, STUB[1], str(port)], capture_output=True, text=True, timeout=20
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --host 127.0.0.1 --port")
    assert "Address already in use" in done.stderr
    assert "give another --port" in done.stderr
    assert done.stderr.count("\n") == 1


PORT = """
import sys
from pathlib import Path
from deltacompress.cli.shown.console import run
from deltacompress.serving.run import serve
from deltacompress.serving.settings import Settings
settings = Settings(Path("/models/tiny"), port=int(sys.argv[2]))
sys.exit(run(lambda: serve(settings, print, [sys.executable, sys.argv[1]]), debug=False))
"""
