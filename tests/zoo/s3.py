"""An S3-compatible server (moto's) on loopback, for the tests of the remote store.

moto 5.2 looks whether an object exists and writes it in two steps, on several threads: under load its conditional puts
had two winners now and then (the probe of `zoo init` refused it, rightly). So requests pass one at a time here,
which makes it the server that it stands for; they still come from many processes and in any order.

    python s3.py PORT    the server itself
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from socket import socket
from typing import Any

BUCKET = "zoo-test"
_NAMES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION")


def no_server() -> str | None:
    """Why there can be none here, or None."""
    missing = [name for name in ("obstore", "moto", "flask") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextmanager
def serving() -> Iterator[str]:
    """A server in a process of its own, with an empty bucket; its URL. The environment points there meanwhile."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, __file__, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    before = {name: os.environ.get(name) for name in _NAMES}
    os.environ.update(dict(zip(_NAMES, (address, "test", "test", "us-east-1", "us-east-1"), strict=True)))
    try:
        _create_bucket(f"{address}/{BUCKET}")
        yield f"s3://{BUCKET}"
    finally:
        server.terminate()
        server.wait(10)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _create_bucket(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def serve(port: int) -> None:
    """Run the server until it is terminated."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with lock:
            answer = app(environ, start_response)
            try:
                return list(answer)
            finally:
                if hasattr(answer, "close"):
                    answer.close()

    run_simple("127.0.0.1", port, one_at_a_time, threaded=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
