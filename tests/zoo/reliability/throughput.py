"""How quick the zoo is beside the machine it runs on: publish against the disk, verify against hashing, list."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zoo.samples import make_artifact, some_bytes

from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries.index import index_path
from deltacompress.zoo.ledger.records import VersionRecord, encode, nonce, now
from deltacompress.zoo.store.layout import blob_key, version_key


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: of raw writes with fsync, of publishing, of raw hashing with as many threads, of verify."""

    disk: float
    publish: float
    hashing: float
    verify: float


def measure(folder: Path, *, size: int = 1 << 30, parts: int = 16) -> Speeds:
    """Publish an entry of `size` bytes below `folder` (a real disk), in alternation with raw writes of as many."""
    chunk = size // parts
    raw = some_bytes("part", chunk - 8)
    make_artifact(folder / "in", {f"l.{i}.w.planes": i.to_bytes(8, "little") + raw for i in range(parts)})
    del raw
    disks, publishes = [], []
    for turn in range(3):
        disks.append(size / _timed(lambda: _write_raw(folder / "raw", folder / "in", parts)))
        shutil.rmtree(folder / "raw")
        zoo = Zoo.init(folder / f"zoo-{turn}")
        shutil.rmtree(folder / f"zoo-{turn - 1}", ignore_errors=True)
        publishes.append(size / _timed(lambda zoo=zoo: zoo.add(folder / "in", "team/big")))  # type: ignore[misc]
    blobs = [path for path in (folder / "zoo-2" / "blobs").rglob("*") if path.is_file()]
    hashing = size / _timed(lambda: _hash_raw(blobs))
    verified = size / _timed(lambda: Zoo.open(folder / "zoo-2").verify())
    return Speeds(max(disks), max(publishes), hashing, verified)


def list_seconds(folder: Path, *, entries: int = 10_000) -> tuple[float, float, float]:
    """Seconds to list that many names: without the index, with it, and of those how many on a processor."""
    make_artifact(folder / "in")
    zoo = Zoo.init(folder / "zoo")
    zoo.add_artifact(folder / "in", "team/first")
    _, entry = zoo.show("team/first")
    for number in range(entries - 1):
        changed = entry.model_copy(update={"summary": {**entry.summary, "number": number}})
        raw, name = changed.to_bytes(), f"team/m{number}"
        key = version_key(name, 1)
        record = VersionRecord(manifest=sha256_hex(raw), size=len(raw), txn=nonce(), created=now())
        for place, content in ((blob_key(sha256_hex(raw), 0), raw), (key, encode(key, record))):
            path = folder / "zoo" / place  # the format's own spelling, without ten thousand fsyncs
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    index_path(zoo.id).unlink(missing_ok=True)
    first = _timed(lambda: _listed(folder, entries))
    second = min(_timed(lambda: _listed(folder, entries)) for _ in range(5))
    begin = time.process_time()
    _listed(folder, entries)
    busy = time.process_time() - begin
    index_path(zoo.id).unlink()
    return first, second, busy


def _listed(folder: Path, entries: int) -> None:
    found = Zoo.open(folder / "zoo").list()
    if len(found) != entries or any(one.problem for one in found):
        raise RuntimeError(f"{len(found)} entries listed instead of {entries}")


def _write_raw(target: Path, source: Path, parts: int) -> None:
    """The same bytes, in as many files, each synced: what any store has to do at the least."""
    target.mkdir()
    shard = next(source.glob("*.safetensors"))
    size = shard.stat().st_size // parts
    with shard.open("rb") as file:
        for index in range(parts):
            with (target / str(index)).open("wb") as out:
                left = size
                while left and (chunk := file.read(min(left, 1 << 22))):
                    out.write(chunk)
                    left -= len(chunk)
                out.flush()
                os.fsync(out.fileno())


def _hash_raw(paths: list[Path]) -> None:
    def one(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, paths))


def _timed(work: object) -> float:
    begin = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - begin
