"""The zoo as its users see it, on both backends: publish, read, share, tag, remove, restore, collect."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from zoo.reliability.scenarios import report
from zoo.samples import files_of, make_artifact, sample_parts

from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import (
    ConflictError,
    InvalidNameError,
    MissingBlobError,
    NotFoundError,
    PullError,
)


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


def test_what_goes_in_comes_out(any_zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    made = any_zoo.add(artifact, "team/bot")
    assert str(made) == "team/bot@1"
    assert str(any_zoo.add(artifact, "team/bot")) == "team/bot@2"
    assert made.bytes >= sum(len(raw) for raw in files_of(artifact).values())
    for name in ("team/bot", "team/bot@1", "team/bot@latest"):
        out = any_zoo.pull(name, tmp_path / f"out-{name.replace('/', '-')}")
        assert files_of(out) == files_of(artifact)
    found, entry = any_zoo.show("team/bot@1")
    assert (found.version, found.manifest) == (1, made.manifest)
    assert (entry.kind, entry.summary["recipe"], entry.summary["lossless"]) == ("delta", "sample", "none")
    assert any_zoo.verify().ok
    assert any_zoo.verify("team/bot", share=0.5, seed=1).ok


def test_equal_parts_are_stored_once(any_zoo: Zoo, tmp_path: Path) -> None:
    frozen = {f"frozen.{i}.w.planes": os.urandom(50_000) for i in range(4)}
    for name in "ab":
        parts = frozen | {"own.w.planes": os.urandom(5000)}
        any_zoo.add(make_artifact(tmp_path / name, parts, seed=name), f"team/{name}")
    found = any_zoo.du()
    assert found.logical > 400_000
    assert found.physical < 0.6 * found.logical
    assert all(5000 < entry.unique < 50_000 for entry in found.entries)
    assert found.unreferenced == found.trash == 0


def test_tags_move_one_at_a_time_and_tell(any_zoo: Zoo, artifact: Path) -> None:
    for _ in range(3):
        any_zoo.add(artifact, "team/bot")
    assert any_zoo.tag("team/bot@2", "prod").generation == 1
    assert any_zoo.tag("team/bot@2", "prod").generation == 1  # nothing to move
    assert not any_zoo.tag("team/bot", "prod").rollback
    assert any_zoo.tag("team/bot@1", "prod", expect=3).rollback
    assert any_zoo.resolve("team/bot@prod").version == 1
    moves = any_zoo.history("team/bot@prod")
    assert [(move.version, move.rollback) for move in moves] == [(2, False), (3, False), (1, True)]
    with pytest.raises(ConflictError, match="points to version 1, not 3"):
        any_zoo.tag("team/bot@2", "prod", expect=3)
    with pytest.raises(ConflictError, match="points to version 1, not new"):
        any_zoo.tag("team/bot@2", "prod", expect=0)
    with pytest.raises(ConflictError, match="does not exist"):
        any_zoo.tag("team/bot@2", "canary", expect=1)
    with pytest.raises(InvalidNameError, match="latest"):
        any_zoo.tag("team/bot@2", "latest")
    with pytest.raises(NotFoundError, match=r"no alias canary; it has: prod"):
        any_zoo.resolve("team/bot@canary")


def test_removed_comes_back_before_and_after_a_collection(any_zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    any_zoo.add(artifact, "team/bot")
    any_zoo.add(make_artifact(tmp_path / "b", sample_parts(2), seed=2), "team/bot")
    any_zoo.attach(*report(any_zoo.resolve("team/bot@2").manifest))
    any_zoo.tag("team/bot@2", "prod")
    with pytest.raises(ConflictError, match="alias prod points there"):
        any_zoo.rm("team/bot@2")
    any_zoo.tag("team/bot@1", "prod")
    for collections in (0, 1, 2):
        assert any_zoo.rm("team/bot@2") == [2]
        with pytest.raises(NotFoundError, match=r"was removed; `zoo undelete team/bot@2`"):
            any_zoo.pull("team/bot@2", tmp_path / "no")
        assert [entry.version for entry in any_zoo.list(all_versions=True)] == [1]
        for _ in range(collections):
            any_zoo.gc(grace=0)
        any_zoo.undelete("team/bot@2")
        out = any_zoo.pull("team/bot@2", tmp_path / f"out-{collections}")
        assert files_of(out) == files_of(tmp_path / "b")
        assert len(any_zoo.referrers("team/bot@2")) == 1
        assert any_zoo.verify().ok
    any_zoo.rm("team/bot@2")
    any_zoo.gc(grace=0)
    any_zoo.gc(grace=0, empty_trash=True)
    with pytest.raises(MissingBlobError, match="missing"):
        any_zoo.undelete("team/bot@2")
    assert str(any_zoo.add(artifact, "team/bot")) == "team/bot@3"  # a number is never given out twice
    assert any_zoo.verify().ok


def test_a_collection_takes_what_nothing_needs(any_zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    any_zoo.add(artifact, "team/keep")
    before = any_zoo.du().physical
    any_zoo.add(make_artifact(tmp_path / "b", sample_parts(2), seed=2), "team/go")
    any_zoo.rm("team/go")
    done = any_zoo.gc(grace=0)
    assert done.trashed > 0
    assert any_zoo.du().physical == before
    assert any_zoo.gc(grace=0).trashed == 0
    assert any_zoo.gc(empty_trash=True).deleted == done.trashed
    assert any_zoo.du().trash == 0
    any_zoo.add(tmp_path / "b", "team/go")
    assert files_of(any_zoo.pull("team/go", tmp_path / "out")) == files_of(tmp_path / "b")


def test_pushing_to_another_zoo(any_zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo, other = Zoo.init(tmp_path / "source"), any_zoo
    made = zoo.add(artifact, "team/bot")
    zoo.attach(*report(made.manifest))
    copy = zoo.push("team/bot", other, "lab/bot")
    assert (copy.version, copy.manifest) == (1, made.manifest)
    assert files_of(other.pull("lab/bot", tmp_path / "out")) == files_of(artifact)
    assert [entry.kind for entry in other.referrers("lab/bot")] == ["report"]


def test_an_interrupted_pull_goes_on(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    whole = files_of(artifact)
    work = tmp_path / "out.partial"
    for change in (
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw + b"more",
        lambda raw: bytes(len(raw) + 5000),
        lambda raw: raw[:100] + bytes(len(raw)),
        lambda raw: bytes(len(raw)),
        bytes.title,
    ):
        work.mkdir()
        for name, raw in whole.items():
            (work / name).write_bytes(change(raw))
        assert files_of(zoo.pull("team/bot", tmp_path / "out")) == whole
        assert not work.exists()
        shutil.rmtree(tmp_path / "out")


def test_targets_that_cannot_be(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    with pytest.raises(PullError, match="exists already"):
        zoo.pull("team/bot", artifact)
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(PullError, match=r"thesis\.txt, which is not of this entry"):
        zoo.pull("team/bot", tmp_path / "x")
    (tmp_path / "y.partial").mkdir()
    (tmp_path / "y.partial" / "config.json").symlink_to(tmp_path / "victim")
    with pytest.raises(PullError, match=r"config\.json"):
        zoo.pull("team/bot", tmp_path / "y")
    assert not (tmp_path / "victim").exists()
    (tmp_path / "z").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PullError, match="exists already"):
        zoo.pull("team/bot", tmp_path / "z")
    assert not (tmp_path / "nowhere").exists()


class At:
    """A reporter that does something at the first step."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._todo = [work]

    def phase(self, name: str, total: int | None = None) -> None: ...

    def step(self, label: str, **_: object) -> None:
        if self._todo:
            self._todo.pop()()

    def note(self, message: str) -> None: ...


