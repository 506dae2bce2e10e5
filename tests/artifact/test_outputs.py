"""One rule for every output: the same is used again, another is refused, --force replaces it by a whole new one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, Recorder, changed, files_of, make_pair, write_data

from deltacompress.analysis.output import analyze_into
from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.outputs import check_outside, publish_directory
from deltacompress.artifact.restoration import restore
from deltacompress.compression import driver
from deltacompress.errors import BackendError, InputError, OutputError


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("outputs"), "llama")


@pytest.fixture
def out(mine: Pair, tmp_path: Path) -> Path:
    mine.compress(tmp_path / "out", recipe="int4")
    return tmp_path / "out"


def test_an_artifact_of_the_same_input_is_used_again(
    mine: Pair, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, notes = files_of(out), Recorder()
    monkeypatch.setattr(driver, "prepare", None)  # no work
    again = mine.compress(out, recipe="int4", reporter=notes)
    assert again.used_again
    assert again.summary == load_delta(out).summary()
    assert any(str(out) in note and "verified, and used again" in note for note in notes.notes)
    other = write_data(tmp_path / "other.jsonl", records=70)
    for change, told in (
        ({"recipe": "lossless"}, "another recipe"),
        ({"lossless": "none"}, "another lossless stage"),
        ({"seed": 1}, "another calibration data, samples, sequence length or seed"),
        ({"samples": 7}, "another calibration data, samples"),
        ({"calibration": other}, "another calibration data"),
    ):
        with pytest.raises(OutputError, match=rf"out: holds an artifact .* {told}.*another out, or .*force=True"):
            mine.compress(out, **({"recipe": "int4"} | change))  # type: ignore[arg-type]
    assert files_of(out) == before


def test_an_artifact_of_another_model_is_not_used_again(mine: Pair, out: Path, tmp_path: Path) -> None:
    double = changed(mine, tmp_path, lambda weights: {name: w * 2 for name, w in weights.items()})
    with pytest.raises(OutputError, match="another fine-tuned model"):
        double.compress(out, recipe="int4")
    same = changed(mine, tmp_path / "same", lambda weights: weights, temperature=3)
    with pytest.raises(OutputError, match="another config or tokenizer"):
        same.compress(out, recipe="int4")


def test_a_damaged_artifact_is_not_used_again(mine: Pair, out: Path) -> None:
    whole = files_of(out)
    shard = next(out.glob("*.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(OutputError, match="out: holds a damaged artifact"):
        mine.compress(out, recipe="int4")
    assert not mine.compress(out, recipe="int4", force=True).used_again
    assert files_of(out) == whole


def test_force_replaces_when_the_new_one_is_whole(mine: Pair, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(out)

    def fail(*_: Any, **__: Any) -> Any:
        raise InputError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "publish", fail)
        with pytest.raises(InputError, match="stopped"):
            mine.compress(out, recipe="lossless", force=True)
    assert files_of(out) == before
    mine.compress(out, recipe="lossless", force=True)
    assert load_delta(out).manifest.recipe["name"] == "lossless"
    assert [path.name for path in out.parent.iterdir() if path.name.startswith("out")] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_artifact_is_never_replaced(mine: Pair, out: Path, force: bool) -> None:
    restored = restore(out, base=mine.base, out=out.with_name("model"))
    (out / "notes.d").mkdir()
    for place in (out, restored):
        before = files_of(place)
        with pytest.raises(OutputError, match="exists already"):
            mine.compress(place, recipe="int4", force=force)
        assert files_of(place) == before


@pytest.mark.parametrize("name", ["thesis.docx", "delta-mine.safetensors", "manifest.json.bak"])
def test_a_file_that_the_artifact_does_not_name_keeps_it(mine: Pair, out: Path, name: str) -> None:
    (out / name).write_text("mine")
    before = files_of(out)
    told = f"exists already, and holds {name}, which is none of ours; choose another out, or remove it"
    with pytest.raises(OutputError, match=re.escape(told)):
        mine.compress(out, recipe="lossless", force=True)
    assert files_of(out) == before


@pytest.mark.parametrize("text", ['{"manifest_version": 3, "name": "a browser extension"}', "", "{"])
def test_a_manifest_of_something_else_is_no_artifact(mine: Pair, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    (tmp_path / "out" / "config.json").write_text("{}")
    before = files_of(tmp_path / "out")
    with pytest.raises(OutputError, match=r"exists already, and holds manifest\.json, which is none of ours; choose"):
        mine.compress(tmp_path / "out", recipe="lossless", force=True)
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["optimizer.pt", "modeling.py", "weights.safetensors", "model-mine.safetensors"])
def test_a_file_that_no_checkpoint_of_ours_has_keeps_it(mine: Pair, out: Path, name: str) -> None:
    model = restore(out, base=mine.base, out=out.with_name("model"))
    (model / name).write_text("mine")
    before = files_of(model)
    with pytest.raises(OutputError, match=rf"exists already, and holds {name}, which is none of ours; choose another"):
        restore(out, base=mine.base, out=model, force=True)
    assert files_of(model) == before


def test_what_is_there_is_named(mine: Pair, out: Path) -> None:
    model = restore(out, base=mine.base, out=out.with_name("model"))
    with pytest.raises(OutputError, match=r"model: exists already, and holds config\.json; choose another out"):
        mine.compress(model, recipe="int4", force=True)
    for name in ("z.txt", "b.txt"):
        (model / name).write_text("mine")
    with pytest.raises(OutputError, match=r"model: exists already, and holds b\.txt, which is none of ours; choose"):
        mine.compress(model, recipe="int4", force=True)
    (out.parent / "file").write_text("mine")
    (out.parent / "link").symlink_to(out)
    for name, what in (("file", "file"), ("link", "symbolic link")):
        told = f"{name}: exists already, and is a {what}, where a directory is needed; choose another out"
        with pytest.raises(OutputError, match=told):
            mine.compress(out.parent / name, recipe="int4", force=True)


def test_what_a_kill_set_aside_is_found_again(mine: Pair, out: Path) -> None:
    before = files_of(out)
    out.rename(out.with_name(".out.old-0123abcd"))
    assert mine.compress(out, recipe="int4").used_again
    assert files_of(out) == before


def test_an_old_artifact_that_cannot_be_removed_is_no_failure(
    mine: Pair, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.rename

    def refused(source: Any, target: Any) -> None:
        if ".old-" in str(target):
            raise PermissionError(13, "no")
        original(source, target)

    monkeypatch.setattr(os, "rename", refused)
    assert not mine.compress(out, recipe="lossless", force=True).used_again
    assert load_delta(out).manifest.recipe["name"] == "lossless"
    assert [path.name for path in out.parent.iterdir() if path.name.startswith("out")] == ["out"]


def test_a_restored_model_is_left_there_only_if_it_is_the_very_one(mine: Pair, out: Path) -> None:
    model, notes = out.with_name("model"), Recorder()
    restore(out, base=mine.base, out=model)
    whole, written = files_of(model), (model / "config.json").stat().st_mtime_ns
    restore(out, base=mine.base, out=model, reporter=notes)
    assert any("left there" in note for note in notes.notes)
    assert (model / "config.json").stat().st_mtime_ns == written
    for name in ("config.json", "model.safetensors"):
        raw = (model / name).read_bytes()
        (model / name).write_bytes(raw[:-3] + raw[-3:].swapcase() + (b" " if name == "config.json" else b""))
        if name == "model.safetensors":
            (model / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(OutputError, match=r"model: holds another checkpoint; .*force=True"):
            restore(out, base=mine.base, out=model)
        restore(out, base=mine.base, out=model, force=True)
        assert files_of(model) == whole
    (model / "mine.d").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        restore(out, base=mine.base, out=model, force=True)


def test_an_analysis_is_used_again_for_the_same_pair(
    mine: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "analysis"
    first = analyze_into(place, mine.base, mine.finetuned, force=False, reporter=Recorder())
    assert (place / "analysis.json").is_file()
    with monkeypatch.context() as patch:
        patch.setattr("deltacompress.analysis.output.analyze", None)
        again = analyze_into(place, mine.base, mine.finetuned, force=False, reporter=Recorder())
    assert (again.data, again.files) == (json.loads(json.dumps(first.data)), ())
    assert again.rows() == first.rows()
    with pytest.raises(OutputError, match="of other input \\(another fine-tuned model\\)"):
        analyze_into(place, mine.base, mine.base, force=False, reporter=Recorder())
    replaced = analyze_into(place, mine.base, mine.base, force=True, reporter=Recorder())
    assert json.loads((place / "analysis.json").read_text()) == json.loads(json.dumps(replaced.data)) != first.data


def test_an_analysis_without_a_picture_is_used_again(
    mine: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise BackendError("no matplotlib here")

    monkeypatch.setattr("deltacompress.analysis.output.plot_histograms", missing)
    first = analyze_into(tmp_path / "out", mine.base, mine.finetuned, force=False, reporter=Recorder())
    assert first.missing == "no matplotlib here"
    monkeypatch.setattr("deltacompress.analysis.output.analyze", None)
    before = files_of(tmp_path / "out")
    again = analyze_into(tmp_path / "out", mine.base, mine.finetuned, force=False, reporter=Recorder())
    assert files_of(tmp_path / "out") == before
    assert again.data == json.loads(json.dumps(first.data))
    assert again.missing is not None
    assert "has no histograms.png" in again.missing


def test_an_analysis_replaces_no_picture_of_others(mine: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "histograms.png").write_bytes(b"mine")
    monkeypatch.setattr("deltacompress.analysis.output.analyze", None)  # told before the work
    with pytest.raises(OutputError, match=r"histograms\.png: would be replaced, and no earlier run left it there"):
        analyze_into(tmp_path, mine.base, mine.finetuned, force=False, reporter=Recorder())
    assert files_of(tmp_path) == {"histograms.png": b"mine"}


def test_nothing_is_written_where_something_is_read(tmp_path: Path) -> None:
    (tmp_path / "read" / "in").mkdir(parents=True)
    for place, how in (("read", "is"), ("read/in", "lies inside"), (".", "holds")):
        with pytest.raises(OutputError, match=f"{how} .*read, which is read; choose another out"):
            check_outside(tmp_path / place, tmp_path / "read")
    check_outside(tmp_path / "reader", tmp_path / "read")


def test_what_came_to_be_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    for name in ("ready", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OutputError, match="exists already"):
        publish_directory(tmp_path / "ready", tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"):
        publish_directory(tmp_path / "ready", tmp_path / "out", replaces=lambda path: False)
    assert (tmp_path / "out" / "file").read_text() == "out"
    publish_directory(tmp_path / "ready", tmp_path / "out", replaces=lambda path: True)
    assert files_of(tmp_path) == {"out/file": b"ready"}
