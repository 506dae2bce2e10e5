"""What a collection must not take, and what publications leave behind, step by step where a sweep rarely comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from zoo.reliability.scenarios import report
from zoo.samples import files_of, make_artifact, sample_parts

from deltacompress.zoo import Zoo
from deltacompress.zoo.care import gc, removal
from deltacompress.zoo.entries.artifact import Described, describe
from deltacompress.zoo.errors import ConflictError
from deltacompress.zoo.ledger import blobs, referrers, tags, txn
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.records import (
    IntentRecord,
    LedgerRecord,
    OutcomeRecord,
    VersionRecord,
    encode,
    nonce,
    now,
)
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import Store
from deltacompress.zoo.store.layout import INTENTS, OUTCOMES, blob_key, removal_key, version_key


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    return Zoo.init(tmp_path / "zoo")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "a", sample_parts(1), {"z.w.planes": os.urandom(9000)})


def largest(zoo: Zoo, name: str) -> str:
    """Digest of the largest blob of an entry."""
    return max(zoo.show(name)[1].layers, key=lambda layer: layer.size).digest


def damage(zoo: Zoo, key: str) -> None:
    path = Path(zoo.where) / key
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))


class Doing:
    """A reporter that does something at the first step."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._todo = [work]

    def phase(self, name: str, total: int | None = None) -> None: ...

    def step(self, label: str, **_: object) -> None:
        if self._todo:
            self._todo.pop()()

    def note(self, message: str) -> None: ...


def begin(zoo: Zoo, described: Described) -> str:
    """A publication that has stored its blobs, and no more; its id."""
    mine, raw = nonce(), described.entry.to_bytes()
    needed = [*described.blobs, Blob(described.entry.digest, len(raw), lambda: (raw,), "manifest")]
    intent = IntentRecord(what="begun", blobs=tuple(sorted({one.digest for one in needed})), created=now())
    zoo.store.put_if_absent(INTENTS + mine, encode(INTENTS + mine, intent))
    for one in needed:
        blobs.ensure(zoo.store, one)
    return mine


def decided(zoo: Zoo, described: Described, mine: str, name: str) -> None:
    """Its outcome: version 1 of `name`; somebody else has to put it."""
    place, size = version_key(name, 1), len(described.entry.to_bytes())
    record = VersionRecord(manifest=described.entry.digest, size=size, txn=mine, created=now())
    raw = encode(place, record).decode()
    assert txn.decide(zoo.store, mine, OutcomeRecord(state="commit", target=place, raw=raw, nonce=nonce()))


