"""Side files that are stored as zstd frames: what is stored how, what comes back, and every damage refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, Recorder, files_of, flips, write_tokenizer

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.cli.main import main
from deltacompress.compression import side_files
from deltacompress.compression.before.dry_run import plan
from deltacompress.compression.driver import compress
from deltacompress.errors import CheckpointError, ChecksumError, FormatError, IntegrityError, TruncatedFileError
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest
from deltacompress.lossless.zstd_file import encode_file
from deltacompress.models.tokenizers import has_tokenizer, load_tokenizer
from deltacompress.zoo import Zoo
from deltacompress.zoo.exchange.resolve import artifact_path

FRAMED = "tokenizer.json.zst"

CONFIG = "config.json"


@pytest.fixture(scope="module")
def made(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A small pair whose tokenizer is large enough to be worth a frame, and a config that would be, too."""
    root = tmp_path_factory.mktemp("framed")
    small = make_pair("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    pair = Pair(*(shutil.copytree(one, root / one.name) for one in (small.base, small.finetuned)), small.data)
    for checkpoint in (pair.base, pair.finetuned):
        write_tokenizer(checkpoint, [f"w{i}" for i in range(300)])
    for name in (CONFIG, "generation_config.json"):
        file = pair.finetuned / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {"note": "w " * 4000}))
    (pair.finetuned / "chat_template.jinja").write_text("{{ messages[0].content }}" + " " * 4071)  # 4,096 bytes
    (pair.finetuned / "noise.model").write_bytes(hashlib.shake_128(b"x").digest(9000))
    return pair


