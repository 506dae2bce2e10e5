"""The right base and no other: every base against the identity of every other one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from zoo.checkpoints import write_base
from zoo.reliability.bases import Q, accepted, identity, matrix, variants

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import BaseMismatchError, CheckpointError
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.bases import check_base, describe_base, parse_base
from deltacompress.zoo.errors import ConflictError, DamagedRecordError, InvalidNameError, NotFoundError
from deltacompress.zoo.exchange import resolve
from deltacompress.zoo.store import osfs

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash does is tested elsewhere."""
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)


def test_every_base_is_told_from_every_other_however_it_is_sharded(tmp_path: Path) -> None:
    assert matrix(tmp_path) == (10, 200, [])


def test_a_tokenizer_saved_again_is_the_same_tokenizer(tmp_path: Path) -> None:
    told = identity(write_base(tmp_path / "a"))
    again = write_base(tmp_path / "b", spelled=2, truncation={"max_length": 7}, padding={"direction": "Left"})
    assert accepted(told, again)
    (again / "tokenizer.json").unlink()
    with pytest.raises(BaseMismatchError, match=r"tokenizer\.json is in only one of the two"):
        check_base(told, again, "team/base@1")


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    told = identity(write_base(tmp_path / "a"))
    made = variants()
    for name, words in {
        "one bit": f"tensor {Q} differs",
        "transposed shape": r"is BF16 \[16, 8\], not BF16 \[8, 16\]",
        "renamed": f"lacks tensor {Q}",
        "one more": r"has a further tensor lm_head\.weight",
        "other tokenizer": r"its tokenizer is another \(tokenizer\.json differs\)",
    }.items():
        with pytest.raises(BaseMismatchError, match=words):
            check_base(told, made[name](tmp_path / name), "team/base@1")


@pytest.mark.parametrize("directory", ["base", "sharded"])
def test_the_content_hash_is_that_of_checkpoints(tmp_path: Path, directory: str) -> None:
    root = GOLDEN / "base" if directory == "base" else write_base(tmp_path / "b", shards=2)
    described = describe_base(root, hub_id="acme/base", revision="1" * 40)
    checkpoint = Checkpoint.open(root)
    assert described.entry.lineage.base == checkpoint.fingerprint()
    assert described.entry.summary["tensors"] == len(checkpoint.tensors)
    assert described.entry.lineage.base_name == "acme/base"


def test_an_identity_that_contradicts_itself_is_damage(tmp_path: Path) -> None:
    described = describe_base(write_base(tmp_path / "b"), hub_id=None, revision=None)
    raw = b"".join(bytes(chunk) for chunk in described.blobs[0].chunks())
    told = parse_base(raw, "here").content_hash
    with pytest.raises(DamagedRecordError, match="not the one that its content hash is of"):
        parse_base(raw.replace(told.encode(), b"0" * 64), "here")
    with pytest.raises(DamagedRecordError, match="canonical"):
        parse_base(raw + b" ", "here")


def test_a_directory_that_is_no_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        describe_base(tmp_path, hub_id=None, revision=None)
    broken = write_base(tmp_path / "b")
    (broken / "tokenizer.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError, match="given twice"):
        describe_base(broken, hub_id=None, revision=None)


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    return Zoo.init(tmp_path / "zoo")


def golden_base(root: Path, tokenizer: str) -> Path:
    shutil.copytree(GOLDEN / "base", root)
    (root / "tokenizer.json").write_text(tokenizer)
    return root


def test_a_delta_is_linked_to_its_base_by_content(tmp_path: Path, zoo: Zoo) -> None:
    assert linking.add(zoo, GOLDEN / "int2-24", "team/bot").base is None
    linking.add(zoo, write_base(tmp_path / "other"), "team/other")
    ref = linking.add(zoo, GOLDEN / "base", "team/base")
    assert (ref.kind, ref.base) == ("base-ref", None)
    added = linking.add(zoo, GOLDEN / "int2-24", "team/bot")
    assert (added.kind, added.base, str(added.published)) == ("delta", "team/base@1", "team/bot@2")
    assert zoo.show("team/bot")[1].lineage.parents == (ref.published.manifest,)
    with pytest.raises(BaseMismatchError, match="give its own base"):
        linking.add(zoo, GOLDEN / "int2-24", "team/bot", base="team/other")
    with pytest.raises(NotFoundError, match="a delta, not a base-ref") as error:
        linking.add(zoo, GOLDEN / "int2-24", "team/bot", base="team/bot")
    assert error.value.way_out
    with pytest.raises(NotFoundError, match=r"holds no manifest\.json"):
        linking.add(zoo, tmp_path, "team/bot")


def test_equal_weights_with_other_tokenizers_are_two_bases(
    tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = golden_base(tmp_path / "a", '{"model": 1}'), golden_base(tmp_path / "b", '{"model": 2}')
    linking.add(zoo, first, "team/first")
    linking.add(zoo, second, "team/second")
    with pytest.raises(ConflictError, match=r"team/first@1, team/second@1\); say which with --base"):
        linking.add(zoo, GOLDEN / "int2-24", "team/bot")
    linking.add(zoo, GOLDEN / "int2-24", "team/bot", base="team/second")
    assert linking.check_base_of(zoo, "team/bot", second) == "team/second@1"
    with pytest.raises(BaseMismatchError, match=r"not the base team/second@1: its tokenizer is another"):
        linking.check_base_of(zoo, "team/bot", first)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "entries"))
    with pytest.raises(BaseMismatchError, match=r"tokenizer\.json differs"):
        resolve.artifact_path("team/bot", zoo.where, base=first)
    assert not (tmp_path / "entries").exists()
    assert resolve.artifact_path("team/bot", zoo.where, base=second).is_dir()


def test_what_an_entry_is_made_from(zoo: Zoo) -> None:
    first = zoo.add(GOLDEN / "int4-24", "team/bot")
    zoo.add(GOLDEN / "int2-24", "team/bot", parents="team/bot@1", relation="recompressed")  # one name is one parent
    assert zoo.show("team/bot")[1].lineage.parents == (first.manifest,)
    with pytest.raises(InvalidNameError, match=r"relation 'grown': one of finetune, .*recompressed"):
        zoo.add(GOLDEN / "int2-24", "team/bot", relation="grown")
