"""What a power loss could leave of a sequence of verbs: the recorded calls, less any subset of what was not synced.

The model: a file's bytes are safe once fsync of the file has returned, a name (created, linked, removed, renamed) once
fsync of its directory has. Whatever is not safe may be there or not, each call by itself, in any combination; bytes
that are not safe may be missing or zero. That is weaker than any real file system, so what survives it survives those.

Each state is a dictionary, looked at through a store in memory: it must verify, show what was acknowledged before, and
nothing but a state between two verbs.
"""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.memory import MemoryStore
from zoo.reliability.scenarios import SCENARIOS, Bench, State, on_a_full_disk, report, state_of
from zoo.reliability.shim import hooked

from deltacompress.errors import DeltaCompressError
from deltacompress.reporter import SILENT
from deltacompress.zoo import Zoo
from deltacompress.zoo.care.gc import collect
from deltacompress.zoo.care.verify import verify
from deltacompress.zoo.exchange import transfer

Op = tuple[Any, ...]
Verb = Callable[[Zoo, Path], object]


@dataclass
class Log:
    """What was done to the files below `root`, in order, as ("write", inode, bytes) and the like; and what was
    acknowledged when. first: files that were there before, safely."""

    root: str
    ops: list[Op] = field(default_factory=list)
    first: dict[str, bytes] = field(default_factory=dict)
    dirs: set[str] = field(default_factory=set)
    states: list[State] = field(default_factory=list)
    _fds: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _inodes: dict[str, int] = field(default_factory=dict)
    _next: int = 0

    def hook(self, name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        result = real(*args)
        getattr(self, "_" + name, lambda *_: None)(result, *args)
        return result

    def _open_(self, fd: int, path: str, flags: int, mode: int = 0) -> None:
        if not path.startswith(self.root):
            return
        if flags & os.O_CREAT and path not in self._inodes:
            self._inodes[path] = self._new()
            self.ops.append(("name", path, self._inodes[path]))
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._fds[fd] = ("dir", path)
        else:
            self._fds[fd] = ("file", self._inode(path))

    def _close(self, _: None, fd: int) -> None:
        self._fds.pop(fd, None)

    def _write(self, took: int, fd: int, data: Any) -> None:
        if fd in self._fds:
            self.ops.append(("write", self._fds[fd][1], bytes(data[:took])))

    def _fsync(self, _: None, fd: int) -> None:
        if fd in self._fds:
            kind, what = self._fds[fd]
            self.ops.append(("sync", what) if kind == "file" else ("syncdir", what))

    def _link(self, _: None, source: str, target: str) -> None:
        self._inodes[target] = self._inode(source)
        self.ops.append(("name", target, self._inodes[target]))

    def _unlink(self, _: None, path: str) -> None:
        self._inodes.pop(path, None)
        self.ops.append(("unname", path))

    def _mkdir(self, _: None, path: str) -> None:
        self.ops.append(("mkdir", path))

    def _inode(self, path: str) -> int | str:
        """A number for files made meanwhile, the path for those that were there."""
        return self._inodes.get(path, path)  # type: ignore[return-value]

    def _new(self) -> int:
        self._next += 1
        return self._next


def record(zoo_root: Path, place: Path, verbs: list[Verb]) -> Log:
    """Run the verbs one after the other, each in a process of its own as far as the zoo can tell."""
    log = Log(str(zoo_root))
    for path in sorted(zoo_root.rglob("*")):
        if path.is_dir():
            log.dirs.add(str(path))
        else:
            log.first[str(path)] = path.read_bytes()
    log.dirs.add(str(zoo_root))
    log.states.append(state_of(Zoo.open(zoo_root).store))
    for verb in verbs:
        with hooked(log.hook):
            verb(Zoo.open(zoo_root), place)
        log.ops.append(("ack",))
        log.states.append(state_of(Zoo.open(zoo_root).store))
    return log


def states_of(log: Log, rng: random.Random, per_point: int) -> Iterator[tuple[int, dict[str, bytes]]]:
    """(verbs acknowledged, objects) after power losses at every point of the log, in any order: nothing of what was not
    safe, all of it, all but one, one alone, and `per_point` random subsets."""
    for point in rng.sample(range(len(log.ops) + 1), len(log.ops) + 1):
        ops = log.ops[:point]
        safe = _safe(ops)
        free = [i for i, op in enumerate(ops) if i not in safe and op[0] in ("write", "name", "unname", "mkdir")]
        picks: list[set[int]] = [set(), set(free)]
        sample = free if len(free) <= 6 else rng.sample(free, 6)
        picks += [{one} for one in sample] + [set(free) - {one} for one in sample]
        picks += [{one for one in free if rng.random() < share} for share in _shares(rng, per_point)]
        acked = sum(op[0] == "ack" for op in ops)
        for pick in picks:
            yield acked, _left(log, ops, safe | pick, rng)


def _shares(rng: random.Random, count: int) -> list[float]:
    return [rng.choice((0.2, 0.5, 0.8, 0.95)) for _ in range(count)]


def _safe(ops: list[Op]) -> set[int]:
    safe: set[int] = set()
    for at, op in enumerate(ops):
        if op[0] == "sync":
            safe |= {i for i in range(at) if ops[i][0] == "write" and ops[i][1] == op[1]}
        elif op[0] == "syncdir":
            names = ("name", "unname", "mkdir")
            safe |= {i for i in range(at) if ops[i][0] in names and os.path.dirname(ops[i][1]) == op[1]}
    return safe


def _left(log: Log, ops: list[Op], there: set[int], rng: random.Random) -> dict[str, bytes]:
    """Key -> bytes of what a state holds, below directories that exist."""
    data: dict[Any, bytes] = dict(log.first.items())
    names: dict[str, Any] = {path: path for path in log.first}
    dirs = set(log.dirs)
    for i, op in enumerate(ops):
        if op[0] == "write":
            kept = op[2] if i in there else rng.choice((b"", bytes(len(op[2]))))
            data[op[1]] = data.get(op[1], b"") + kept
        elif i in there and op[0] == "name":
            names[op[1]] = op[2]
        elif i in there and op[0] == "unname":
            names.pop(op[1], None)
        elif i in there and op[0] == "mkdir":
            dirs.add(op[1])

    def reachable(directory: str) -> bool:
        return directory in dirs and (directory == log.root or reachable(os.path.dirname(directory)))

    return {
        os.path.relpath(path, log.root): data.get(inode, b"")
        for path, inode in names.items()
        if reachable(os.path.dirname(path))
    }


def problem_in(log: Log, acked: int, objects: dict[str, bytes], *, on: bool) -> str | None:
    """What is wrong with a state, or None. on: also that a collection works on it and leaves it whole."""
    store = MemoryStore(objects)
    try:
        seen, before, after = state_of(store), log.states[acked], log.states[min(acked + 1, len(log.states) - 1)]
        if seen not in (before, after) and not before <= seen <= after:
            return f"shows {sorted(seen ^ before)} beyond what was acknowledged"
        found = verify(store, SILENT)
        if not found.ok:
            return found.problems[0].message
        if on:
            collect(store, grace=0, empty_trash=True)
            found = verify(store, SILENT)
            if not found.ok:
                return f"after gc: {found.problems[0].message}"
    except (DeltaCompressError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


SEQUENCES: dict[str, tuple[str, list[Verb]]] = {
    "publish, tag, rm, gc": (
        "publish",
        [
            lambda zoo, at: zoo.add_artifact(at / "c", "team/m"),
            lambda zoo, at: zoo.tag("team/m@3", "prod"),
            lambda zoo, at: zoo.rm("team/m@2"),
            lambda zoo, at: zoo.gc(grace=0),
            lambda zoo, at: zoo.undelete("team/m@2"),
        ],
    ),
    "new name, attach, gc, publish": (
        "publish",
        [
            lambda zoo, at: zoo.add_artifact(at / "c", "fresh/new"),
            lambda zoo, at: zoo.attach(*report(zoo.resolve("fresh/new").manifest)),
            lambda zoo, at: zoo.gc(grace=0),
            lambda zoo, at: zoo.add_artifact(at / "gone", "fresh/again"),
            lambda zoo, at: zoo.tag("fresh/again", "canary"),
            lambda zoo, at: zoo.gc(grace=0, empty_trash=True),
        ],
    ),
    "gc after a crash": ("gc", [lambda zoo, at: zoo.gc(grace=0), lambda zoo, at: zoo.add_artifact(at / "c", "team/m")]),
    "rm and gc on a full disk": (
        "publish",
        [
            on_a_full_disk(lambda zoo: zoo.rm("team/m@2")),
            on_a_full_disk(lambda zoo: zoo.gc(grace=0)),
            lambda zoo, at: zoo.add_artifact(at / "c", "team/m"),
        ],
    ),
    "import": ("import", [lambda zoo, at: transfer.import_(zoo, at / "in.tar")]),
    "undelete from the trash": ("undelete from the trash", [lambda zoo, at: zoo.undelete("team/gone@1")]),
}


def sweep(
    bench: Bench, *, per_point: int = 20, seed: int = 0, limit: int | None = None
) -> Iterator[tuple[str, int, list[str]]]:
    """(sequence, different states, faults) of each sequence."""
    rng = random.Random(seed)
    for name, (start, verbs) in SEQUENCES.items():
        place = bench.fresh(next(one for one in SCENARIOS if one.name == start))
        yield name, *_check(record(place / "zoo", place, verbs), rng, per_point, limit)
    place = bench.fresh(SCENARIOS[0])
    yield "two publishers", *_check(record_interleaved(place / "zoo", place), rng, per_point, limit)


def record_interleaved(zoo_root: Path, place: Path) -> Log:
    """One publisher stops before it syncs a new directory; another publishes there and is acknowledged."""
    log = record(zoo_root, place, [])
    entered = False

    def hook(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        nonlocal entered
        result = log.hook(name, args, real)
        if name == "mkdir" and str(args[0]).endswith("/v") and not entered:
            entered = True
            Zoo.open(zoo_root).add_artifact(place / "b", "two/x")
            log.ops.append(("ack",))
            log.states.append(state_of(Zoo.open(zoo_root).store))
        return result

    with hooked(hook):
        Zoo.open(zoo_root).add_artifact(place / "c", "two/x")
    log.ops.append(("ack",))
    log.states.append(state_of(Zoo.open(zoo_root).store))
    return log


def _check(log: Log, rng: random.Random, per_point: int, limit: int | None) -> tuple[int, list[str]]:
    seen: set[bytes] = set()
    faults: list[str] = []
    for acked, objects in states_of(log, rng, per_point):
        print_ = hashlib.sha256(repr((acked, sorted(objects.items()))).encode()).digest()
        if print_ in seen:
            continue
        seen.add(print_)
        if wrong := problem_in(log, acked, objects, on=len(seen) % 8 == 0):
            faults.append(wrong)
        if limit is not None and len(seen) >= limit:
            break
    return len(seen), faults