@pytest.fixture(scope="module")
def framed(made: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("framed") / "out"
    compress(made.base, made.finetuned, recipe="lossless", out=out)
    return out


@pytest.fixture
def copy(framed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(framed, tmp_path / "copy")


def change(artifact: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the manifest, and make its digest right again."""
    file = artifact / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["digest"]
    change(manifest)
    file.write_bytes(canonical_bytes(manifest | {"digest": canonical_digest(manifest)}))


def side_file(manifest: dict[str, Any], name: str = "tokenizer.json") -> dict[str, Any]:
    return next(one for one in manifest["files"] if one["file"] == name)


def store(artifact: Path, frame: bytes, **content: Any) -> None:
    """Put another frame in the place of the tokenizer's, and its hash into the manifest."""
    (artifact / FRAMED).write_bytes(frame)

    def told(manifest: dict[str, Any]) -> None:
        record = side_file(manifest)
        record |= content | {"zstd": {"bytes": len(frame), "sha256": hashlib.sha256(frame).hexdigest()}}

    change(artifact, told)


def assert_refused(artifact: Path, base: Path, error: type[IntegrityError], told: str) -> None:
    """By verify, restore and the zoo alike, with nothing left."""
    out, zoo = artifact.parent / "restored", Zoo.init(artifact.parent / "zoo")
    for attempt in (
        lambda: verify(artifact),
        lambda: restore(artifact, base=base, out=out),
        lambda: zoo.add(artifact, "t/m"),
    ):
        with pytest.raises(error, match=told) as caught:
            attempt()
        assert type(caught.value) is error
    assert main(["verify", str(artifact), "--quiet"]) == 3
    assert not out.exists()
    assert list(zoo.list()) == []


# --- what is stored --------------------------------------------------------------------------------------------


def test_only_what_gains_is_stored_as_a_frame(made: Pair, framed: Path) -> None:
    manifest = load_delta(framed).manifest
    assert {record.file for record in manifest.files if record.zstd is not None} == {"tokenizer.json"}
    lying = {name for name in files_of(framed) if not name.startswith(("delta-", "manifest"))}
    wanted = {path.name for path in made.finetuned.iterdir() if path.suffix != ".safetensors"}
    assert lying == wanted - {"tokenizer.json"} | {FRAMED}
    assert (framed / FRAMED).read_bytes() == encode_file((made.finetuned / "tokenizer.json").read_bytes())
    for name in wanted - {"tokenizer.json"}:
        assert (framed / name).read_bytes() == (made.finetuned / name).read_bytes()


@pytest.mark.parametrize(("size", "framed"), [(4096, False), (4097, True)])
def test_what_is_small_stays_as_it_is(made: Pair, tmp_path: Path, size: int, framed: bool) -> None:
    pair = Pair(made.base, shutil.copytree(made.finetuned, tmp_path / "tuned"), made.data)
    (pair.finetuned / "chat_template.jinja").write_text(" " * size)
    compress(pair.base, pair.finetuned, recipe="lossless", out=tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja.zst").exists() == framed
    assert (tmp_path / "out" / "chat_template.jinja").exists() != framed


def test_a_tenth_must_be_gained(made: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (made.finetuned / "tokenizer.json").stat().st_size
    for length, framed in ((size * 9 // 10, True), (size * 9 // 10 + 1, False)):
        monkeypatch.setattr(side_files, "encode_file", lambda _, length=length: bytes(length))
        out = tmp_path / str(length)
        (out / "in").mkdir(parents=True)
        opened = side_files.Checkpoint.open(made.finetuned)
        records = side_files.write_side_files(opened, out / "in", lossless="zstd")
        assert (out / "in" / FRAMED).exists() == framed
        record = next(one for one in records if one.file == "tokenizer.json")
        assert (record.zstd is not None) == framed
        assert record.bytes == size


def test_without_a_lossless_stage_all_stay_as_they_are(made: Pair, tmp_path: Path) -> None:
    compress(made.base, made.finetuned, recipe="lossless", out=tmp_path / "out", lossless="none")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (made.finetuned / "tokenizer.json").read_bytes()
    assert not (tmp_path / "out" / FRAMED).exists()
    assert all(record.zstd is None for record in load_delta(tmp_path / "out").manifest.files)
    assert "zstd" not in (tmp_path / "out" / "manifest.json").read_text()
    verify(tmp_path / "out")


def test_the_same_bytes_on_every_run(made: Pair, framed: Path, tmp_path: Path) -> None:
    compress(made.base, made.finetuned, recipe="lossless", out=tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(framed)


def test_it_is_counted_as_it_is_stored(made: Pair, framed: Path, tmp_path: Path) -> None:
    delta, lying = load_delta(framed), files_of(framed)
    assert delta.artifact_bytes == sum(map(len, lying.values()))
    summary = delta.summary()
    assert sum(row["stored_bytes"] for row in summary["parts"]) == delta.artifact_bytes
    (row,) = (row for row in summary["parts"] if row["part"] == "config and tokenizer")
    side = {name: raw for name, raw in lying.items() if not name.startswith(("delta-", "manifest"))}
    assert row["stored_bytes"] == sum(map(len, side.values()))
    assert row["full_bytes"] == sum(
        path.stat().st_size for path in made.finetuned.iterdir() if path.suffix != ".safetensors"
    )
    for lossless in ("zstd", "none"):
        told = plan(made.base, made.finetuned, recipe="lossless", out=tmp_path / "out", lossless=lossless)
        assert told.side_file_bytes == row["stored_bytes" if lossless == "zstd" else "full_bytes"]
        assert told.expected_bytes is not None
        assert told.expected_bytes > told.side_file_bytes


# --- what comes back -------------------------------------------------------------------------------------------


def test_they_come_back_byte_for_byte(made: Pair, framed: Path, tmp_path: Path) -> None:
    verify(framed, base=made.base)
    out = restore(framed, base=made.base, out=tmp_path / "restored")
    wanted, found = files_of(made.finetuned), files_of(out)
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"model.safetensors"}:
        assert found[name] == wanted[name]


def test_a_restored_checkpoint_is_known_again(made: Pair, framed: Path, tmp_path: Path) -> None:
    out = restore(framed, base=made.base, out=tmp_path / "restored")
    before = (out / "tokenizer.json").stat().st_mtime_ns
    restore(framed, base=made.base, out=out)
    assert (out / "tokenizer.json").stat().st_mtime_ns == before


def test_an_artifact_is_used_again_and_replaced(made: Pair, copy: Path) -> None:
    before = files_of(copy)
    compress(made.base, made.finetuned, recipe="lossless", out=copy)
    assert files_of(copy) == before
    compress(made.base, made.finetuned, recipe="lossless", out=copy, lossless="none", force=True)
    assert not (copy / FRAMED).exists()


def test_an_artifact_of_plain_files_is_read_as_before(made: Pair, copy: Path) -> None:
    """As they were written before there were frames."""
    (copy / FRAMED).unlink()
    shutil.copy(made.finetuned / "tokenizer.json", copy)
    change(copy, lambda manifest: side_file(manifest).pop("zstd"))
    verify(copy)
    out = restore(copy, base=made.base, out=copy.parent / "restored")
    assert (out / "tokenizer.json").read_bytes() == (made.finetuned / "tokenizer.json").read_bytes()
    assert len(load_tokenizer(copy)) == 304
    compress(made.base, made.finetuned, recipe="lossless", out=copy)  # it is what would be made now: used again


def test_the_zoo_gives_it_back(framed: Path, tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    published = zoo.add(framed, "team/one")
    out = zoo.pull("team/one", tmp_path / "out")
    assert files_of(out) == files_of(framed)
    entry = zoo.show(str(published))[1]
    (layer,) = (layer for layer in entry.layers if layer.annotations.get("file") == FRAMED)
    assert (layer.digest, layer.size) == (hashlib.sha256((framed / FRAMED).read_bytes()).hexdigest(), layer.size)
    assert entry.summary["artifact_bytes"] == load_delta(framed).artifact_bytes


def test_a_pulled_one_is_whole_and_not_pulled_again(
    framed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(framed, "team/one")
    recorder = Recorder()
    for _ in range(2):
        assert files_of(artifact_path("team/one", tmp_path / "zoo", reporter=recorder)) == files_of(framed)
    assert recorder.notes == []


# --- who opens it by its name ----------------------------------------------------------------------------------


def test_the_tokenizer_of_an_artifact_is_that_of_the_model(made: Pair, framed: Path) -> None:
    assert has_tokenizer(framed)
    ours, theirs = load_tokenizer(framed), load_tokenizer(made.finetuned)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    assert ours.encode("w17 w299 w3") == theirs.encode("w17 w299 w3")


def test_a_frame_beside_a_model_is_nothing_to_it(made: Pair, tmp_path: Path) -> None:
    """Only an artifact holds frames: a checkpoint's tokenizer is what lies there under its own name."""
    model = shutil.copytree(made.finetuned, tmp_path / "model")
    (model / FRAMED).write_bytes(b"mine")
    assert len(load_tokenizer(model)) == 304
    (model / "tokenizer.json").unlink()
    assert not has_tokenizer(model)
    with pytest.raises(CheckpointError, match=r"cannot be loaded|holds no tokenizer"):
        load_tokenizer(model)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw + b"x", lambda _: b"", lambda _: b"text"])
def test_a_damaged_frame_is_no_tokenizer(copy: Path, damage: Callable[[bytes], bytes]) -> None:
    (copy / FRAMED).write_bytes(damage((copy / FRAMED).read_bytes()))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json\.zst: .*zstd frame"):
        load_tokenizer(copy)


def test_a_tokenizer_is_decoded_no_further_than_one_may_be_large(copy: Path) -> None:
    (copy / FRAMED).write_bytes(encode_file(bytes((64 << 20) + 1)))
    with pytest.raises(CheckpointError, match=f"holds {(64 << 20) + 1} bytes, more than the {64 << 20}"):
        load_tokenizer(copy)


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_something_else_in_its_place(copy: Path, kind: str) -> None:
    place = copy / FRAMED
    place.rename(copy.parent / "elsewhere")
    if kind == "directory":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(copy.parent / "elsewhere")
    else:
        os.mkfifo(place)
    with pytest.raises(CheckpointError, match=FRAMED):
        load_tokenizer(copy)
    with pytest.raises(FormatError, match=FRAMED):
        load_delta(copy)


# --- damage ----------------------------------------------------------------------------------------------------


def test_every_byte_of_a_frame_counts(copy: Path) -> None:
    for _ in flips(copy / FRAMED, range(0, (copy / FRAMED).stat().st_size, 7), bit=16):
        with pytest.raises(ChecksumError, match=FRAMED):
            verify(copy)
    verify(copy)


@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_cut_frame(made: Pair, copy: Path, length: int) -> None:
    (copy / FRAMED).write_bytes((copy / FRAMED).read_bytes()[:length])
    assert_refused(copy, made.base, TruncatedFileError, FRAMED)


def test_a_missing_frame(made: Pair, copy: Path) -> None:
    (copy / FRAMED).unlink()
    assert_refused(copy, made.base, TruncatedFileError, f"{FRAMED}: missing")


@pytest.mark.parametrize("cut", [1, 4, 5, 40])
def test_a_cut_frame_with_its_hash_made_right(made: Pair, copy: Path, cut: int) -> None:
    store(copy, (copy / FRAMED).read_bytes()[:-cut])
    assert_refused(copy, made.base, FormatError, f"{FRAMED}: its zstd frame")


def test_longer_content_than_recorded(made: Pair, copy: Path) -> None:
    store(copy, encode_file((made.finetuned / "tokenizer.json").read_bytes() + b" "))
    assert_refused(copy, made.base, FormatError, r"a zstd frame of \d+ bytes where \d+ belong")


def test_shorter_content_than_recorded(made: Pair, copy: Path) -> None:
    store(copy, encode_file((made.finetuned / "tokenizer.json").read_bytes()[:-1]))
    assert_refused(copy, made.base, FormatError, r"a zstd frame of \d+ bytes where \d+ belong")


def test_bytes_behind_a_frame(made: Pair, copy: Path) -> None:
    store(copy, (copy / FRAMED).read_bytes() + b"\x50\x2a\x4d\x18\x04\0\0\0more")
    assert_refused(copy, made.base, FormatError, "followed by more bytes")


def test_other_content_of_the_same_length(made: Pair, copy: Path) -> None:
    raw = (made.finetuned / "tokenizer.json").read_bytes().replace(b'"w17"', b'"w71"')
    store(copy, encode_file(raw))
    assert_refused(copy, made.base, ChecksumError, f"{FRAMED}: its bytes differ")


def test_a_wrong_hash_of_the_frame(made: Pair, copy: Path) -> None:
    change(copy, lambda manifest: side_file(manifest)["zstd"].update(sha256="0" * 64))
    assert_refused(copy, made.base, ChecksumError, f"{FRAMED}: its bytes differ")


def test_a_frame_and_the_file_itself(made: Pair, copy: Path) -> None:
    """Whoever opens the tokenizer by its name must not find another one."""
    shutil.copy(made.finetuned / "tokenizer.json", copy)
    assert_refused(copy, made.base, FormatError, r"tokenizer\.json: lies there beside tokenizer\.json\.zst")
    with pytest.raises(CheckpointError, match="lies there beside"):
        load_tokenizer(copy)


def test_a_file_and_a_frame_of_it(made: Pair, copy: Path) -> None:
    (copy / "config.json.zst").write_bytes(encode_file(b"{}" * 4000))
    assert_refused(copy, made.base, FormatError, r"config\.json\.zst: lies there beside config\.json")
    assert main(["generate", str(copy), "x", "--base", str(made.base), "--quiet"]) == 3


def _listed_twice(manifest: dict[str, Any]) -> None:
    plain = {key: value for key, value in side_file(manifest).items() if key != "zstd"}
    manifest["files"].append(plain)


def _listed_by_its_frame(manifest: dict[str, Any]) -> None:
    side_file(manifest)["file"] = FRAMED


def _a_shard_of_its_name(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["file"] = FRAMED


def _another_name(manifest: dict[str, Any]) -> None:
    side_file(manifest)["file"] = "modeling_llama.py"


def _a_framed_shard(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["zstd"] = {"bytes": 9, "sha256": "0" * 64}


def _a_framed_config(manifest: dict[str, Any]) -> None:
    side_file(manifest, CONFIG)["zstd"] = {"bytes": 900, "sha256": "0" * 64}


def _no_lossless_stage(manifest: dict[str, Any]) -> None:
    manifest["lossless"] = "none"


def _bomb(manifest: dict[str, Any]) -> None:
    side_file(manifest)["bytes"] = side_file(manifest)["zstd"]["bytes"] * (1 << 15) + 1


def _huge(manifest: dict[str, Any]) -> None:
    side_file(manifest)["bytes"] = (512 << 20) + 1


def _no_gain(manifest: dict[str, Any]) -> None:
    side_file(manifest)["bytes"] = side_file(manifest)["zstd"]["bytes"]


def _null(manifest: dict[str, Any]) -> None:
    side_file(manifest, CONFIG)["zstd"] = None


def _more(manifest: dict[str, Any]) -> None:
    side_file(manifest)["zstd"]["level"] = 19


def _negative(manifest: dict[str, Any]) -> None:
    side_file(manifest)["zstd"]["bytes"] = -1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_listed_twice, "a file is listed twice"),
        (_listed_by_its_frame, "tokenizer.json.zst is no config or tokenizer file"),
        (_a_shard_of_its_name, "a file is listed twice"),
        (_another_name, "modeling_llama.py is no config or tokenizer file"),
        (_a_framed_shard, "is a zstd frame, which no shard is"),
        (_a_framed_config, "config.json is a zstd frame"),
        (_no_lossless_stage, "tokenizer.json is a zstd frame"),
        (_bomb, "bytes of zstd are no frame of the"),
        (_huge, "as no such file has"),
        (_no_gain, "bytes of zstd are no frame of the"),
        (_null, "not spelled as this format spells it"),
        (_more, "level"),
        (_negative, "bytes"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_manifest_that_contradicts_itself(copy: Path, make: Callable[[dict[str, Any]], None], told: str) -> None:
    change(copy, make)
    with pytest.raises(FormatError, match=told):
        load_delta(copy)


def test_a_name_of_two_hundred_characters_is_stored_with_more(copy: Path) -> None:
    name = "tokenizer" + "x" * 186 + ".json"
    (copy / FRAMED).rename(copy / f"{name}.zst")
    change(copy, lambda manifest: side_file(manifest).update(file=name))
    assert {record.file for record in verify(copy).manifest.stored_files} >= {f"{name}.zst"}
