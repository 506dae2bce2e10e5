"""Every byte of a zoo against what it should be.

Damage is told apart from loss: a blob can be damaged (its bytes differ from its name), missing (something needs it), or
not referenced (which is no fault; gc takes it). Each problem names the entries and files it hits and how to repair it.
A sampled run reads every small record and a random share of the blobs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from deltacompress.errors import IntegrityError
from deltacompress.reporter import Reporter
from deltacompress.zoo.care.check import Problem, check_records
from deltacompress.zoo.errors import StoreError
from deltacompress.zoo.ledger import blobs
from deltacompress.zoo.ledger.read import open_manifest
from deltacompress.zoo.ledger.records import VersionRecord, read
from deltacompress.zoo.ledger.referrers import head, heads
from deltacompress.zoo.ledger.versions import is_removed, states
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import (
    BLOBS,
    NAMES,
    blob_key,
    blob_of,
    condemned_key,
    referrer_key,
    version_key,
)

THREADS = 4


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """problems: everything that is not as it should be, empty if all is well. entries, blobs, bytes: how much was read;
    unreferenced, unreferenced_bytes: blobs that nothing needs.
    """

    problems: tuple[Problem, ...]
    entries: int
    blobs: int
    bytes: int
    unreferenced: int
    unreferenced_bytes: int

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(slots=True)
class _Need:
    """Who needs a blob. size: what they say it has."""

    size: int
    entries: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


def verify(
    store: Store,
    reporter: Reporter,
    *,
    only: Iterable[tuple[str, int]] | None = None,
    share: float = 1.0,
    seed: int | None = None,
) -> VerifyReport:
    """Check the zoo, or the versions `only` (name, version). share: of the blobs, 0 < share <= 1, drawn with `seed`.

    Raises:
        StoreError: something cannot be read at all.
    """
    wanted = None if only is None else set(only)
    problems = [] if wanted is not None else check_records(store)
    needs, entries = _needs(store, wanted, problems)
    places: dict[str, list[tuple[str, int]]] = {}
    for key in store.list(BLOBS):
        if (parsed := blob_of(key)) is not None:
            places.setdefault(parsed[0], []).append((key, parsed[1]))
    chosen = [digest for digest in places if wanted is None or digest in needs]
    if share < 1.0:
        chosen = random.Random(seed).sample(sorted(chosen), min(len(chosen), max(1, round(share * len(chosen)))))
    found, size = _hash_all(store, [(d, key) for d in chosen for key, _ in places[d]], reporter)
    for digest, need in needs.items():
        if digest not in places:
            problems.append(_problem("missing", store, digest, blob_key(digest, 0), need))
    unreferenced = unreferenced_bytes = 0
    for digest in chosen:
        need_ = needs.get(digest)
        good = [key for key, _ in places[digest] if found[key] is not None]
        if need_ is None:
            unreferenced += 1
            unreferenced_bytes += sum(found[key] or 0 for key in good)
        for key, generation in places[digest]:
            if found[key] is None:
                # A damaged copy that is condemned, beside a good one, is mended already and waits for gc.
                bad = not (good and store.exists(condemned_key(digest, generation)))
            else:
                bad = need_ is not None and found[key] != need_.size
            if bad:
                problems.append(_problem("damaged", store, digest, key, need_))
    count = sum(len(places[digest]) for digest in chosen)
    return VerifyReport(tuple(problems), entries, count, size, unreferenced, unreferenced_bytes)


def _needs(store: Store, wanted: set[tuple[str, int]] | None, problems: list[Problem]) -> tuple[dict[str, _Need], int]:
    """Every blob that is needed, by whom; manifests that cannot be read become problems."""
    needs: dict[str, _Need] = {}
    entries = 0
    seen_manifests: set[str] = set()

    def add(digest: str, size: int, name: str, key: str) -> None:
        need = needs.setdefault(digest, _Need(size))
        need.entries.add(name)
        need.files.add("its manifest")
        try:
            entry = open_manifest(store, digest, size, name)
        except StoreError:
            raise
        except IntegrityError as error:
            problems.append(Problem("damaged", key, (name,), "its manifest", str(error)))
            return
        for one in entry.descriptors:
            need = needs.setdefault(one.digest, _Need(one.size))
            need.entries.add(name)
            need.files.add(one.annotations.get("part") or one.annotations.get("file") or "its config")
        if digest in seen_manifests:
            return
        seen_manifests.add(digest)
        for attached, last in heads(store, digest).get(digest, {}).items():
            place = referrer_key(digest, attached, last)
            try:
                record = head(store, digest, attached, last)
            except IntegrityError as error:
                problems.append(Problem("damaged", place, (name,), "a referrer", str(error)))
                continue
            if record.state == "attached":
                add(record.manifest, record.size, f"referrer of {name}", place)

    for name, state in states(list(store.list(NAMES))).items():
        for version in state.versions:
            if wanted is not None and (name, version) not in wanted:
                continue
            key = version_key(name, version)
            try:
                if is_removed(store, state, version):
                    continue
                found = read(store, key, VersionRecord)
            except NoSuchObjectError:
                continue
            except StoreError:
                raise
            except IntegrityError as error:
                if wanted is not None:  # else check_records has told
                    problems.append(Problem("damaged", key, (f"{name}@{version}",), "its reference", str(error)))
                continue
            entries += 1
            add(found.manifest, found.size, f"{name}@{version}", key)
    return needs, entries


def _hash_all(store: Store, todo: list[tuple[str, str]], reporter: Reporter) -> tuple[dict[str, int | None], int]:
    """Key -> size if it is intact, else None; bytes read. Large blobs first, so that no thread is left with one."""
    reporter.phase("hashing", len(todo))
    sizes: dict[str, int] = {}
    for _, key in todo:
        try:
            sizes[key] = store.size(key)
        except NoSuchObjectError:
            sizes[key] = 0
    order = sorted(todo, key=lambda one: -sizes[one[1]])
    found: dict[str, int | None] = {}

    def check(one: tuple[str, str]) -> bool:
        return blobs.intact(store, one[1], one[0])

    with ThreadPoolExecutor(max(THREADS, store.workers)) as pool:
        for (_, key), good in zip(order, pool.map(check, order), strict=True):
            found[key] = sizes[key] if good else None
            reporter.step(key.rpartition("/")[2][:12])
    return found, sum(sizes.values())


def _problem(kind: Literal["missing", "damaged"], store: Store, digest: str, key: str, need: _Need | None) -> Problem:
    if need is None:
        return Problem(kind, key, (), "", f"{store.where}/{key}: damaged, but nothing needs it; `zoo gc` removes it")
    told = f"{min(need.entries)}" + (f" and {len(need.entries) - 1} more" if len(need.entries) > 1 else "")
    file = min(need.files)
    return Problem(
        kind,
        key,
        tuple(sorted(need.entries)),
        file,
        f"{store.where}/{key}: {kind}; {told} needs it ({file}); repair with `zoo fsck --repair --from COPY`, or "
        "publish the same entry again",
        digest,
        need.size,
    )
