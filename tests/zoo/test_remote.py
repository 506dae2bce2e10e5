"""What a bucket that cannot be used is told as: what is missing and what to do, none of the client's insides."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from zoo.cli_helpers import Run, failed

from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import NotAZooError, StoreError

remote = pytest.importorskip("deltacompress.zoo.store.remote", exc_type=Exception)
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def plain(message: str) -> None:
    """One line without what only the client's authors understand."""
    assert "\n" not in message
    for word in ("Debug", "Generic", "Retry", "{", "<", "169.254"):
        assert word not in message


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, and nothing where a machine would be told its role."""
    for name in remote._CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("nobody")
def test_without_credentials(run: Run) -> None:
    for verb in (["init", "s3://bucket/zoo"], ["list", "--zoo", "s3://bucket/zoo"]):
        result = run(*verb)
        failed(result, 2, "s3://bucket/zoo: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        plain(result[2].rstrip("\n"))


@pytest.mark.usefixtures("nobody")
def test_without_credentials_where_something_else_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), NotHere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(StoreError, match="no credentials; set AWS_ACCESS_KEY_ID") as error:
            Zoo.open("s3://bucket/zoo")
        server.shutdown()
    plain(str(error.value))


class NotHere(BaseHTTPRequestHandler):
    """A proxy that knows no such host."""

    def do_PUT(self) -> None:
        self.send_error(404)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.usefixtures("nobody")
def test_with_half_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            with pytest.raises(StoreError, match="half of the credentials; set both") as error:
                Zoo.open("s3://bucket/zoo")
            plain(str(error.value))


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ATTEMPTS", 1)
    for name in KEYS:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = remote.RemoteStore.open("s3://bucket/zoo")
    with pytest.raises(StoreError, match=r"cannot be reached at http://127\.0\.0\.1:9 \(AWS_ENDPOINT_URL\)") as error:
        store.put_if_absent("a", b"x")
    plain(str(error.value))


def test_a_bucket_that_is_not_there(s3_server: str) -> None:
    with pytest.raises(StoreError, match="s3://none/zoo/: no such bucket; check its name, or make it first") as error:
        Zoo.init("s3://none/zoo")
    plain(str(error.value))
    with pytest.raises(NotAZooError):
        Zoo.open(f"{s3_server}/nothing/here")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (remote.exceptions.PermissionDeniedError("403 <Error>AccessDenied"), "access denied; check AWS_ACCESS_KEY_ID"),
        (remote.exceptions.UnauthenticatedError("401"), "access denied; check AWS_ACCESS_KEY_ID"),
        (remote.exceptions.GenericError("Received redirect without LOCATION\n\nDebug source: {"), "set AWS_REGION"),
        (remote.exceptions.GenericError("What?\n\nDebug source:\nGeneric {"), r"^What\?; check the address"),
    ],
)
def test_other_answers(error: Exception, told: str) -> None:
    assert re.search(told, "; ".join(remote._why(error)))
    plain("; ".join(remote._why(error)))
