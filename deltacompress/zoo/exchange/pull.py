"""Writing an entry's files to a directory, byte for byte as they were published.

The files grow in OUT.partial, locked while a pull works there, and the directory gets its name in one rename when every
byte has been checked and synced: OUT is never half there. A pull that was interrupted goes on where it stopped; what it
finds is hashed blob by blob and cut off at the first byte that is not right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltacompress.adapters.adapter import digest_in
from deltacompress.artifact.manifest import MAX_MANIFEST_BYTES, parse_manifest
from deltacompress.artifact.records import Manifest
from deltacompress.checkpoints.header import MAX_HEADER_BYTES, parse_header
from deltacompress.errors import CheckpointError
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.output import try_lock
from deltacompress.files.places import MANIFEST, check_place
from deltacompress.reporter import Reporter
from deltacompress.zoo.entries.adapters import IDENTITY
from deltacompress.zoo.entries.artifact import runs
from deltacompress.zoo.errors import DamagedBlobError, DamagedRecordError, PullError
from deltacompress.zoo.ledger import blobs
from deltacompress.zoo.ledger.entry import BUNDLE, HEADER, SHARD_TYPES, Descriptor, EntryManifest
from deltacompress.zoo.ledger.versions import Resolved
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import CHUNK, NoSuchObjectError, Store
from deltacompress.zoo.store.durable import again, because, close, sync_directory, write_all

_Segment = bytes | Descriptor


def pull(store: Store, found: Resolved, entry: EntryManifest, out: Path, reporter: Reporter) -> Path:
    """Write the files of `entry` to the new directory `out`.

    Raises:
        PullError: `out` exists, cannot be written, or another pull works there.
        MissingBlobError, DamagedBlobError, DamagedRecordError: the zoo does not hold what it should; nothing under
            `out` then.
    """
    _check_free(out)
    files = entry.files()
    records: dict[str, tuple[int, str]] = {}
    if entry.kind == "delta":
        raw, manifest = _manifest(store, found, entry)
        records = {one.file: (one.bytes, one.sha256) for one in manifest.stored_files}
        if records.keys() != files.keys():
            raise DamagedRecordError("the entry's files are not those of its artifact", where=found)
    work = out.with_name(out.name + ".partial")
    with _locked(work, {*files, MANIFEST}):
        reporter.phase("pulling", len(files))
        for name, layers in files.items():
            with _told(work / name):
                size, digest = _write(store, found, work / name, _segments(store, found, name, layers))
            if records and records[name] != (size, digest):
                raise DamagedRecordError(f"{name}: its parts do not make up the file that was published", where=found)
            reporter.step(name)
        if entry.kind == "delta":
            with _told(work / MANIFEST):
                _write(store, found, work / MANIFEST, iter((raw,)))
        if entry.kind == "adapter":
            _check_digest(found, entry, work)
        _check_free(out)
        with _told(out):
            sync_directory(str(work))
            again(osfs.rename, str(work), str(out))
            sync_directory(str(out.parent))
    return out


def _check_digest(found: Resolved, entry: EntryManifest, work: Path) -> None:
    said = entry.summary.get(IDENTITY)
    if said is None:  # as in entries from before digests were of BLAKE3s
        return
    try:
        known = digest_in(work)
    except CheckpointError as error:
        raise DamagedRecordError(f"not the files of an adapter: {error.what}", where=found) from error
    if said != known:
        raise DamagedRecordError(f"its {IDENTITY} is not that of its files", where=found)


def _manifest(store: Store, found: Resolved, entry: EntryManifest) -> tuple[bytes, Manifest]:
    config = entry.config
    raw = blobs.read(store, config.digest, config.size, limit=MAX_MANIFEST_BYTES, what=f"{MANIFEST} of {found}")
    manifest = parse_manifest(raw, f"{found}: {MANIFEST}")
    if manifest.digest != entry.summary.get("artifact"):
        raise DamagedRecordError(f"its {MANIFEST} is that of another artifact", where=found)
    return raw, manifest


def _segments(store: Store, found: Resolved, name: str, layers: tuple[Descriptor, ...]) -> Iterator[_Segment]:
    """What a file is made of, in order: blobs, or bytes out of a bundle."""
    if layers[0].media_type not in SHARD_TYPES:
        yield from layers
        return
    where = f"{found}: {name}"
    head, rest = layers[0], list(layers[1:])
    if head.media_type != HEADER:
        raise DamagedRecordError("does not begin with a header", where=where)
    raw = blobs.read(store, head.digest, head.size, limit=MAX_HEADER_BYTES + 8, what=f"header of {name} of {found}")
    try:
        header = parse_header(raw[8:], sum(layer.size for layer in layers), where)
    except CheckpointError as error:
        raise error.retold(DamagedRecordError) from error
    bundle = b""
    if rest and rest[0].media_type == BUNDLE:
        whole = sum(span.info.nbytes for span, small in runs(header) if small)
        bundle = blobs.read(store, rest[0].digest, rest[0].size, limit=whole, what=f"small parts of {name} of {found}")
        del rest[0]
    yield raw
    taken = 0
    for span, small in runs(header):
        if small:
            yield bundle[taken : taken + span.info.nbytes]
            taken += span.info.nbytes
        elif not rest or rest[0].size != span.info.nbytes or rest[0].annotations.get("part") != span.info.name:
            raise DamagedRecordError(f"part {span.info.name} is not the next of its layers", where=where)
        else:
            yield rest.pop(0)  # none is left over: together they are as long as the header says


def _write(store: Store, found: Resolved, path: Path, segments: Iterator[_Segment]) -> tuple[int, str]:
    """Bring the file at `path` to exactly the given content, durably; its size and sha256."""
    whole = hashlib.sha256()
    position = 0
    fd = again(osfs.open_, str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        there = os.fstat(fd).st_size
        for segment in segments:
            size = len(segment) if isinstance(segment, bytes) else segment.size
            digest = sha256_hex(segment) if isinstance(segment, bytes) else segment.digest
            if there >= position + size:
                trial = whole.copy()
                if _same(fd, position, size, digest, trial):
                    whole = trial
                    position += size
                    continue
            if there > position:
                again(osfs.truncate, fd, position)
            there = 0
            whole = _append(store, found, fd, position, segment, whole, path.name)
            position += size
        if there > position:
            again(osfs.truncate, fd, position)
        again(osfs.fsync, fd)
    finally:
        close(fd)
    return position, whole.hexdigest()


def _append(
    store: Store, found: Resolved, fd: int, position: int, segment: _Segment, whole: hashlib._Hash, name: str
) -> hashlib._Hash:
    """Write one segment at `position`; the hash of the file so far."""
    if isinstance(segment, bytes):
        os.lseek(fd, position, os.SEEK_SET)
        write_all(fd, segment)
        whole.update(segment)
        return whole
    damaged = False
    for key in blobs.keys(store, segment.digest):
        trial = whole.copy()
        os.lseek(fd, position, os.SEEK_SET)
        try:
            for chunk in blobs.stream(store, key, segment.digest, segment.size):
                write_all(fd, chunk)
                trial.update(chunk)
        except NoSuchObjectError:
            continue
        except DamagedBlobError:
            damaged = True  # whatever comes next is written over it
            continue
        return trial
    part = segment.annotations.get("part", name)
    raise blobs.lost(store, segment.digest, f"{part} in {name} of {found}", damaged)


def _same(fd: int, position: int, size: int, digest: str, whole: hashlib._Hash) -> bool:
    """Whether the next `size` bytes of the file are the right ones; adds them to `whole`."""
    os.lseek(fd, position, os.SEEK_SET)
    seen = hashlib.sha256()
    while size:
        chunk = again(osfs.read, fd, min(CHUNK, size))
        if not chunk:
            return False
        seen.update(chunk)
        whole.update(chunk)
        size -= len(chunk)
    return seen.hexdigest() == digest


def _check_free(out: Path) -> None:
    with _told(out):
        if not out.name:
            raise PullError("give the directory a name of its own", where=out)
        check_place(out)
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise PullError(
                "exists already, and is no directory", where=out, way_out="choose another one, or remove it"
            )
        if first := min((one.name for one in out.iterdir()), default="") if out.exists() else "":
            raise PullError(
                f"exists already, and holds {first}", where=out, way_out="choose another directory, or remove it"
            )


@contextmanager
def _locked(work: Path, expected: set[str]) -> Iterator[None]:
    """The working directory, made if need be, to this process alone."""
    with _told(work):
        work.parent.mkdir(parents=True, exist_ok=True)
        try:
            again(osfs.mkdir, str(work))
        except FileExistsError:
            there = again(osfs.scan, str(work))
            strange = [name for name, kind in there if name not in expected or kind != "file"]
            if strange:
                raise PullError(
                    f"holds {strange[0]}, which is not of this entry", where=work, way_out="move it away"
                ) from None
        lock = again(osfs.open_, str(work), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with _told(work):
            mine = try_lock(lock)
        if not mine:
            raise PullError("another pull works there", where=work, way_out="wait for it or choose another directory")
        yield
    finally:
        with suppress(OSError):  # nothing was written through it
            close(lock)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise because(PullError, path, error) from error
