"""export and import: everything arrives, twice is once, and no other file gets in."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from zoo.checkpoints import files_of, write_adapter, write_base

from deltacompress.errors import DeltaCompressError, IntegrityError
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.reports import describe_report
from deltacompress.zoo.errors import (
    ConflictError,
    DamagedBlobError,
    NotFoundError,
    PullError,
    StoreError,
    ZooFormatError,
)
from deltacompress.zoo.exchange import transfer
from deltacompress.zoo.exchange.export_format import INDEX, ExportRecord, header_for, padding_for
from deltacompress.zoo.exchange.export_reader import Archive
from deltacompress.zoo.ledger.records import encode
from deltacompress.zoo.store import osfs

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    made = Zoo.init(tmp_path / "zoo")
    linking.add(made, write_base(tmp_path / "base"), "t/base", hub_id="acme/llama")
    linking.add(made, write_adapter(tmp_path / "adapter"), "t/lora")
    made.add(GOLDEN / "int4-24", "t/bot")
    made.add(GOLDEN / "int2-24", "t/bot")
    report = describe_report(b'{"sst2": 0.5}', *made.show("t/bot@1"), "r")
    made.attach(report.entry, report.blobs)
    return made


@pytest.fixture
def other(tmp_path: Path, zoo: Zoo) -> Zoo:
    return Zoo.init(tmp_path / "other")


@pytest.fixture
def tar(tmp_path: Path, zoo: Zoo) -> Path:
    out = tmp_path / "out.tar"
    transfer.export(zoo, ["t/base", "t/lora", "t/bot@1", "t/bot@2"], out)
    return out


def test_everything_arrives(tmp_path: Path, zoo: Zoo, other: Zoo, tar: Path) -> None:
    found = transfer.import_(other, tar)
    assert [(one.source, one.target, one.new) for one in found] == [
        ("t/base@1", "t/base@1", True),
        ("t/bot@1", "t/bot@1", True),
        ("t/bot@2", "t/bot@2", True),
        ("t/lora@1", "t/lora@1", True),
    ]
    assert {one.manifest for one in other.list(all_versions=True)} == {
        one.manifest for one in zoo.list(all_versions=True)
    }
    assert files_of(other.pull("t/bot@2", tmp_path / "delta")) == files_of(GOLDEN / "int2-24")
    assert [one.summary for one in other.referrers("t/bot@1")] == [{"sst2": 0.5}]
    assert other.verify().ok
    assert not any(one.new for one in transfer.import_(other, tar))
    assert len(other.list(all_versions=True)) == 4


def test_any_tar_program_can_list_it_and_nothing_is_odd(tar: Path) -> None:
    with tarfile.open(tar) as opened:
        members = opened.getmembers()
    assert members[0].name == INDEX
    assert all(one.isreg() and one.name.startswith("blobs/sha256/") and not one.pax_headers for one in members[1:])
    assert {(one.uid, one.gid, one.mtime, one.mode) for one in members} == {(0, 0, 0, 0o444)}


def test_the_same_versions_give_the_same_file(tmp_path: Path, zoo: Zoo, tar: Path) -> None:
    transfer.export(zoo, ["t/base", "t/lora", "t/bot@1", "t/bot"], tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == tar.read_bytes()


def test_an_import_that_was_interrupted_is_finished_by_the_next(
    other: Zoo, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = other.store.put_if_absent
    for stop in range(1, 60, 3):
        calls = iter(range(stop))

        def limited(key: str, source: object, calls: object = calls) -> bool:
            if next(calls, None) is None:  # type: ignore[call-overload]
                raise StoreError("the disk is full")
            return put(key, source)  # type: ignore[arg-type]

        monkeypatch.setattr(other.store, "put_if_absent", limited)
        with suppress(StoreError):
            transfer.import_(other, tar)
        monkeypatch.setattr(other.store, "put_if_absent", put)
        assert other.verify().ok
    transfer.import_(other, tar)
    assert sorted(f"{one.name}@{one.version}" for one in other.list(all_versions=True)) == [
        "t/base@1",
        "t/bot@1",
        "t/bot@2",
        "t/lora@1",
    ]


class Killed(BaseException):
    """The process is gone: neither this call nor any later one happens."""


def killed_at(monkeypatch: pytest.MonkeyPatch, point: int, work: Callable[[], object]) -> bool:
    """Run `work` with its `point`-th system call, and all after it, not done; whether it came to an end before."""
    left = iter(range(point))

    def stopping(call: Callable[..., object]) -> Callable[..., object]:
        def stopped(*args: object) -> object:
            if next(left, None) is None:
                raise Killed
            return call(*args)

        return stopped

    with monkeypatch.context() as patch:
        for name in set(osfs.CALLS) - {"close"}:  # the kernel does that for who was killed
            patch.setattr(osfs, name, stopping(getattr(osfs, name)))
        try:
            work()
        except Killed:
            return False
    return True


def test_a_killed_export_leaves_no_half_file(
    tmp_path: Path, zoo: Zoo, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, out = ["t/base", "t/lora", "t/bot@1", "t/bot@2"], tmp_path / "killed.tar"
    point = 0
    while not killed_at(monkeypatch, point, lambda: transfer.export(zoo, wanted, out)):
        assert not out.exists() or out.read_bytes() == tar.read_bytes()
        out.unlink(missing_ok=True)
        point += 7
    assert point > 100
    assert out.read_bytes() == tar.read_bytes()


def test_a_killed_import_shows_whole_versions_and_is_finished_by_the_next(
    tmp_path: Path, other: Zoo, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, before, where = 0, 0, other.where

    def work() -> None:
        transfer.import_(Zoo.open(where), tar)

    while not killed_at(monkeypatch, point, work):
        again = Zoo.open(where)
        assert again.verify().ok
        there = len(again.list(all_versions=True))
        assert before <= there <= 4
        before = there
        point += 23
        if point % 5 == 0:  # and now and then from nothing
            before, where = 0, Zoo.init(tmp_path / f"other{point}").where
    assert point > 100
    assert len(Zoo.open(where).list(all_versions=True)) == 4
    assert Zoo.open(where).verify().ok


def test_every_flipped_byte_of_list_and_headers_is_noticed_before_anything_is_written(other: Zoo, tar: Path) -> None:
    raw = tar.read_bytes()
    archive = Archive.open(tar)
    data = {at for offset, size in archive.places.values() for at in range(offset, offset + size)}
    manifests = {
        at for digest in archive.entries for at in range(archive.places[digest][0], sum(archive.places[digest]))
    }
    for at in [*(i for i in range(0, len(raw), 61) if i not in data), *sorted(manifests)[::97]]:
        tar.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        with pytest.raises(IntegrityError):
            Archive.open(tar)


def test_a_damaged_blob_is_noticed_and_never_published(other: Zoo, tar: Path) -> None:
    raw = tar.read_bytes()
    archive = Archive.open(tar)
    blobs = {digest: place for digest, place in archive.places.items() if digest not in archive.entries}
    for offset, size in blobs.values():
        at = offset + size // 2
        tar.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(DamagedBlobError, match="is damaged; copy the file again"):
            transfer.import_(Zoo.init(other.where + str(at)), tar)
        assert Zoo.open(other.where + str(at)).verify().ok


def test_every_cut_is_noticed(tar: Path) -> None:
    raw = tar.read_bytes()
    for size in [*range(0, len(raw), 512), len(raw) - 1, 1, 511, 513]:
        tar.write_bytes(raw[:size])
        with pytest.raises(IntegrityError):
            Archive.open(tar)
    tar.write_bytes(raw + b"\0" * 512)
    with pytest.raises(IntegrityError, match="follow its last blob"):
        Archive.open(tar)


def linked(kind: bytes, name: str) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        info = tarfile.TarInfo(name)
        info.type = kind
        info.linkname = "/etc/passwd"
        return info.tobuf(tarfile.GNU_FORMAT)

    return change


@pytest.mark.parametrize(
    "change",
    [
        linked(tarfile.SYMTYPE, INDEX),
        linked(tarfile.LNKTYPE, "blobs/sha256/aa/" + "a" * 64),
        linked(tarfile.DIRTYPE, ".."),
        linked(tarfile.CHRTYPE, "/dev/null"),
        linked(tarfile.XHDTYPE, INDEX),
        linked(tarfile.GNUTYPE_LONGNAME, INDEX),
        lambda raw: header_for("/etc/passwd", 10),
        lambda raw: header_for("../" + INDEX, 10),
        lambda raw: header_for(INDEX, 1 << 40),
        lambda raw: b"\xff" * 512,
        lambda raw: b"",
    ],
)
def test_another_tar_is_refused(tar: Path, change: Callable[[bytes], bytes]) -> None:
    raw = tar.read_bytes()
    head = change(raw)
    for position in (0, 512 + len(raw[512:].split(b"\0", 1)[0]) // 512 * 512 + 512):
        tar.write_bytes(raw[:position] + head + raw[position + 512 :] if head else b"")
        with pytest.raises(IntegrityError) as error:
            Archive.open(tar)
        assert "\n" not in str(error.value)


def with_list(tar: Path, change: Callable[[ExportRecord], ExportRecord]) -> None:
    """Rewrite the list, with a right digest, in front of the same blobs."""
    raw = tar.read_bytes()
    size = tarfile.TarInfo.frombuf(raw[:512], "ascii", "strict").size
    index = encode(INDEX, change(Archive.open(tar).record))
    rest = raw[512 + size + len(padding_for(size)) :]
    tar.write_bytes(header_for(INDEX, len(index)) + index + padding_for(len(index)) + rest)


def test_lists_that_lie_are_refused(tar: Path) -> None:
    raw = tar.read_bytes()

    def swap(record: ExportRecord) -> ExportRecord:
        return record.model_copy(update={"blobs": (*record.blobs[1:], record.blobs[0])})

    def twice(record: ExportRecord) -> ExportRecord:
        return record.model_copy(update={"blobs": (*record.blobs, record.blobs[0])})

    def fewer(record: ExportRecord) -> ExportRecord:
        return record.model_copy(update={"versions": record.versions[1:]})

    def bad_name(record: ExportRecord) -> ExportRecord:
        first = record.versions[0].model_copy(update={"name": "../../etc"})
        return record.model_copy(update={"versions": (first, *record.versions[1:])})

    def no_manifest(record: ExportRecord) -> ExportRecord:
        first = record.versions[0].model_copy(update={"manifest": "0" * 64})
        return record.model_copy(update={"versions": (first, *record.versions[1:])})

    def stranger(record: ExportRecord) -> ExportRecord:
        versions = {one.name: one for one in record.versions if one.attached}
        (reported,) = versions.values()
        moved = tuple(
            one.model_copy(
                update={"attached": () if one.attached else reported.attached if one.name == "t/base" else ()}
            )
            for one in record.versions
        )
        return record.model_copy(update={"versions": moved})

    for lie in (swap, twice, fewer, bad_name, no_manifest, stranger):
        tar.write_bytes(raw)
        with_list(tar, lie)
        with pytest.raises(IntegrityError):
            Archive.open(tar)


def test_a_newer_format_says_so(tar: Path) -> None:
    with_list(tar, lambda record: record.model_copy(update={"format": 2}))
    with pytest.raises(ZooFormatError, match="upgrade deltacompress"):
        Archive.open(tar)


def test_what_is_there_is_never_overwritten(tmp_path: Path, zoo: Zoo, tar: Path) -> None:
    before = tar.read_bytes()
    with pytest.raises(PullError, match="exists already"):
        transfer.export(zoo, ["t/bot"], tar)
    (tmp_path / "link.tar").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PullError, match="exists already"):
        transfer.export(zoo, ["t/bot"], tmp_path / "link.tar")
    assert tar.read_bytes() == before
    with pytest.raises(NotFoundError):
        transfer.export(zoo, ["t/none"], tmp_path / "none.tar")
    with pytest.raises(ConflictError, match="nothing to export"):
        transfer.export(zoo, [], tmp_path / "none.tar")
    with pytest.raises(PullError):
        transfer.export(zoo, ["t/bot"], tmp_path / "no" / "such" / "folder.tar")
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["link.tar", "out.tar"]
    assert not list(tmp_path.glob(".*"))


def test_a_disk_without_hard_links(tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(osfs, "link", refuse)
    transfer.export(zoo, ["t/bot"], tmp_path / "stick.tar")
    assert Archive.open(tmp_path / "stick.tar").record.versions[0].name == "t/bot"
    with pytest.raises(PullError, match="exists already"):
        transfer.export(zoo, ["t/bot"], tmp_path / "stick.tar")


def test_a_damaged_zoo_exports_nothing(tmp_path: Path, zoo: Zoo) -> None:
    for blob in sorted(Path(zoo.where, "blobs").rglob("*")):
        if blob.is_file() and blob.stat().st_size > 5000:
            blob.chmod(0o644)
            blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(DeltaCompressError, match="damaged"):
        transfer.export(zoo, ["t/bot@1", "t/bot@2"], tmp_path / "x.tar")
    assert not list(tmp_path.glob("*.tar"))
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_is_not_there(other: Zoo, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        transfer.import_(other, tmp_path / "none.tar")
    with pytest.raises(StoreError):
        transfer.import_(other, tmp_path)
    (tmp_path / "text").write_bytes(io.BytesIO(b"x" * 2000).read())
    with pytest.raises(IntegrityError, match="not a file of `zoo export`"):
        transfer.import_(other, tmp_path / "text")
