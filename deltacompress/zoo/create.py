"""`zoo init` and opening: which store a path or URL means, and whether it can carry a zoo.

A store is tried before it is trusted: two puts of one key, then eight at once. One that lets the second writer win (an
object store that ignores If-None-Match, a file system whose link() overwrites) would lose versions without a word.
"""

from __future__ import annotations

import errno
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltacompress.files.places import check_place
from deltacompress.zoo.errors import CapabilityError, ConflictError, NotAZooError, StoreError
from deltacompress.zoo.ledger.records import ZooRecord, encode, nonce, read
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.durable import again, because, sync_directory
from deltacompress.zoo.store.layout import TEMPORARY, TRASH, ZOO
from deltacompress.zoo.store.local import LocalStore

_RACERS = 8
_REMOTE = ("s3://",)


def store_at(location: str | os.PathLike[str]) -> Store:
    """The store that a path or an s3:// URL means.

    Raises:
        NotAZooError: no such directory.
        CapabilityError: an URL, and the extra `zoo` is not installed.
    """
    text = os.fspath(location)
    if text.startswith(_REMOTE):
        from deltacompress.zoo.store.remote import RemoteStore

        return RemoteStore.open(text)
    if "://" in text:
        raise NotAZooError("give a directory or an s3://bucket/prefix URL", where=text)
    if Path(text).is_file():
        raise NotAZooError("a file", where=text, way_out="a zoo is a directory, make one with `zoo init`")
    _check_link(text)
    if not Path(text).is_dir():
        raise NotAZooError("no such directory", where=text, way_out=f"make a zoo there with `zoo init {text}`")
    return LocalStore(Path(text))


def open_store(location: str | os.PathLike[str]) -> tuple[Store, ZooRecord]:
    """The store of an existing zoo, and its zoo.json.

    Raises:
        NotAZooError: nothing there, or no zoo.
        ZooFormatError, DamagedRecordError: zoo.json is of a newer version, or damaged.
    """
    store = store_at(location)
    try:
        return store, read(store, ZOO, ZooRecord)
    except NoSuchObjectError:
        raise NotAZooError(f"not a zoo (no {ZOO})", where=store.where, way_out="make one with `zoo init`") from None


def init(location: str | os.PathLike[str]) -> tuple[Store, ZooRecord]:
    """Make a zoo in a new or empty place.

    Raises:
        ConflictError: a zoo is there already, or something else.
        OutputError: the place lies inside a zoo or an artifact.
        CapabilityError: the store cannot do what a zoo needs.
        StoreError: it cannot be written.
    """
    text = os.fspath(location)
    if "://" not in text:
        _check_link(text)
        check_place(text)
        _make_directory(os.path.abspath(text))
    store = store_at(location)
    there = [key for key in store.list("") if not key.startswith((TEMPORARY, TRASH))]
    if ZOO in there:
        raise ConflictError("a zoo already", where=store.where, way_out="use it, or choose another place")
    strange = [*there, *store.strays()]
    if strange:
        raise ConflictError(f"holds {strange[0]}", where=store.where, way_out="give an empty or new place for a zoo")
    capabilities = probe(store)
    record = ZooRecord(id=nonce(), capabilities=capabilities)
    store.reserve()
    if not store.put_if_absent(ZOO, encode(ZOO, record)):
        raise ConflictError("somebody else has just made a zoo here", where=store.where)
    return store, record


def probe(store: Store) -> tuple[str, ...]:
    """What the store can do; all of it is needed.

    Raises:
        CapabilityError: names what it cannot do.
    """
    key = f"{TEMPORARY}probe-{secrets.token_hex(8)}"
    race = key + "-race"
    try:
        if not store.put_if_absent(key, b"first") or store.get(key, limit=5) != b"first":
            raise CapabilityError("does not give back what was put there", where=store.where)
        if store.put_if_absent(key, b"other") or store.get(key, limit=5) != b"first":
            raise _ignored(store)
        with ThreadPoolExecutor(_RACERS) as pool:
            texts = [b"%04d" % i for i in range(_RACERS)]
            made = list(pool.map(lambda text: store.put_if_absent(race, text), texts))
        won = [text for text, first in zip(texts, made, strict=True) if first]
        if len(won) != 1 or store.get(race, limit=4) != won[0]:
            raise _ignored(store)
        if sorted(store.list(key)) != [key, race]:
            raise CapabilityError("a listing does not show what was put just before", where=store.where)
        if b"".join(store.stream(key, offset=1, length=3)) != b"irs":
            raise CapabilityError("does not give parts of an object", where=store.where)
    finally:
        store.delete(key)
        store.delete(race)
    if store.exists(key):
        raise CapabilityError("does not delete", where=store.where)
    return ("consistent-list", "put-if-absent", "ranges")


def _ignored(store: Store) -> CapabilityError:
    return CapabilityError(
        "lets a second writer replace an object (it ignores conditional puts), which would lose versions",
        where=store.where,
        way_out="use a local directory or an object store with If-None-Match",
    )


def _check_link(path: str) -> None:
    """A directory that is not mounted is not made in its place."""
    if os.path.islink(path) and not os.path.exists(path):
        raise NotAZooError(
            f"a symbolic link to {os.readlink(path)}, where nothing is", where=path, way_out="mount or make that first"
        )


def _make_directory(path: str) -> None:
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        for directory in reversed(missing):
            again(osfs.mkdir, directory)
            sync_directory(os.path.dirname(directory))
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise ConflictError("a file is in the way, or somebody else makes a zoo there", where=missing[0]) from error
        raise because(StoreError, missing[0], error) from error
