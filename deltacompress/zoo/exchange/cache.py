"""The cache of entries: directories named by the digest of their manifest, pulled once and verified.

An alias that moves gives another directory, and two zoos share what is the same. What lies there already is believed no
more than a download: no links, no other files, every byte hashed; if anything differs, it is pulled again. One process
at a time works on one entry. Whoever takes a directory holds it, by a lock on it, until it lets go or its process ends:
where the cache may take so many bytes only, the least recently used that nobody holds make room for what is pulled.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

from deltacompress.arguments import size_in_bytes
from deltacompress.artifact.manifest import read_manifest
from deltacompress.errors import InputError
from deltacompress.files.hashing import hash_file
from deltacompress.files.output import try_lock, wait_for_lock
from deltacompress.files.places import MANIFEST
from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.errors import CacheFullError, PullError
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.read import need_kind
from deltacompress.zoo.store.durable import because
from deltacompress.zoo.zoo import Zoo

CACHE, LIMIT = "DELTACOMPRESS_CACHE", "DELTACOMPRESS_CACHE_BYTES"
_QUICK = 1 << 30
"""Bytes that are pulled in seconds. That is not told, so that a damaged entry is one line of a log."""
_held: dict[Path, list[int]] = {}
_holding = Lock()


def pulled(zoo: Zoo, name: str, *, reporter: Reporter = SILENT) -> Path:
    """The cached directory of an entry, pulled or checked; held from here on.

    Raises:
        ZooError: no such entry, a damaged one, or the cache cannot be written, or has no room for it.
    """
    found, entry = zoo.show(name)
    need_kind(found, entry, "delta", "adapter")
    root = _cache()
    target = root / found.manifest
    with _locked(root / f"{found.manifest}.lock") as lock:
        os.utime(lock)  # the most recently used
        if os.path.lexists(target):
            if _is_whole(target, entry):
                _hold(target)
                return target
            reporter.note(f"{target}: not what it should be; pulling {found} again")
            _remove(target)
        size = sum(layer.size for layer in entry.layers) + (entry.config.size if entry.kind == "delta" else 0)
        _make_room(root, size, found.manifest)
        zoo.pull(str(found), target, reporter=reporter if size > _QUICK else SILENT)
        _hold(target)
    return target


def let_go(directory: Path) -> None:
    """Of a cached directory, once for each time that it was taken; of any other, nothing."""
    with _holding:
        mine = _held.get(directory, [])
        if mine:
            os.close(mine.pop())
        if not mine:
            _held.pop(directory, None)


def _hold(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise because(PullError, directory, error) from error
    with _holding:
        _held.setdefault(directory, []).append(descriptor)


def _make_room(root: Path, size: int, coming: str) -> None:
    """Remove the least recently used, but for what is held, until so many bytes can come. coming: is not removed.

    Raises:
        CacheFullError: that does not make room; nothing that could stay was removed for it.
    """
    if (limit := _limit()) is None:
        return
    there = [one for one in _cached(root) if not one.name.startswith(coming)]
    taken = {one: _size(one) for one in sorted(there, key=_last_used)}
    lacking = sum(taken.values()) + size - limit
    with ExitStack() as locks:
        going = []
        for one, nbytes in taken.items():
            if lacking <= 0:
                break
            if nbytes and _is_free(one, locks):
                going.append(one)
                lacking -= nbytes
        if lacking > 0:
            told = f"no room for {size:,} bytes: {max(size - lacking, 0):,} of {limit:,} are not in use"
            raise CacheFullError(told, where=root, way_out=f"set {LIMIT} higher")
        for one in going:
            _remove(one)


def _limit() -> int | None:
    """Bytes that the cache may take."""
    if not (given := os.environ.get(LIMIT)):
        return None
    try:
        return size_in_bytes(given, f"{LIMIT}={given}", such_as="200GB")
    except InputError as error:
        raise error.retold(PullError) from error


def _cached(root: Path) -> list[Path]:
    """Directories of entries, and of pulls that have not ended."""
    is_own = re.compile(r"[0-9a-f]{64}(\.partial)?").fullmatch
    return [one for one in root.iterdir() if is_own(one.name) and not one.is_symlink() and one.is_dir()]


def _last_used(directory: Path) -> float:
    with suppress(OSError):
        return _lock_of(directory).stat().st_mtime
    return 0.0


def _lock_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name[:64]}.lock")


def _size(directory: Path) -> int:
    """Bytes; 0 of one that goes meanwhile."""
    with suppress(OSError):
        return sum(one.lstat().st_size for one in directory.iterdir())
    return 0


def _is_free(directory: Path, locks: ExitStack) -> bool:
    """Whether nobody holds it or works on it; if so, nobody will as long as `locks` last.

    Raises:
        PullError: it cannot be locked.
    """
    for path, flags in ((_lock_of(directory), os.O_RDWR | os.O_CREAT), (directory, os.O_RDONLY | os.O_DIRECTORY)):
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        locks.callback(os.close, descriptor)
        try:
            if not try_lock(descriptor):
                return False
        except OSError as error:
            raise because(PullError, path, error) from error
    return True


def _cache() -> Path:
    """The cache directory, this user's own and no link."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get(CACHE) or Path(home) / "deltacompress" / "entries")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        refused = because(PullError, root, error)
        raise refused.retold(PullError, way_out=f"{refused.way_out} (set {CACHE} to use another cache)") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PullError("not a directory of yours", where=root, way_out=f"set {CACHE} to one that is")
    return root


def _is_whole(directory: Path, entry: EntryManifest) -> bool:
    """Whether `directory` holds exactly the files of `entry`, byte for byte."""
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return False
        if entry.kind == "delta":
            if hash_file(directory / MANIFEST) != (entry.config.digest, entry.config.size):
                return False
            manifest = read_manifest(directory)
            wanted = {one.file: (one.sha256, one.bytes) for one in manifest.stored_files}
            wanted[MANIFEST] = (entry.config.digest, entry.config.size)
        else:
            wanted = {name: (layers[0].digest, layers[0].size) for name, layers in entry.files().items()}
        return {one.name for one in directory.iterdir()} == wanted.keys() and all(
            hash_file(directory / name) == known for name, known in wanted.items()
        )
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Remove what lies in the place of a cached directory; a link itself, never what it leads to."""
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise because(PullError, path, error) from error


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Wait for whoever else works on this entry; the descriptor.

    Raises:
        PullError: the lock cannot be made or taken.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise because(PullError, path, error) from error
    try:
        try:
            wait_for_lock(fd)
        except OSError as error:
            raise because(PullError, path, error) from error
        yield fd
    finally:
        os.close(fd)