def test_the_last_good_copy_is_kept_although_it_is_condemned(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    """A collector was killed after it condemned, a publisher wrote the next copy, and that one got damaged."""
    zoo.add(artifact, "team/bot")
    digest = largest(zoo, "team/bot")
    blobs.condemn(zoo.store, digest, 0)
    zoo.add(artifact, "team/bot")
    assert zoo.store.exists(blob_key(digest, 1))
    damage(zoo, blob_key(digest, 1))
    zoo.gc(grace=0)
    assert files_of(zoo.pull("team/bot", tmp_path / "out")) == files_of(artifact)
    zoo.add(artifact, "team/bot")  # mends it
    assert zoo.gc(grace=0).trashed == 2
    assert zoo.verify().ok


def test_what_is_attached_to_a_publication_under_way_is_kept(zoo: Zoo, artifact: Path) -> None:
    """A removed entry is being published again while a collector comes: its report is needed as much as its blobs."""
    made = zoo.add(artifact, "team/bot")
    zoo.attach(*report(made.manifest))
    zoo.rm("team/bot")
    described = describe(artifact)
    begin(zoo, described)
    zoo.gc(grace=3600)
    zoo.add(artifact, "team/again")
    assert [one.kind for one in zoo.referrers("team/again")] == ["report"]
    assert zoo.verify().ok


def test_what_a_publication_with_a_damaged_outcome_holds_is_kept(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    """It may have been a commit; when its outcome is mended, the version is there."""
    described = describe(artifact)
    mine = begin(zoo, described)
    decided(zoo, described, mine, "team/late")
    good = zoo.store.get(OUTCOMES + mine, limit=1 << 20)
    damage(zoo, OUTCOMES + mine)
    for _ in range(2):
        zoo.gc(grace=0, empty_trash=True)
    path = Path(zoo.where) / OUTCOMES / mine
    path.write_bytes(good)
    assert zoo.gc(grace=0).completed == 1
    assert files_of(zoo.pull("team/late", tmp_path / "out")) == files_of(artifact)
    assert zoo.verify().ok


def test_a_publisher_that_was_overtaken_leaves_no_traces(
    zoo: Zoo, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_artifact(tmp_path / "b", sample_parts(2), seed=2)
    real, left = txn.decide, iter(range(3))

    def overtaken(*args: object) -> object:
        if next(left, None) is not None:
            with monkeypatch.context() as patch:
                patch.setattr(txn, "decide", real)
                zoo.add(other, "team/bot")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(txn, "decide", overtaken)
    assert zoo.add(artifact, "team/bot").version == 4
    assert list(zoo.store.list("txn/")) == []


def test_a_publication_that_fails_leaves_no_traces(zoo: Zoo, artifact: Path) -> None:
    def gone() -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        zoo.add(artifact, "team/bot", reporter=Doing(gone))
    assert list(zoo.store.list("txn/")) == []
    assert list(zoo.store.list("names/")) == []


def test_an_attachment_that_a_collector_ended_meanwhile_is_made_again(zoo: Zoo, artifact: Path) -> None:
    made = zoo.add(artifact, "team/bot")
    entry, sources = report(made.manifest)
    digest = zoo.attach(entry, sources)
    last = referrers.heads(zoo.store)[made.manifest][digest]
    zoo.attach(entry, sources, reporter=Doing(lambda: referrers.drop(zoo.store, made.manifest, digest, last)))
    assert [one.digest for one in zoo.referrers("team/bot")] == [digest]


def test_what_was_attached_ends_with_its_subject(zoo: Zoo, artifact: Path) -> None:
    """Whoever publishes the same again later does not inherit it, and nothing asks for what is gone."""
    made = zoo.add(artifact, "team/bot")
    zoo.attach(*report(made.manifest))
    zoo.rm("team/bot")
    zoo.gc(grace=0)
    zoo.gc(grace=0, empty_trash=True)
    zoo.add(artifact, "team/again")
    assert zoo.referrers("team/again") == []
    assert zoo.verify().ok
    assert zoo.gc(grace=0).trashed == 0
    zoo.attach(*report(made.manifest))
    assert len(zoo.referrers("team/again")) == 1


@pytest.mark.parametrize("moment", ["needed_digests", "_end_attachments", "drop", "_unneeded"])
@pytest.mark.parametrize("way", ["published again", "taken back"])
def test_what_was_attached_to_a_present_version_is_never_ended(
    zoo: Zoo, artifact: Path, monkeypatch: pytest.MonkeyPatch, moment: str, way: str
) -> None:
    """Whoever is told that a report is attached to a version keeps it, wherever in a collection that happens."""
    made = zoo.add(artifact, "team/bot")
    zoo.attach(*report(made.manifest))
    zoo.rm("team/bot")
    real, calls = getattr(gc, moment), iter(range(9))

    def late(*args: object, **options: object) -> object:
        if next(calls) == (1 if moment in ("needed_digests", "_unneeded") else 0):
            other = Zoo.open(zoo.where)
            if way == "taken back":
                other.undelete("team/bot@1")
            else:
                other.add(artifact, "team/bot")
                other.attach(*report(made.manifest))
            assert len(other.referrers("team/bot")) == 1
        return real(*args, **options)

    monkeypatch.setattr(gc, moment, late)
    zoo.gc(grace=3600)
    monkeypatch.undo()
    assert len(zoo.referrers("team/bot")) == 1
    assert zoo.verify().ok
    zoo.gc(grace=0, empty_trash=True)
    assert len(zoo.referrers("team/bot")) == 1
    assert zoo.verify().ok


def test_what_is_attached_again_while_its_subject_is_collected_is_kept(
    zoo: Zoo, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = zoo.add(artifact, "team/bot")
    entry, sources = report(made.manifest)
    zoo.attach(entry, sources)
    zoo.rm("team/bot")
    real = gc.drop

    def drop(store: Store, subject: str, manifest: str, last: int) -> bool:
        assert real(store, subject, manifest, last)  # another collector
        zoo.attach(entry, sources)
        return real(store, subject, manifest, last)

    monkeypatch.setattr(gc, "drop", drop)
    zoo.gc(grace=3600)
    monkeypatch.undo()
    zoo.add(artifact, "team/again")
    assert [one.digest for one in zoo.referrers("team/again")] == [entry.digest]
    assert zoo.verify().ok


def test_what_was_published_while_it_was_being_condemned_is_kept(
    zoo: Zoo, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roots are read again once nobody can begin to rely on a candidate any more."""
    zoo.add(artifact, "team/bot")
    zoo.rm("team/bot")
    real, published = blobs.condemn, []

    def condemn(store: Store, digest: str, generation: int) -> None:
        if not published:
            published.append(Zoo.open(zoo.where).add(artifact, "team/again"))
        real(store, digest, generation)

    monkeypatch.setattr(blobs, "condemn", condemn)
    assert zoo.gc(grace=0).trashed == 0
    monkeypatch.undo()
    assert files_of(zoo.pull("team/again", tmp_path / "out")) == files_of(artifact)
    assert zoo.verify().ok


def test_files_that_are_being_written_are_left_alone(zoo: Zoo) -> None:
    young = Path(zoo.where) / "tmp" / "1-abc"
    young.write_bytes(b"half")
    assert zoo.gc().swept == 0
    assert young.exists()
    os.utime(young, (0, 0))
    assert zoo.gc().swept == 1
    assert not young.exists()
    young.write_bytes(b"half")
    assert zoo.gc(grace=0).swept == 1


def test_a_publication_under_way_has_a_day(zoo: Zoo, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(zoo, describe(artifact))
    assert zoo.gc().aborted == 0
    later = now()
    monkeypatch.setattr(txn, "now", lambda: later + 23 * 3600)
    assert (zoo.gc().aborted, zoo.gc().trashed) == (0, 0)
    monkeypatch.setattr(txn, "now", lambda: later + 25 * 3600)
    done = zoo.gc()
    assert done.aborted == 1
    assert done.trashed > 0


def test_a_publisher_that_was_aborted_in_its_sleep_begins_again(
    zoo: Zoo, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its abort stays until it wakes up; then its blobs are made sure of anew."""
    real, slept = txn.decide, []

    def decide(store: Store, publication: str, wanted: OutcomeRecord) -> OutcomeRecord | None:
        if wanted.state == "commit" and not slept:
            slept.append(publication)
            Zoo.open(zoo.where).gc(grace=0)
            Zoo.open(zoo.where).gc(grace=0, empty_trash=True)
        return real(store, publication, wanted)

    monkeypatch.setattr(txn, "decide", decide)
    zoo.add(artifact, "team/bot")
    assert slept
    assert files_of(zoo.pull("team/bot", tmp_path / "out")) == files_of(artifact)
    assert zoo.verify().ok
    assert [entry.version for entry in zoo.list(all_versions=True)] == [1]


def test_of_two_who_take_back_a_removal_one_is_told(zoo: Zoo, artifact: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.rm("team/bot")
    with pytest.raises(ConflictError, match="removed or restored by somebody else at the same moment"):
        zoo.undelete("team/bot@1", reporter=Doing(lambda: zoo.undelete("team/bot@1")))
    assert [one.version for one in zoo.list()] == [1]
    assert list(zoo.store.list("txn/")) == []


def test_of_two_who_remove_one_is_told(zoo: Zoo, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.add(artifact, "team/bot")
    real = removal.encode

    def encode_late(key: str, record: LedgerRecord) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(removal, "encode", real)
            Zoo.open(zoo.where).rm("team/bot@1")
        return real(key, record)

    monkeypatch.setattr(removal, "encode", encode_late)
    with pytest.raises(ConflictError, match="removed or restored by somebody else at the same moment"):
        zoo.rm("team/bot@1")


def test_a_removal_is_taken_back_with_what_is_attached(zoo: Zoo, artifact: Path) -> None:
    """A collector comes right before, and right after the attachments were made again."""
    made = zoo.add(artifact, "team/bot")
    zoo.attach(*report(made.manifest))
    for moment in range(30):
        zoo.rm("team/bot")
        zoo.gc(grace=0)
        zoo.undelete("team/bot@1", reporter=At(moment, lambda: zoo.gc(grace=3600)))
        assert len(zoo.referrers("team/bot")) == 1, moment
        assert zoo.verify().ok, moment


class At(Doing):
    """Does it at a later step."""

    def __init__(self, moment: int, work: Callable[[], object]) -> None:
        super().__init__(work)
        self._left = moment

    def step(self, label: str, **_: object) -> None:
        self._left -= 1
        if self._left < 0:
            super().step(label)


def test_a_damaged_removal_can_be_made_again(zoo: Zoo, artifact: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.rm("team/bot")
    damage(zoo, removal_key("team/bot", 1, 1))
    assert zoo.rm("team/bot@1") == [1]
    assert list(zoo.list()) == []
    zoo.gc(grace=0)
    zoo.undelete("team/bot@1")
    assert [one.version for one in zoo.list()] == [1]


def test_a_publication_does_not_begin_again_because_another_was_quicker(
    zoo: Zoo, artifact: Path, tmp_path: Path
) -> None:
    """It takes its number when its blobs are there, so no time that they took is lost."""
    other = make_artifact(tmp_path / "b", sample_parts(2), seed=2)
    stored: list[str] = []

    class Counting(Doing):
        def step(self, label: str, **more: object) -> None:
            stored.append(label)
            super().step(label, **more)

    told = Counting(lambda: zoo.add(other, "team/bot"))
    assert zoo.add(artifact, "team/bot", reporter=told).version == 2
    assert len(stored) == len(set(stored))


def test_of_two_who_move_an_alias_one_is_told(zoo: Zoo, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.add(artifact, "team/bot")
    zoo.add(artifact, "team/bot")
    real = tags.encode

    def encode_late(key: str, record: LedgerRecord) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(tags, "encode", real)
            Zoo.open(zoo.where).tag("team/bot@1", "prod")
        return real(key, record)

    monkeypatch.setattr(tags, "encode", encode_late)
    with pytest.raises(ConflictError, match="prod was moved by somebody else at the same moment"):
        zoo.tag("team/bot@2", "prod")
    assert zoo.resolve("team/bot@prod").version == 1
