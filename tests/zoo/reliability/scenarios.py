"""Every verb that writes, each on a zoo where it has something to do, and what must hold afterwards.

`State` is all that a user can see: which versions there are, with which manifest, and where the aliases point. An
interrupted verb must leave the state before it or the state after it, never a third one.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from zoo.samples import files_of, make_artifact, sample_parts

from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries.artifact import Described, describe
from deltacompress.zoo.exchange import transfer
from deltacompress.zoo.ledger import blobs, txn
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import FILE, REPORT, Descriptor, EntryManifest
from deltacompress.zoo.ledger.names import parse
from deltacompress.zoo.ledger.records import IntentRecord, OutcomeRecord, VersionRecord, encode, nonce, now
from deltacompress.zoo.ledger.referrers import attached
from deltacompress.zoo.ledger.tags import history
from deltacompress.zoo.ledger.versions import is_removed, resolve, states
from deltacompress.zoo.store import local, osfs
from deltacompress.zoo.store.base import Store
from deltacompress.zoo.store.layout import INTENTS, NAMES, version_key

State = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scenario:
    """run: the verb, on an opened zoo; place: a directory of its own for what it reads and writes besides.

    damaged: the zoo has one damaged blob to begin with. steps: it makes several things, each whole or not at all.
    """

    name: str
    run: Callable[[Zoo, Path], object]
    prepare: Callable[[Zoo, Path], object] | None = None
    damaged: bool = False
    steps: bool = False


def state_of(store: Store) -> State:
    """What a user can see."""
    seen: set[tuple[str, str]] = set()
    for name, state in states(list(store.list(NAMES))).items():
        for version in state.versions:
            if not is_removed(store, state, version):
                manifest = resolve(store, parse(f"{name}@{version}")).manifest
                seen.add((f"{name}@{version}", manifest))
                seen |= {(f"{name}@{version} referrer", record.manifest) for record in attached(store, manifest)}
        for alias in state.aliases:
            seen.add((f"{name}@{alias}", str(history(store, name, alias)[-1].version)))
    return frozenset(seen)


def report(subject: str, text: bytes = b"a report") -> tuple[EntryManifest, list[Blob]]:
    """A referrer of the manifest `subject`."""
    blob = Blob(sha256_hex(text), len(text), lambda: (text,), "a report")
    layer = Descriptor(media_type=FILE, digest=blob.digest, size=blob.size, annotations={"file": "report.json"})
    config = Descriptor(media_type=REPORT, digest=blob.digest, size=blob.size)
    return EntryManifest(kind="report", config=config, layers=(layer,), subject=subject), [blob]


def build(root: Path) -> Path:
    """root/zoo, with something of everything, beside the artifacts root/a, b, c."""
    for name in ("a", "b", "c", "gone"):
        parts = sample_parts(name, big=2, small=2, shared=1)
        make_artifact(root / name, parts, seed=name, files={"config.json": b"{}"})
    zoo = Zoo.init(root / "zoo")
    zoo.add_artifact(root / "a", "team/m")
    zoo.add_artifact(root / "b", "team/m")
    zoo.tag("team/m@1", "prod")
    zoo.add_artifact(root / "b", "team/old")
    zoo.add_artifact(root / "gone", "team/gone")
    zoo.attach(*report(zoo.resolve("team/gone@1").manifest))
    zoo.attach(*report(zoo.resolve("team/m@1").manifest, b"kept"))
    zoo.rm("team/gone@1")
    shutil.copytree(root / "zoo", root / "copy")
    other = Zoo.init(root / "other")
    for name in ("b", "c"):
        other.add_artifact(root / name, f"far/{name}")
    other.attach(*report(other.resolve("far/b@1").manifest))
    transfer.export(other, ["far/b", "far/c"], root / "in.tar")
    return root


def leave_unfinished(zoo: Zoo, place: Path) -> None:
    """As two publishers would that died: one undecided, one committed, neither visible; and a temporary file."""
    described = describe(place / "c")
    _leave(zoo, described, commit=False)
    _leave(zoo, described, commit=True)
    (Path(zoo.where) / "tmp").mkdir(exist_ok=True)
    (Path(zoo.where) / "tmp" / "1-left").write_bytes(b"half")


def _leave(zoo: Zoo, described: Described, *, commit: bool) -> None:
    mine, raw = nonce(), described.entry.to_bytes()
    manifest = Blob(described.entry.digest, len(raw), lambda: (raw,), "manifest")
    needed = [*described.blobs, manifest]
    key = INTENTS + mine
    intent = IntentRecord(what="left", blobs=tuple(sorted(blob.digest for blob in needed)), created=now())
    zoo.store.put_if_absent(key, encode(key, intent))
    for blob in needed if commit else needed[:2]:
        blobs.ensure(zoo.store, blob)
    if commit:
        place = version_key("team/left", 1)
        record = VersionRecord(manifest=described.entry.digest, size=len(raw), txn=mine, created=now())
        raw_record = encode(place, record).decode()
        txn.decide(zoo.store, mine, OutcomeRecord(state="commit", target=place, raw=raw_record, nonce=nonce()))


def damage(zoo: Zoo, place: Path) -> None:
    """Zero the longest blob of team/m@1."""
    entry = zoo.show("team/m@1")[1]
    digest = max(entry.layers, key=lambda layer: layer.size).digest
    path = Path(zoo.where) / "blobs" / "sha256" / digest[:2] / digest
    size = path.stat().st_size
    path.chmod(0o644)
    path.write_bytes(bytes(size))


def on_a_full_disk(work: Callable[[Zoo], object]) -> Callable[[Zoo, Path], object]:
    """`work` where there is no room but that of the reserve: the first part's, the second's for moves to the trash."""

    def run(zoo: Zoo, place: Path) -> None:
        def full(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                part = 2 if len(args) > 1 and "/trash/" in str(args[1]) else 1
                if (Path(zoo.where) / "tmp" / f"reserve-{part}").exists():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args)

            return call

        with ExitStack() as stack:  # on top of what a sweep has put in the place of these calls
            for name in ("write", "mkdir", "link"):
                stack.enter_context(patch.object(osfs, name, full(getattr(osfs, name))))
            work(zoo)

    return run


def collected(zoo: Zoo, place: Path) -> None:
    zoo.gc(grace=0)


def _pull(zoo: Zoo, place: Path) -> None:
    zoo.pull("team/m@2", place / "pulled")


def _export(zoo: Zoo, place: Path, name: str = "out.tar") -> None:
    transfer.export(zoo, ["team/m@1", "team/old"], place / name)


SCENARIOS = (
    Scenario("publish", lambda zoo, at: zoo.add_artifact(at / "c", "team/m")),
    Scenario("publish under a new name", lambda zoo, at: zoo.add_artifact(at / "c", "team/new")),
    Scenario("publish again", lambda zoo, at: zoo.add_artifact(at / "a", "team/m")),
    Scenario("publish over damage", lambda zoo, at: zoo.add_artifact(at / "a", "team/m"), damage, damaged=True),
    Scenario("publish after gc", lambda zoo, at: zoo.add_artifact(at / "gone", "team/m"), collected),
    Scenario("push", lambda zoo, at: Zoo.open(at / "copy").push("team/m@1", zoo, "team/pushed")),
    Scenario("add_base", lambda zoo, at: zoo.add_base(at / "base", "team/base")),
    Scenario("move an alias", lambda zoo, at: zoo.tag("team/m@2", "prod")),
    Scenario("a new alias", lambda zoo, at: zoo.tag("team/m@2", "canary")),
    Scenario("rm", lambda zoo, at: zoo.rm("team/m@2")),
    Scenario("gc", lambda zoo, at: zoo.gc(grace=0), leave_unfinished),
    Scenario("gc of the trash", lambda zoo, at: zoo.gc(grace=0, empty_trash=True), collected),
    Scenario("rm on a full disk", on_a_full_disk(lambda zoo: zoo.rm("team/m@2"))),
    Scenario("gc on a full disk", on_a_full_disk(lambda zoo: zoo.gc(grace=0)), leave_unfinished),
    Scenario("undelete", lambda zoo, at: zoo.undelete("team/gone@1")),
    Scenario("undelete from the trash", lambda zoo, at: zoo.undelete("team/gone@1"), collected),
    Scenario("attach", lambda zoo, at: zoo.attach(*report(zoo.resolve("team/m@2").manifest))),
    Scenario("fsck", lambda zoo, at: zoo.fsck(repair=True, copy=Zoo.open(at / "copy")), damage, damaged=True),
    Scenario("import", lambda zoo, at: transfer.import_(zoo, at / "in.tar"), steps=True),
    Scenario("export", _export),
    Scenario("pull", _pull),
    Scenario("init", lambda zoo, at: Zoo.init(at / "fresh")),
)


class Bench:
    """A place to run scenarios in: a template, copied for each run. In memory where the machine has /dev/shm."""

    def __init__(self) -> None:
        self._small = patch.object(local, "RESERVED", 64)  # it is copied for each run
        self._small.start()
        shm = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)
        self.root = Path(self._folder.name)
        self._template = build(self.root / "template")
        base = self._template / "base"
        base.mkdir()
        (base / "config.json").write_bytes(b"{}")
        shard = next((self._template / "a").glob("*.safetensors"))
        shutil.copy(shard, base / "model.safetensors")
        self._prepared: dict[str, Path] = {}
        self._states: dict[str, tuple[State, State]] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything."""
        self._small.stop()
        self._folder.cleanup()

    def fresh(self, scenario: Scenario) -> Path:
        """A place where `scenario` can start."""
        if scenario.name not in self._prepared:
            prepared = self.root / f"prepared-{len(self._prepared)}"
            shutil.copytree(self._template, prepared)
            if scenario.prepare:
                scenario.prepare(Zoo.open(prepared / "zoo"), prepared)
            self._prepared[scenario.name] = prepared
        work = self.root / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        for name in ("zoo", "copy"):
            shutil.copytree(self._prepared[scenario.name] / name, work / name)
        for name in ("a", "b", "c", "gone", "base", "in.tar"):
            (work / name).symlink_to(self._prepared[scenario.name] / name)
        return work

    def states(self, scenario: Scenario) -> tuple[State, State]:
        """What is visible before and after it."""
        if scenario.name not in self._states:
            place = self.fresh(scenario)
            zoo = Zoo.open(place / "zoo")
            before = state_of(zoo.store)
            scenario.run(zoo, place)
            self._states[scenario.name] = before, state_of(zoo.store)
        return self._states[scenario.name]


