"""The conformance suite of every store: a new backend passes when this passes unchanged."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo.memory import MemoryStore
from zoo.s3 import no_server, serving

from deltacompress.zoo import create
from deltacompress.zoo.errors import CapabilityError, InvalidNameError, StoreError
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.local import LocalStore


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if why := no_server():
        pytest.skip(f"no S3 server: {why}")
    with serving() as url:
        yield url


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        (tmp_path / "store").mkdir()
        return LocalStore(tmp_path / "store")
    if request.param == "memory":
        return MemoryStore()
    url = request.getfixturevalue("server")
    return create.store_at(f"{url}/{tmp_path.name}")


def test_the_first_put_wins_and_the_second_knows(store: Store) -> None:
    assert store.put_if_absent("a/b", b"first")
    assert not store.put_if_absent("a/b", b"other")
    assert not store.put_if_absent("a/b", b"first")
    assert store.get("a/b", limit=5) == b"first"


def test_a_put_takes_chunks_and_asks_again_for_none_it_does_not_need(store: Store) -> None:
    calls = []

    def source() -> Iterator[bytes]:
        calls.append(1)
        yield from (b"", b"one", memoryview(b"two"))

    assert store.put_if_absent("x/y/z", source)
    assert not store.put_if_absent("x/y/z", source)
    assert store.get("x/y/z", limit=6) == b"onetwo"
    assert len(calls) == 1


def test_a_source_that_fails_leaves_nothing(store: Store) -> None:
    def source() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.put_if_absent("k/l", source)
    assert not store.exists("k/l")
    assert list(store.list("")) == []
    assert store.put_if_absent("k/l", b"whole")


@pytest.mark.parametrize("size", [0, 1, 4096, 3 << 20])
def test_reading_whole_and_in_parts(store: Store, size: int) -> None:
    raw = os.urandom(size)
    store.put_if_absent("blob", raw)
    assert store.size("blob") == size
    assert store.get("blob", limit=size) == raw
    assert b"".join(store.stream("blob")) == raw
    for offset, length in ((0, 5), (1, 3), (size // 2, None), (max(0, size - 1), 10)):
        end = None if length is None else offset + length
        assert b"".join(store.stream("blob", offset=offset, length=length)) == raw[offset:end]


def test_what_is_not_there(store: Store) -> None:
    assert not store.exists("no/such")
    with pytest.raises(NoSuchObjectError):
        store.get("no/such", limit=9)
    with pytest.raises(NoSuchObjectError):
        store.size("no/such")
    with pytest.raises(NoSuchObjectError):
        list(store.stream("no/such"))
    store.delete("no/such")
    store.move("no/such", "trash/no/such")
    assert list(store.list("")) == []


def test_an_object_longer_than_expected_is_refused(store: Store) -> None:
    store.put_if_absent("long", bytes(100))
    with pytest.raises(StoreError, match="larger than"):
        store.get("long", limit=99)


def test_listing_is_by_any_start_of_a_key_and_sorted(store: Store) -> None:
    keys = ["a/1", "a/10", "a/2", "a/b/c", "ab/1", "b"]
    for key in reversed(keys):
        store.put_if_absent(key, key.encode())
    assert list(store.list("")) == keys
    assert list(store.list("a/")) == ["a/1", "a/10", "a/2", "a/b/c"]
    assert list(store.list("a/1")) == ["a/1", "a/10"]
    assert list(store.list("a")) == ["a/1", "a/10", "a/2", "a/b/c", "ab/1"]
    assert list(store.list("c/")) == []
    assert list(store.strays()) == []


def test_a_stamp_is_of_one_content(store: Store) -> None:
    """Whatever a listing tells of an object's content changes with it."""
    seen = set()
    for content in (b"one", b"two", b"six"):
        store.put_if_absent("a/1", content)
        store.put_if_absent("a/2", b"other")
        assert [key for key, _ in store.stamps("a/")] == ["a/1", "a/2"]
        seen.add(dict(store.stamps("a/"))["a/1"])
        store.delete("a/1")
    assert seen == {None} or (len(seen) == 3 and None not in seen)


def test_moving_and_deleting_may_be_done_twice(store: Store) -> None:
    store.put_if_absent("a/b", b"x")
    for _ in range(2):
        store.move("a/b", "trash/a/b")
    assert list(store.list("")) == ["trash/a/b"]
    assert store.get("trash/a/b", limit=1) == b"x"
    store.put_if_absent("a/b", b"x")
    store.move("a/b", "trash/a/b")
    for _ in range(2):
        store.delete("trash/a/b")
    assert list(store.list("")) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", "a//b", ".a", "a b", "a\nb", "é", "a" * 300, "a\0"])
def test_keys_that_could_lead_elsewhere_are_refused(store: Store, key: str) -> None:
    with pytest.raises(InvalidNameError):
        store.put_if_absent(key, b"x")
    with pytest.raises(InvalidNameError):
        store.get(key, limit=1)


def test_one_of_many_writers_wins(store: Store) -> None:
    for number in range(5):
        barrier, won = threading.Barrier(8), []

        def put(i: int, number: int = number, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            if store.put_if_absent(f"race/{number}", b"%d" % i * 1000):
                won.append(i)

        threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(f"race/{number}", limit=1000) == b"%d" % won[0] * 1000


def test_the_probe_passes(store: Store) -> None:
    assert "put-if-absent" in create.probe(store)
    assert list(store.list("")) == []


def test_a_store_that_ignores_conditional_puts_is_refused() -> None:
    class Overwrites(MemoryStore):
        def put_if_absent(self, key: str, source: object) -> bool:
            self.objects[key] = source  # type: ignore[assignment]
            return True

    with pytest.raises(CapabilityError, match="conditional puts"):
        create.probe(Overwrites())


def test_a_store_that_says_so_but_keeps_the_last_is_refused() -> None:
    class Lies(MemoryStore):
        def put_if_absent(self, key: str, source: object) -> bool:
            fresh = key not in self.objects
            self.objects[key] = source  # type: ignore[assignment]
            return fresh

    with pytest.raises(CapabilityError, match="conditional puts"):
        create.probe(Lies())
