"""Damage and bad input: told in one line that names entry, file and repair, mended where it can be, no one else hit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from zoo.reliability.scenarios import report
from zoo.samples import files_of, make_artifact, sample_parts

from deltacompress.errors import ChecksumError, FormatError, TruncatedFileError
from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries.artifact import describe
from deltacompress.zoo.errors import (
    ConflictError,
    DamagedBlobError,
    DamagedRecordError,
    InvalidNameError,
    MissingBlobError,
    NotFoundError,
    ZooFormatError,
)
from deltacompress.zoo.ledger import blobs, referrers
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import FILE, Descriptor, EntryManifest
from deltacompress.zoo.ledger.records import AliasRecord, ReferrerRecord, VersionRecord, ZooRecord, encode, nonce
from deltacompress.zoo.store.layout import alias_key, blob_key, referrer_key, removal_key, version_key


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "a", sample_parts(1), {"z.w.planes": os.urandom(9000), "z.n.planes": b"q"})


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    return Zoo.init(tmp_path / "zoo")


def blob_path(zoo: Zoo, digest: str) -> Path:
    return Path(zoo.where) / "blobs" / "sha256" / digest[:2] / digest


def damage(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))


def test_damage_is_told_and_mended_by_publishing_again(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    part = next(layer for layer in zoo.show("team/bot")[1].layers if "part" in layer.annotations)
    damage(blob_path(zoo, part.digest))
    (problem,) = zoo.verify().problems
    assert (problem.kind, problem.entries, problem.file) == ("damaged", ("team/bot@1",), part.annotations["part"])
    with pytest.raises(DamagedBlobError, match=r"team/bot@1.*is damaged; repair it"):
        zoo.pull("team/bot", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    blob_path(zoo, part.digest).unlink()
    assert [one.kind for one in zoo.verify("team/bot").problems] == ["missing"]
    with pytest.raises(MissingBlobError, match=r"team/bot@1.*is missing; repair it"):
        zoo.pull("team/bot", tmp_path / "out")
    blob_path(zoo, part.digest).write_bytes(b"nonsense")
    zoo.add(artifact, "team/again")
    assert files_of(zoo.pull("team/bot", tmp_path / "out")) == files_of(artifact)
    assert zoo.verify().ok
    zoo.gc(grace=0)
    assert not blob_path(zoo, part.digest).exists()
    assert zoo.verify().ok


def test_fsck_mends_blobs_and_records_from_a_copy(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.tag("team/bot", "prod")
    shutil.copytree(zoo.where, tmp_path / "copy")
    for path in Path(zoo.where).rglob("*"):
        if path.is_file() and path.name != "zoo.json":
            damage(path)
    assert not zoo.fsck().ok
    assert not zoo.fsck(repair=True).ok  # nothing to repair from
    done = zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy"))
    assert done.ok, done.left.problems
    assert files_of(zoo.pull("team/bot@prod", tmp_path / "out")) == files_of(artifact)
    with pytest.raises(ConflictError, match="another copy"):
        zoo.fsck(repair=True, copy=zoo)


def test_fsck_mends_from_the_trash(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.rm("team/bot@1")
    zoo.gc(grace=0)
    zoo.add(artifact, "team/bot")
    part = next(layer for layer in zoo.show("team/bot")[1].layers if "part" in layer.annotations)
    damage(blob_path(zoo, part.digest).with_name(part.digest + ".1"))
    assert not zoo.verify().ok
    assert zoo.fsck(repair=True).ok


def test_one_damaged_entry_stops_nobody_else(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    for name in ("team/bad", "team/good"):
        zoo.add_artifact(make_artifact(tmp_path / name, sample_parts(name), seed=name), name)
    damage(blob_path(zoo, zoo.resolve("team/bad").manifest))
    listed = {entry.name: entry for entry in zoo.list()}
    assert "damaged" in (listed["team/bad"].problem or "")
    assert listed["team/good"].problem is None
    assert zoo.pull("team/good", tmp_path / "out").is_dir()
    with pytest.raises(DamagedBlobError, match=r"manifest of team/bad@1"):
        zoo.show("team/bad")
    with pytest.raises(DamagedBlobError):
        zoo.gc(grace=0)  # what it needs is not known
    zoo.rm("team/bad@1")
    zoo.gc(grace=0)
    assert zoo.verify().ok
    damage(Path(zoo.where) / version_key("team/good", 1))
    with pytest.raises(DamagedRecordError, match="canonical"):
        zoo.resolve("team/good")
    assert zoo.rm("team/good@1") == [1]


def test_records_of_other_places_are_refused(zoo: Zoo, artifact: Path) -> None:
    """A record that is sound but was copied to another key (an old version over a new one) is damage."""
    for _ in range(2):
        zoo.add(artifact, "team/bot")
    first, second = (Path(zoo.where) / version_key("team/bot", n) for n in (1, 2))
    second.unlink()
    shutil.copy(first, second)
    with pytest.raises(DamagedRecordError, match="another place"):
        zoo.resolve("team/bot@2")
    first.unlink()
    kinds = {problem.kind for problem in zoo.verify().problems}
    assert kinds == {"missing", "damaged"}


def test_strays_are_told(zoo: Zoo, tmp_path: Path) -> None:
    (Path(zoo.where) / "link").symlink_to(tmp_path)
    (Path(zoo.where) / "names" / "x y").mkdir(parents=True)
    (Path(zoo.where) / "blobs" / "note.txt").parent.mkdir(exist_ok=True)
    (Path(zoo.where) / "blobs" / "note.txt").write_text("hello")
    found = {problem.key for problem in zoo.verify().problems}
    assert found == {"link", "names/x y", "blobs/note.txt"}


def test_a_zoo_of_a_newer_format(zoo: Zoo) -> None:
    path = Path(zoo.where) / "zoo.json"
    path.unlink()
    path.write_bytes(encode("zoo.json", ZooRecord(format=2, id=nonce(), capabilities=())))
    with pytest.raises(ZooFormatError, match="format 2, this program reads up to 1; upgrade") as caught:
        Zoo.open(zoo.where)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda root: (root / "config.json").unlink(), TruncatedFileError),
        (lambda root: (root / "config.json").write_bytes(b'{"model_type":"llamb"}'), ChecksumError),
        (lambda root: damage(next(root.glob("*.safetensors"))), ChecksumError),
        (lambda root: (root / "manifest.json").unlink(), TruncatedFileError),
    ],
)
def test_a_damaged_artifact_is_not_published(zoo: Zoo, artifact: Path, harm: object, error: type[Exception]) -> None:
    harm(artifact)  # type: ignore[operator]
    with pytest.raises(error):
        zoo.add(artifact, "team/bot")
    assert list(zoo.list()) == []
    assert list(zoo.store.list("blobs/")) == []


def test_code_is_not_published(zoo: Zoo, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "x", files={"modeling_evil.py": b"import os"})
    with pytest.raises(FormatError, match="no config or tokenizer file"):
        zoo.add(artifact, "team/evil")


def test_names_that_are_not_there(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no entry team/none"):
        zoo.pull("team/none", tmp_path / "out")
    zoo.add(artifact, "team/bot")
    with pytest.raises(NotFoundError, match="no version 7; it has 1 to 1"):
        zoo.resolve("team/bot@7")
    with pytest.raises(NotFoundError, match="not removed"):
        zoo.undelete("team/bot@1")
    with pytest.raises(ConflictError, match="not an alias"):
        zoo.rm("team/bot@prod")
    with pytest.raises(InvalidNameError):
        zoo.add(artifact, "team/bot@1")
    zoo.rm("team/bot")
    with pytest.raises(NotFoundError, match="every version of team/bot was removed"):
        zoo.resolve("team/bot")


def test_a_condemned_copy_is_no_problem_only_beside_a_good_one(zoo: Zoo, artifact: Path) -> None:
    zoo.add(artifact, "team/bot")
    digest = max(zoo.show("team/bot")[1].layers, key=lambda layer: layer.size).digest
    blobs.condemn(zoo.store, digest, 0)
    assert zoo.verify().ok  # as it is after a collector that was killed
    damage(blob_path(zoo, digest))
    (problem,) = zoo.verify().problems
    assert (problem.kind, problem.entries) == ("damaged", ("team/bot@1",))
    zoo.add(artifact, "team/again")
    assert zoo.verify().ok


def test_what_is_attached_is_verified_too(zoo: Zoo, artifact: Path) -> None:
    made = zoo.add(artifact, "team/bot")
    digest = zoo.attach(*report(made.manifest))
    body = zoo.referrers("team/bot")[0].config.digest
    whole = zoo.verify().blobs
    assert zoo.verify("team/bot").blobs == whole
    for one, file in ((body, "its config"), (digest, "its manifest")):
        raw = blob_path(zoo, one).read_bytes()
        damage(blob_path(zoo, one))
        for found in (zoo.verify(), zoo.verify("team/bot")):
            assert not found.ok
            assert any("referrer of team/bot@1" in problem.entries for problem in found.problems), found.problems
            assert file in {problem.file for problem in found.problems}
        blob_path(zoo, one).write_bytes(raw)
    blob_path(zoo, body).unlink()
    assert [problem.kind for problem in zoo.verify("team/bot").problems] == ["missing"]


def crafted(zoo: Zoo, artifact: Path, change: Callable[[EntryManifest], EntryManifest], *more: bytes) -> None:
    """Publish the artifact as team/odd under a manifest that somebody changed, with further blobs."""
    described = describe(artifact)
    entry = change(described.entry)
    added = [Blob(sha256_hex(raw), len(raw), lambda raw=raw: (raw,), "more") for raw in more]  # type: ignore[misc]
    zoo.publish(entry, [one for one in (*described.blobs, *added) if one.digest in entry.blobs], "team/odd")


def with_layers(entry: EntryManifest, *layers: Descriptor) -> EntryManifest:
    return entry.model_copy(update={"layers": layers})


def file_of(name: str, raw: bytes) -> Descriptor:
    return Descriptor(media_type=FILE, digest=sha256_hex(raw), size=len(raw), annotations={"file": name})


def test_an_entry_that_is_not_its_artifact_is_not_pulled(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    """Whoever can write to the store can write sound records over anything: what comes out is held to the artifact."""
    other = b'{"model_type":"evil"}'
    for told, change in {
        "config.json: its parts do not make up the file": lambda e: with_layers(
            e, *(file_of("config.json", other) if one.annotations["file"] == "config.json" else one for one in e.layers)
        ),
        "the entry's files are not those of its artifact": lambda e: with_layers(
            e, *e.layers, file_of("generation_config.json", other)
        ),
        "the entry's files are not": lambda e: with_layers(
            e, *(one for one in e.layers if one.annotations["file"] != "tokenizer.json")
        ),
        "is that of another artifact": lambda e: e.model_copy(
            update={"summary": dict(e.summary) | {"artifact": "0" * 64}}
        ),
    }.items():
        crafted(zoo, artifact, change, other)
        with pytest.raises(DamagedRecordError, match=told):
            zoo.pull("team/odd", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)


def test_layers_that_are_not_those_of_the_header_are_refused(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    described = describe(artifact)
    shard = next(name for name in described.entry.files() if name.endswith(".safetensors"))
    head, bundle, *parts = described.entry.files()[shard]
    others = [one for one in described.entry.layers if one.annotations["file"] != shard]
    for told, layers in {
        "does not begin with a header": [bundle, *parts],
        "is not the next of its layers": [head, bundle, *reversed(parts)],
        "bytes follow the last tensor": [head, bundle, *parts, parts[0]],
        "truncated, .* bytes are missing": [head, bundle, *parts[:-1]],
        "truncated, .* of .* bytes are missing": [head, *parts],
    }.items():
        crafted(zoo, artifact, lambda e, layers=layers: with_layers(e, *layers, *others))  # type: ignore[misc]
        with pytest.raises((DamagedRecordError, DamagedBlobError), match=told):
            zoo.pull("team/odd", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)


def test_a_damaged_copy_before_a_good_one_leaves_nothing_of_itself(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    part = next(layer for layer in zoo.show("team/bot")[1].layers if "part" in layer.annotations)
    for raw in (b"", bytes(10), bytes(part.size), bytes(part.size + 7)):
        path = blob_path(zoo, part.digest)
        path.chmod(0o644)
        path.write_bytes(raw)
        zoo.add(artifact, "team/bot")
        out = zoo.pull("team/bot", tmp_path / f"out-{len(raw)}")
        assert files_of(out) == files_of(artifact)


def test_a_sample_is_never_empty_and_never_always_the_same(zoo: Zoo, artifact: Path) -> None:
    zoo.add(artifact, "team/bot")
    assert zoo.verify(share=1e-9).blobs == 1
    damage(blob_path(zoo, zoo.show("team/bot")[1].layers[-1].digest))
    found = {seed: zoo.verify(share=0.3, seed=seed).ok for seed in range(40)}
    assert set(found.values()) == {True, False}
    assert found == {seed: zoo.verify(share=0.3, seed=seed).ok for seed in range(40)}
    assert {zoo.verify(share=0.3).ok for _ in range(60)} == {True, False}


def test_what_is_missing_from_a_log_is_told(zoo: Zoo, artifact: Path) -> None:
    made = zoo.add(artifact, "team/bot")
    for _ in range(2):
        zoo.rm("team/bot@1")
        zoo.undelete("team/bot@1")
    entry, sources = report(made.manifest)
    digest = zoo.attach(entry, sources)
    referrers.drop(zoo.store, made.manifest, digest, 1)
    zoo.attach(entry, sources)
    assert zoo.verify().ok
    for key in (removal_key("team/bot", 1, 2), referrer_key(made.manifest, digest, 1)):
        raw = (Path(zoo.where) / key).read_bytes()
        (Path(zoo.where) / key).unlink()
        (problem,) = zoo.verify().problems
        assert (problem.kind, problem.key) == ("missing", key)
        assert "fsck --repair --from COPY" in problem.message
        (Path(zoo.where) / key).write_bytes(raw)


def test_a_record_is_not_taken_from_another_zoo(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    """The same key may mean another model there."""
    zoo.add(artifact, "team/bot")
    other = Zoo.init(tmp_path / "other")
    other.add(make_artifact(tmp_path / "b", sample_parts(2), seed=2), "team/bot")
    damage(Path(zoo.where) / version_key("team/bot", 1))
    done = zoo.fsck(repair=True, copy=other)
    assert (done.ok, done.repaired) == (False, ())
    with pytest.raises(DamagedRecordError):
        zoo.resolve("team/bot")


def test_a_sound_record_is_not_taken_from_a_copy_that_went_another_way(
    zoo: Zoo, artifact: Path, tmp_path: Path
) -> None:
    """The same version is another model there, though the zoo is the same."""
    zoo.add(artifact, "team/bot")
    shutil.copytree(zoo.where, tmp_path / "copy")
    copy = Zoo.open(tmp_path / "copy")
    mine = zoo.add(make_artifact(tmp_path / "mine", sample_parts(2), seed=2), "team/bot")
    copy.add(make_artifact(tmp_path / "theirs", sample_parts(2), seed=3), "team/bot")
    damage(blob_path(zoo, mine.manifest))
    done = zoo.fsck(repair=True, copy=copy)
    assert (done.ok, done.repaired) == (False, ())
    assert zoo.resolve("team/bot").manifest == mine.manifest


def test_a_copy_that_is_no_better_mends_nothing(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    zoo.tag("team/bot", "prod")
    key = alias_key("team/bot", "prod", 1)
    raw = (Path(zoo.where) / key).read_bytes()
    shutil.copytree(zoo.where, tmp_path / "copy")
    damage(Path(zoo.where) / key)
    damage(tmp_path / "copy" / key)
    for worse in (bytes(len(raw)), b"{}", raw[:-1]):
        (tmp_path / "copy" / key).write_bytes(worse)
        assert zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy")).repaired == ()
    odd = AliasRecord(version=1, previous="0" * 64, rollback=False, nonce=nonce(), created=1.0)
    for root in (Path(zoo.where), tmp_path / "copy"):  # sound by itself, but it follows from nothing
        (root / key).write_bytes(encode(key, odd))
    done = zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy"))
    assert (done.ok, done.repaired) == (False, ())
    (tmp_path / "copy" / key).write_bytes(raw)
    assert zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy")).repaired == (key,)
    assert zoo.store.exists("trash/" + key)  # what was there is not thrown away


def test_a_move_of_an_alias_that_hides_something_is_damage(zoo: Zoo, artifact: Path) -> None:
    for _ in range(3):
        zoo.add(artifact, "team/bot")
    zoo.tag("team/bot@2", "prod")
    first = sha256_hex(zoo.store.get(alias_key("team/bot", "prod", 1), limit=1 << 20))
    key = alias_key("team/bot", "prod", 2)
    for told, version, previous, rollback in (
        ("hides or invents a rollback", 1, first, False),
        ("hides or invents a rollback", 3, first, True),
        ("does not follow from the move before it", 3, "0" * 64, False),
        ("does not follow from the move before it", 3, None, False),
    ):
        record = AliasRecord(version=version, previous=previous, rollback=rollback, nonce=nonce(), created=1.0)
        path = Path(zoo.where) / key
        path.unlink(missing_ok=True)
        path.write_bytes(encode(key, record))
        with pytest.raises(DamagedRecordError, match=told):
            zoo.history("team/bot@prod")
        with pytest.raises(DamagedRecordError, match=told):
            zoo.tag("team/bot@3", "prod")
        assert not zoo.verify().ok


def test_an_attachment_that_is_about_something_else_is_damage(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    first = zoo.add(artifact, "team/bot")
    second = zoo.add(make_artifact(tmp_path / "b", sample_parts(2), seed=2), "team/other")
    digest = zoo.attach(*report(first.manifest))
    size = len(zoo.referrers("team/bot")[0].to_bytes())
    record = ReferrerRecord(state="attached", manifest=digest, size=size, nonce=nonce(), created=1.0)
    moved = referrer_key(second.manifest, digest, 1)
    zoo.store.put_if_absent(moved, encode(moved, record))
    with pytest.raises(DamagedRecordError, match="attached to something that it is not about"):
        zoo.referrers("team/other")
    (Path(zoo.where) / moved).unlink()
    odd = referrer_key(second.manifest, "1" * 64, 1)
    zoo.store.put_if_absent(odd, encode(odd, record))
    with pytest.raises(DamagedRecordError, match="names another manifest"):
        zoo.referrers("team/other")
    assert not zoo.verify().ok


def test_a_damaged_attachment_of_what_is_collected_does_not_come_back(zoo: Zoo, artifact: Path) -> None:
    made = zoo.add(artifact, "team/bot")
    digest = zoo.attach(*report(made.manifest))
    damage(Path(zoo.where) / referrer_key(made.manifest, digest, 1))
    zoo.rm("team/bot")
    zoo.gc(grace=0)
    zoo.add(artifact, "team/again")
    assert zoo.referrers("team/again") == []


def test_a_manifest_that_says_another_size_is_told(zoo: Zoo, artifact: Path) -> None:
    zoo.add(artifact, "team/bot")
    entry = zoo.show("team/bot")[1]
    layers = tuple(
        one.model_copy(update={"size": one.size + 1}) if "part" in one.annotations else one for one in entry.layers
    )
    raw = entry.model_copy(update={"layers": layers}).to_bytes()
    zoo.store.put_if_absent(blob_key(sha256_hex(raw), 0), raw)
    key = version_key("a/odd", 1)
    zoo.store.put_if_absent(
        key, encode(key, VersionRecord(manifest=sha256_hex(raw), size=len(raw), txn=nonce(), created=1.0))
    )
    found = zoo.verify("a/odd").problems
    assert len(found) == len([one for one in layers if "part" in one.annotations])
    assert {(problem.kind, problem.entries) for problem in found} == {("damaged", ("a/odd@1",))}


def test_what_does_not_belong_there_is_left_to_the_user(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    shutil.copytree(zoo.where, tmp_path / "copy")
    path = Path(zoo.where) / version_key("team/bot", 1)
    path.rename(tmp_path / "away")
    path.symlink_to(tmp_path / "away")
    done = zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy"))
    assert (done.ok, done.repaired) == (False, ())
    assert {problem.kind for problem in done.left.problems} == {"stray"}
    assert path.is_symlink()
    path.unlink()
    assert zoo.fsck(repair=True, copy=Zoo.open(tmp_path / "copy")).ok