def problem_after(bench: Bench, scenario: Scenario, place: Path, acked: bool, *, on: bool = True) -> str | None:
    """What is wrong in `place` after an interruption, or None. on: also that the next commands work."""
    before, after = bench.states(scenario)
    if scenario.name == "init":
        return _problem_after_init(place, acked)
    zoo = Zoo.open(place / "zoo")
    seen = state_of(zoo.store)
    # A collection completes what a dead publisher had committed, at some point of its work.
    if scenario.steps or scenario.name.startswith("gc"):
        if not before <= seen or not seen <= after:
            return f"state {sorted(seen)}"
    elif seen not in (before, after):
        return f"half a state: {sorted(seen ^ before)}"
    if acked and seen != after:
        return "acknowledged, but lost"
    found = zoo.verify()
    if not found.ok and not (scenario.damaged and not acked and _only_known_damage(found.problems)):
        return f"verify: {found.problems[0].message}"
    if scenario.name in ("pull", "export"):
        return (_problem_after_pull if scenario.name == "pull" else _problem_after_export)(place, acked)
    if scenario.name == "import":
        scenario.run(zoo, place)
        seen = state_of(zoo.store)
        if seen != after:
            return "an import that went on adds something twice, or not at all"
    if not on:
        return None
    if scenario.damaged:
        zoo.fsck(repair=True, copy=Zoo.open(place / "copy"))
    made = zoo.add_artifact(place / "b", "team/next")
    zoo.tag("team/next", "here")
    zoo.gc(grace=0)
    found = zoo.verify()
    if not found.ok:
        return f"verify after the next commands: {found.problems[0].message}"
    if found.unreferenced:
        return f"{found.unreferenced} blobs left after gc"
    if any(not path.name.startswith("reserve-") for path in (Path(zoo.where) / "tmp").iterdir()):
        return "temporary files left after gc"
    changed = {name for name, _ in state_of(zoo.store) ^ seen}
    if not {str(made), "team/next@here"} <= changed <= {*_NEXT, *(name for name, _ in after - before)}:
        return f"the next commands changed {sorted(changed)}"
    zoo.pull("team/m@1", place / "again")
    if files_of(place / "again") != files_of(place / "a"):
        return "what is pulled differs from what was published"
    return None


