"""A store in memory: what is left after a power loss, and a third backend for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

from deltacompress.zoo.store.base import NoSuchObjectError, Source, check_key, check_prefix, chunks_of, is_key


class MemoryStore:
    """Objects in a dictionary that the caller may look into and change."""

    where = "memory"
    workers = 1

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects

    def put_if_absent(self, key: str, source: Source) -> bool:
        if check_key(key) in self.objects:
            return False
        raw = b"".join(bytes(chunk) for chunk in chunks_of(source))
        return self.objects.setdefault(key, raw) is raw

    def get(self, key: str, *, limit: int) -> bytes:
        if check_key(key) not in self.objects:
            raise NoSuchObjectError(key)
        raw = self.objects[key]
        if len(raw) > limit:
            from deltacompress.zoo.errors import StoreError

            raise StoreError(f"{key}: larger than {limit} bytes")
        return raw

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        raw = self.get(key, limit=1 << 60)
        yield raw[offset : None if length is None else offset + length]

    def exists(self, key: str) -> bool:
        return check_key(key) in self.objects

    def size(self, key: str) -> int:
        return len(self.get(key, limit=1 << 60))

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        yield from sorted(key for key in self.objects if key.startswith(prefix) and is_key(key))

    def stamps(self, prefix: str) -> Iterator[tuple[str, str | None]]:
        for key in self.list(prefix):
            yield key, None

    def move(self, key: str, target: str) -> None:
        if check_key(key) in self.objects:
            self.objects.setdefault(check_key(target), self.objects[key])
            del self.objects[key]

    def prepare(self, key: str) -> None: ...

    def delete(self, key: str) -> None:
        self.objects.pop(check_key(key), None)

    def reserve(self) -> None: ...

    def release(self, part: int) -> None: ...

    def strays(self) -> Iterator[str]:
        yield from sorted(key for key in self.objects if not is_key(key))

    def sweep(self, older_than: float) -> int:
        left = list(self.list("tmp/"))
        for key in left:
            self.delete(key)
        return len(left)
