"""A zoo in an S3-compatible object store, through obstore (the extra `zoo`).

put_if_absent is one conditional put (If-None-Match: *). Its answer can get lost, and the next try then finds the
object there; so "exists already" after a lost answer is followed by reading back: whoever wrote those very bytes won.
Records that race carry a nonce, so no two writers of one key have the same bytes; for blobs it does not matter who won.

One put is one request (tried again here, not in the client, which would not tell that it did): a blob must fit into
memory and into the 5 GB that S3 takes at once. Credentials, region and endpoint come from the AWS_* environment
variables.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typing_extensions import override

from deltacompress.errors import install_hint
from deltacompress.zoo.errors import CapabilityError, NotAZooError, StoreError
from deltacompress.zoo.store.base import (
    CHUNK,
    NoSuchObjectError,
    Source,
    Store,
    check_key,
    check_prefix,
    chunks_of,
    is_key,
)

try:
    import obstore
    from obstore import exceptions
    from obstore.store import S3Store
except ImportError as error:
    raise CapabilityError(f"an s3:// zoo needs obstore: {install_hint('zoo')}") from error

if TYPE_CHECKING:
    from obstore import ObjectMeta

_ATTEMPTS = 5
_CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables of which one says where credentials come from, or that none are needed."""
_METADATA = ("169.254.169.254", "169.254.170.2", "/latest/api/token", "/latest/meta-data/")
_NO_CREDENTIALS = "no credentials"
_GIVE_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read), or run where the machine has a "
    "role"
)
_ONCE: Any = {"max_retries": 0}


