"""Names in the place of paths, and the cache behind them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from zoo.checkpoints import files_of

from deltacompress.artifact.delta import load_delta
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.errors import NotAZooError, NotFoundError, PullError
from deltacompress.zoo.exchange.resolve import artifact_path, entry_of, entry_path, open_zoo, publish_artifact
from deltacompress.zoo.store import osfs

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DELTACOMPRESS_ZOO", str(tmp_path / "zoo"))
    monkeypatch.chdir(tmp_path)
    made = Zoo.init(tmp_path / "zoo")
    made.add(GOLDEN / "int2-24", "t/bot")
    made.add(GOLDEN / "int4-24", "t/bot")
    return made


def test_a_name_becomes_a_directory(zoo: Zoo, tmp_path: Path) -> None:
    zoo.tag("t/bot@1", "prod")
    for name, artifact in (("t/bot", "int4-24"), ("t/bot@1", "int2-24"), ("t/bot@prod", "int2-24")):
        path = artifact_path(name)
        assert files_of(path) == files_of(GOLDEN / artifact)
        assert load_delta(path).manifest.recipe["name"] == artifact
    assert artifact_path("t/bot@1") == artifact_path("t/bot@prod")
    zoo.tag("t/bot@2", "prod")
    assert artifact_path("t/bot@prod") == artifact_path("t/bot@2", zoo.where)


def test_a_directory_comes_first_and_other_paths_pass(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "t" / "bot").mkdir(parents=True)
    assert artifact_path("t/bot") == Path("t/bot")
    for path in ("/no/such/dir", "./t/none", "one", "a/b/c"):
        assert artifact_path(path) == Path(path)
        assert entry_of(path) is None
    with pytest.raises(NotFoundError, match="no entry t/none"):
        artifact_path("t/none")
    assert entry_of("t/bot") is None  # that directory
    assert files_of(entry_path("t/bot@1")) == files_of(GOLDEN / "int2-24")


def test_the_version_that_a_name_means(zoo: Zoo) -> None:
    zoo.tag("t/bot@1", "prod")
    assert [entry_of(one) for one in ("t/bot", "t/bot@1", "t/bot@prod")] == ["t/bot@2", "t/bot@1", "t/bot@1"]


def test_without_a_zoo_a_name_is_a_path(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTACOMPRESS_ZOO")
    assert artifact_path("t/bot") == Path("t/bot")
    with pytest.raises(NotAZooError, match="give --zoo PATH, or set DELTACOMPRESS_ZOO"):
        open_zoo()


@pytest.mark.parametrize("what", ["flip", "extra", "missing", "link", "file", "linked directory", "partial"])
def test_what_lies_in_the_cache_is_not_believed(zoo: Zoo, tmp_path: Path, what: str) -> None:
    path = artifact_path("t/bot")
    shard = path / "delta-00001-of-00001.safetensors"
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    raw = shard.read_bytes()
    if what == "flip":
        shard.write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
    elif what == "extra":
        (path / "model.py").write_text("evil")
    elif what == "missing":
        shard.unlink()
    elif what == "link":
        (victim / "w").write_bytes(raw)
        shard.unlink()
        shard.symlink_to(victim / "w")
    else:
        path.rename(tmp_path / "away")
        if what == "file":
            path.write_text("x")
        elif what == "linked directory":
            path.symlink_to(victim)
        else:
            partial = path.with_name(path.name + ".partial")
            partial.mkdir()
            (partial / "config.json").symlink_to(victim / "kept")
            with pytest.raises(PullError):
                artifact_path("t/bot")
            assert (victim / "kept").read_text() == "kept"
            return
    assert files_of(artifact_path("t/bot")) == files_of(GOLDEN / "int4-24")
    assert (victim / "kept").read_text() == "kept"
    if what == "link":
        assert (victim / "w").read_bytes() == raw


def test_a_cache_that_leads_elsewhere_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "there")
    with pytest.raises(PullError, match="not a directory of yours"):
        artifact_path("t/bot")


def test_two_at_a_time(zoo: Zoo) -> None:
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(artifact_path("t/bot"))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_publish_and_check(zoo: Zoo) -> None:
    linking.add(zoo, GOLDEN / "base", "t/base")
    assert publish_artifact(GOLDEN / "sign-24", "t/sign") == "t/sign@1"
    for spec in ("t/sign", GOLDEN / "sign-24", "t/bot"):  # the last is linked to no base
        assert load_delta(artifact_path(spec, base=GOLDEN / "base")).tensors
    base = zoo.resolve("t/base").manifest
    assert zoo.show("t/sign")[1].lineage.parents == (base,)
    with pytest.raises(NotFoundError, match="a base-ref, not a delta or adapter"):
        artifact_path("t/base")