def test_two_pulls_to_one_place(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    told: list[str] = []

    def second() -> None:
        try:
            zoo.pull("team/bot", tmp_path / "out")
        except PullError as error:
            told.append(str(error))

    assert files_of(zoo.pull("team/bot", tmp_path / "out", reporter=At(second))) == files_of(artifact)
    assert len(told) == 1
    assert "another pull works there" in told[0]


def test_a_pull_where_nothing_can_be_locked(
    zoo: Zoo, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    zoo.add(artifact, "team/bot")
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(PullError, match=r"out\.partial: No locks available"):
        zoo.pull("team/bot", tmp_path / "out")


def test_a_target_that_somebody_makes_meanwhile_is_left_alone(zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    zoo.add(artifact, "team/bot")
    out = tmp_path / "out"

    def make() -> None:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    with pytest.raises(PullError, match="out: exists already"):
        zoo.pull("team/bot", out, reporter=At(make))
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_the_class_has_what_the_command_line_has(tmp_path: Path) -> None:
    """Each verb that is a function beside the class is a method too."""
    golden = Path(__file__).resolve().parent.parent / "golden" / "v1"
    zoo = Zoo.init(tmp_path / "zoo")
    base = zoo.add(golden / "base", "t/base", hub_id="acme/llama")
    first = zoo.add(golden / "int4-24", "t/bot")
    zoo.add(golden / "int2-24", "t/bot", base="t/base", parents=("t/bot@1",), relation="recompressed")
    assert zoo.show("t/bot@1")[1].lineage.parents == (base.manifest,)
    assert {node.label for node in zoo.lineage("t/bot@1").nodes if node.focus} == {"t/bot@1"}
    assert {node.label for node in zoo.lineage("t/bot").nodes if node.focus} == {"t/bot@1", "t/bot@2"}
    assert len(zoo.lineage().nodes) == 4
    assert zoo.diff("t/bot@1", "t/bot@2")["same"] is False
    assert "base_model: acme/llama" in zoo.card("t/bot")
    (tmp_path / "r.json").write_text('{"sst2": 0.5}')
    zoo.attest("t/bot@1", tmp_path / "r.json")
    assert zoo.scores("t/bot@1") == {"sst2": 0.5}
    zoo.export(["t/bot@1"], tmp_path / "x.tar")
    other = Zoo.init(tmp_path / "other")
    assert [one.target for one in other.import_(tmp_path / "x.tar")] == ["t/bot@1"]
    assert other.scores("t/bot@1") == {"sst2": 0.5}
    assert other.resolve("t/bot").manifest == first.manifest
    assert zoo.signatures("t/bot@1") == []