class RemoteStore(Store):
    """The store under a bucket's prefix; make it with `RemoteStore.open`."""

    workers = 8  # each call waits for the network

    def __init__(self, store: Any, once: Any, url: str) -> None:
        self._store = store
        self._once = once  # never tries again by itself, so that an answer is known to be the answer to this try
        self._url = url

    @classmethod
    def open(cls, url: str) -> RemoteStore:
        """The store at s3://bucket/prefix; asks nothing of the server yet.

        Raises:
            NotAZooError: no such URL.
            StoreError: the configuration cannot be used, or there are no credentials.
        """
        parts = urlsplit(url)
        prefix = parts.path.strip("/")
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise NotAZooError("write it as s3://bucket/prefix", where=url)
        options: Any = {"allow_http": True} if _endpoint().startswith("http://") else {}
        if not any(os.environ.get(name) for name in _CREDENTIALS) and not _machine_may_have_a_role():
            raise StoreError(_NO_CREDENTIALS, where=url, way_out=_GIVE_CREDENTIALS)
        with _told(url):
            store, once = (
                S3Store(
                    parts.netloc,
                    prefix=prefix or None,
                    client_options=options,
                    config={"conditional_put": "etag"},
                    retry_config=retry,
                )
                for retry in (None, _ONCE)
            )
        return cls(store, once, f"s3://{parts.netloc}/{prefix}".rstrip("/"))

    @property
    def where(self) -> str:
        return self._url

    @override
    def put_if_absent(self, key: str, source: Source) -> bool:
        check_key(key)
        if not isinstance(source, bytes) and self.exists(key):
            return False  # spares sending what may be long
        data = b"".join(chunks_of(source))
        last: Exception | None = None
        for attempt in range(_ATTEMPTS):
            time.sleep(random.random() * 0.1 * attempt**2)
            try:
                obstore.put(self._once, key, data, mode="create", use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                # A plain answer to the first try; after a lost answer it may be this very writer's object.
                return last is not None and self._holds(key, data)
            except exceptions.BaseError as error:
                last = error
            else:
                return True
        raise _refused(f"{self._url}/{key}", last or exceptions.BaseError())

    @override
    def get(self, key: str, *, limit: int) -> bytes:
        with _told(f"{self._url}/{key}", key):
            found = obstore.get(self._store, check_key(key))
            if found.meta["size"] > limit:
                raise StoreError(f"larger than the {limit} bytes that this object may have", where=f"{self._url}/{key}")
            return bytes(found.bytes())

    @override
    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        size = self.size(key)
        end = size if length is None else min(size, offset + length)
        if end <= offset:
            return
        with _told(f"{self._url}/{key}", key):
            found = obstore.get(self._store, key, options={"range": (offset, end)})
            for chunk in found.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    @override
    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NoSuchObjectError:
            return False
        return True

    @override
    def size(self, key: str) -> int:
        with _told(f"{self._url}/{key}", key):
            return int(obstore.head(self._store, check_key(key))["size"])

    @override
    def list(self, prefix: str) -> Iterator[str]:
        yield from (key for key, _ in self.stamps(prefix))

    @override
    def stamps(self, prefix: str) -> Iterator[tuple[str, str | None]]:
        """The ETag."""
        found = self._objects(check_prefix(prefix))
        yield from sorted((meta["path"], meta["e_tag"]) for meta in found if is_key(meta["path"]))

    @override
    def move(self, key: str, target: str) -> None:
        with _told(f"{self._url}/{key}"):
            try:
                obstore.copy(self._store, check_key(key), check_key(target))
            except (exceptions.NotFoundError, FileNotFoundError):
                return  # somebody has moved it
        self.delete(key)

    @override
    def prepare(self, key: str) -> None:
        """A bucket has no directories."""

    @override
    def delete(self, key: str) -> None:
        with _told(f"{self._url}/{key}"):
            try:
                obstore.delete(self._store, check_key(key))
            except (exceptions.NotFoundError, FileNotFoundError):
                return

    @override
    def reserve(self) -> None:
        """A bucket has no bounds."""

    @override
    def release(self, part: int) -> None:
        """A bucket has no reserve."""

    @override
    def strays(self) -> Iterator[str]:
        yield from sorted(meta["path"] for meta in self._objects("") if not is_key(meta["path"]))

    @override
    def sweep(self, older_than: float) -> int:
        """Nothing is left behind here but by a probe that was interrupted."""
        now = datetime.now(UTC)
        written = {meta["path"]: meta["last_modified"] for meta in self._objects("tmp/")}
        old = [key for key, time in written.items() if (now - time).total_seconds() >= older_than]
        for key in old:
            self.delete(key)
        return len(old)

    def _objects(self, prefix: str) -> Iterator[ObjectMeta]:
        """What the server tells of each; obstore lists by whole path segments only."""
        folder, _, _ = prefix.rpartition("/")
        with _told(f"{self._url}/{prefix}"):
            for batch in obstore.list(self._store, folder or None):
                for meta in batch:
                    if meta["path"].startswith(prefix):
                        yield meta

    def _holds(self, key: str, data: bytes) -> bool:
        return self.size(key) == len(data) and b"".join(self.stream(key)) == data


@contextmanager
def _told(what: str, key: str | None = None) -> Iterator[None]:
    """obstore's errors as StoreError; with `key`, a missing object as NoSuchObjectError."""
    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        if key is not None:
            raise NoSuchObjectError(key) from error
        raise _refused(what, error) from error
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise _refused(what, error) from error


def _refused(where: str, error: Exception) -> StoreError:
    """An error of the client as one of ours."""
    what, way_out = _why(error)
    return StoreError(what, where=where, way_out=way_out)


def _why(error: Exception) -> tuple[str, str]:
    """What an error of the client means for the user, and the way out; nothing about its insides."""
    told = str(error).partition("Debug source")[0]
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return "access denied", "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what they may do in this bucket"
    if any(part in told for part in _METADATA):
        return _NO_CREDENTIALS, _GIVE_CREDENTIALS
    if "Missing" in told and "Key" in told:
        return "half of the credentials", "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if "NoSuchBucket" in told:
        return "no such bucket", "check its name, or make it first"
    if "redirect" in told:
        return "the bucket is in another region", "set AWS_REGION to it"
    if "error sending request" in told:
        at = f" at {_endpoint()} (AWS_ENDPOINT_URL)" if _endpoint() else ""
        return f"the server cannot be reached{at}", "check the address and the network"
    return " ".join(told.split())[:200], "check the address, the credentials and the network"


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""


def _machine_may_have_a_role() -> bool:
    """Whether something answers where machines are told their role; the client would wait for minutes to find out."""
    place = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    try:
        socket.create_connection((place.hostname or "", place.port or 80), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True