_NEXT = ("team/next@1", "team/next@1 referrer", "team/next@here", "team/left@1")


def _only_known_damage(problems: tuple[object, ...]) -> bool:
    return len(problems) == 1


def _problem_after_pull(place: Path, acked: bool) -> str | None:
    out = place / "pulled"
    if out.exists() and files_of(out) != files_of(place / "b"):
        return "the target of the pull is half there"
    if acked and not out.exists():
        return "the pull was acknowledged, but is not there"
    if not out.exists():
        Zoo.open(place / "zoo").pull("team/m@2", out)
        if files_of(out) != files_of(place / "b"):
            return "a pull that went on gave other files"
    return None


def _problem_after_export(place: Path, acked: bool) -> str | None:
    out, copy = place / "out.tar", Zoo.open(place / "copy")
    if acked and not out.exists():
        return "the export was acknowledged, but is not there"
    if not out.exists():
        _export(Zoo.open(place / "zoo"), place)
    _export(copy, place, "again.tar")
    return None if out.read_bytes() == (place / "again.tar").read_bytes() else "the export is half there"


def _problem_after_init(place: Path, acked: bool) -> str | None:
    target = place / "fresh"
    there = acked or (target / "zoo.json").exists()
    zoo = Zoo.open(target) if there else Zoo.init(target)
    zoo.add_artifact(place / "a", "team/m")
    return None if zoo.verify().ok else "the new zoo is damaged"
