"""Planted faults: each is a mistake that a store like this has been shipped with, and the harness must catch every one.

A harness that finds nothing in a broken zoo proves nothing about a sound one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from zoo.reliability import interleave, kill, powerloss
from zoo.reliability.scenarios import SCENARIOS, Bench

from deltacompress.errors import DeltaCompressError
from deltacompress.zoo import Zoo
from deltacompress.zoo.care import gc
from deltacompress.zoo.ledger import blobs, txn
from deltacompress.zoo.ledger.records import OutcomeRecord
from deltacompress.zoo.store import durable, local, osfs
from deltacompress.zoo.store.base import Store, chunks_of

Find = Callable[[Bench], str | None]
Break = Callable[[], Any]


def no_fsync_of_files() -> Any:
    def write_new(path: str, source: Any) -> None:
        fd = osfs.open_(path, durable._CREATE, 0o444)
        for chunk in chunks_of(source):
            durable.write_all(fd, chunk)
        osfs.close(fd)

    return patch.object(local, "write_new", write_new)


def no_fsync_of_directories() -> Any:
    return patch.object(local, "sync_directory", lambda path: None)


def no_fsync_of_new_parents() -> Any:
    def parents(self: local.LocalStore, directory: str) -> None:
        if not os.path.isdir(directory):
            self._parents(os.path.dirname(directory))
            osfs.mkdir(directory)

    return patch.object(local.LocalStore, "_parents", parents)


def trusts_directories_of_others() -> Any:
    """A directory that is there already is taken for durable, though its maker may not have synced it yet."""

    def parents(self: local.LocalStore, directory: str) -> None:
        if os.path.isdir(directory):
            return
        self._parents(os.path.dirname(directory))
        with suppress(FileExistsError):
            osfs.mkdir(directory)
        local.sync_directory(os.path.dirname(directory))

    return patch.object(local.LocalStore, "_parents", parents)


def name_before_fsync() -> Any:
    """The final name first, then the sync."""

    def write_and_link(self: local.LocalStore, source: Any, path: str) -> bool:
        temporary = os.path.join(self.where, "tmp", os.urandom(8).hex())
        fd = osfs.open_(temporary, durable._CREATE, 0o444)
        for chunk in chunks_of(source):
            durable.write_all(fd, chunk)
        made = local._link(temporary, path)
        osfs.fsync(fd)
        osfs.close(fd)
        osfs.unlink(temporary)
        return made

    return patch.object(local.LocalStore, "_write_and_link", write_and_link)


def writes_in_place() -> Any:
    """No temporary file: the final name stands for half a file while it is written."""

    def write_and_link(self: local.LocalStore, source: Any, path: str) -> bool:
        local.write_new(path, source)
        return True

    return patch.object(local.LocalStore, "_write_and_link", write_and_link)


def gc_without_the_outcome_race() -> Any:
    """Publications that are not decided are taken for dead, without telling them."""

    def decide(store: Store, publication: str, wanted: OutcomeRecord) -> OutcomeRecord | None:
        if wanted.state == "abort":
            return wanted
        return real(store, publication, wanted)

    real = txn.decide
    return patch.object(txn, "decide", decide)


def gc_without_condemning() -> Any:
    return patch.object(gc.blobs, "condemn", lambda store, digest, generation: None)


def publisher_ignores_the_condemned() -> Any:
    def ensure(store: Store, blob: blobs.Blob, *, trusted: bool = False) -> bool:
        return store.put_if_absent(blobs.blob_key(blob.digest, 0), blob.checked)

    return patch.object(blobs, "ensure", ensure)


def gc_reads_roots_first() -> Any:
    """What is settled between the two readings belongs to neither."""

    real = txn.recover
    needed = gc.needed_digests

    @contextmanager
    def swapped() -> Iterator[None]:
        held: list[set[str]] = []

        def recover(store: Store, grace: float, report: Callable[[str], None]) -> set[str]:
            held.append(needed(store))
            return real(store, grace, report)

        with (
            patch.object(txn, "recover", recover),
            patch.object(gc, "needed_digests", lambda store, more=(): held[-1] | set(more)),
        ):
            yield

    return swapped()


def publisher_without_intent() -> Any:
    real = local.LocalStore.put_if_absent

    def put(self: local.LocalStore, key: str, source: Any) -> bool:
        return True if key.startswith("txn/intent/") else real(self, key, source)

    return patch.object(local.LocalStore, "put_if_absent", put)


def version_before_blobs() -> Any:
    """The visibility point first, the bytes behind it."""

    def publish(store: Store, what: str, needed: list[blobs.Blob], target: txn.Target, progress: Any) -> txn.Placed:
        key, record = target("0" * 32)  # type: ignore[misc]
        store.put_if_absent(key, txn.encode(key, record))
        for blob in needed:
            blobs.ensure(store, blob)
        return txn.Placed(key)

    return patch.object(txn, "publish", publish)


def trusts_blobs_that_are_there() -> Any:
    """What has the right name is taken for the right bytes: success over a zeroed blob."""
    return patch.object(blobs, "intact", lambda store, key, digest, size=None: store.exists(key))


def alias_moves_blindly() -> Any:
    """Losing the race for an alias goes unnoticed."""
    from deltacompress.zoo.ledger import tags

    class Blind:
        def __init__(self, store: Store) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put_if_absent(self, key: str, source: Any) -> bool:
            self._store.put_if_absent(key, source)
            return True

    real = tags.tag
    return patch.object(tags, "tag", lambda store, *args, **options: real(Blind(store), *args, **options))


def by_power_loss(bench: Bench) -> str | None:
    for name, _, faults in powerloss.sweep(bench, per_point=4, limit=1500):
        if faults:
            return f"power loss, {name}: {faults[0]}"
    return None


def by_kill(bench: Bench) -> str | None:
    for name in ("publish", "undelete", "gc"):
        scenario = next(one for one in SCENARIOS if one.name == name)
        points = kill.points(bench, scenario)
        for call, half in (point for first in range(9) for point in points[first::9]):  # a fault has many: soon one
            wrong, _ = kill.run_killed(bench, scenario, call, half)
            if wrong:
                return f"kill, {name}, call {call}: {wrong}"
    return None


def by_interleaving(bench: Bench) -> str | None:
    for _, _, faults in interleave.sweep(bench, stride=1, stop=True):
        if faults:
            return f"interleaving: {faults[0]}"
    return None


def by_moves(bench: Bench) -> str | None:
    for _, _, faults in interleave.sweep(bench, names=("tag | tag",), stop=True):
        if faults:
            return f"interleaving: {faults[0]}"
    return None


def by_relay(bench: Bench) -> str | None:
    for _, _, faults in interleave.relays(bench, stop=True):
        if faults:
            return f"relay: {faults[0]}"
    return None


def by_damage(bench: Bench) -> str | None:
    """Publish over a zeroed blob, be told that all is well, and look."""
    scenario = next(one for one in SCENARIOS if one.name == "publish over damage")
    place = bench.fresh(scenario)
    zoo = Zoo.open(place / "zoo")
    made = zoo.add_artifact(place / "a", "team/m")
    try:
        with patch.object(blobs, "intact", REAL_INTACT):
            zoo.pull(str(made), place / "out")
    except DeltaCompressError as error:
        return f"publish over damage: {error}"
    return None


REAL_INTACT = blobs.intact

MUTANTS: dict[str, tuple[Break, Find]] = {
    "no fsync of files": (no_fsync_of_files, by_power_loss),
    "no fsync of directories": (no_fsync_of_directories, by_power_loss),
    "no fsync of new parents": (no_fsync_of_new_parents, by_power_loss),
    "directories of others taken for durable": (trusts_directories_of_others, by_power_loss),
    "final name before fsync": (name_before_fsync, by_power_loss),
    "final name before the bytes": (writes_in_place, by_kill),
    "version before blobs": (version_before_blobs, by_kill),
    "blobs that are there are trusted": (trusts_blobs_that_are_there, by_damage),
    "gc without the outcome race": (gc_without_the_outcome_race, by_interleaving),
    "gc without condemning": (gc_without_condemning, by_interleaving),
    "publisher ignores what is condemned": (publisher_ignores_the_condemned, by_interleaving),
    "gc reads roots before publications": (gc_reads_roots_first, by_relay),
    "publisher without intent": (publisher_without_intent, by_interleaving),
    "alias moves blindly": (alias_moves_blindly, by_moves),
}


def sweep(bench: Bench, *, names: tuple[str, ...] = ()) -> Iterator[tuple[str, str | None]]:
    """(planted fault, how it was caught or None)."""
    for name, (plant, find) in MUTANTS.items():
        if names and name not in names:
            continue
        with _planted(bench, plant):
            try:
                caught = find(bench)
            except Exception as error:  # noqa: BLE001 - a zoo so broken that the harness stumbles is caught too
                caught = f"{type(error).__name__}: {error}"
        yield name, caught


@contextmanager
def _planted(bench: Bench, plant: Break) -> Iterator[None]:
    """The fault, after the bench has prepared what must be sound."""
    for scenario in SCENARIOS:
        bench.states(scenario)
    with plant():
        yield
