"""Weights are hashed and checked beside the work: what is found late is told as if it had been found at once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pairs import Pair, Recorder, Weights, changed, edit, files_of

from deltacompress import plan
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.before import scan as scan_module
from deltacompress.compression.before.scan import Scan
from deltacompress.errors import CheckpointError, DeltaCompressError, InputError, Interrupted

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def spoiled(pair: Pair, root: Path, name: str, which: str = "finetuned", value: float = float("nan")) -> Pair:
    def spoil(weights: Weights) -> Weights:
        weights[name].view(-1)[3] = value
        return weights

    shutil.copytree(pair.base, root / "base")
    shutil.copytree(pair.finetuned, root / "finetuned")
    edit(root / which, spoil)
    return Pair(root / "base", root / "finetuned", pair.data)


class Slow:
    """No tensor is looked at before the work has come to a step, or somebody waits for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: str | None = None) -> None:
        self.go = go = Event()
        self.reporter = _Until(until, go)
        look = scan_module._look
        monkeypatch.setattr(scan_module, "_look", lambda *one: go.wait(60) and look(*one))
        for name in ("wait", "close"):
            monkeypatch.setattr(Scan, name, _after(go, getattr(Scan, name)))


def _after(go: Event, method: Any) -> Any:
    def act(scan: Scan) -> None:
        go.set()
        method(scan)

    return act


class _Until(Recorder):
    def __init__(self, until: str | None, go: Event) -> None:
        super().__init__()
        self._until, self._go = until, go

    def step(self, label: str, **more: Any) -> None:
        if label == self._until:
            self._go.set()
        super().step(label, **more)


def planned(pair: Pair, out: Path, **options: Any) -> None:
    small: dict[str, Any] = {"calibration": pair.data, "samples": 8, "seq_len": 16, "device": "cpu"}
    plan(pair.base, pair.finetuned, recipe="int4-24", out=out, **small, **options)


def told(pair: Pair, out: Path, reporter: Recorder) -> tuple[type[DeltaCompressError], str]:
    with pytest.raises(DeltaCompressError) as caught:
        pair.compress(out, reporter=reporter)
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("which", ["base", "finetuned"])
@pytest.mark.parametrize("name", [UP, EMBEDDING, "model.norm.weight"])
def test_what_is_found_late_is_told_as_what_is_found_at_once(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, name: str
) -> None:
    bad = spoiled(pair, tmp_path, name, which)
    with monkeypatch.context() as patch:
        patch.setattr(Scan, "check", Scan.wait)  # before anything is made
        at_once = told(bad, tmp_path / "out", Recorder())
    assert at_once[0] is CheckpointError
    assert f"tensor {name} of {tmp_path / which}: 1 NaN and 0 Inf among" in at_once[1]
    for until in (None, "layer 0"):
        with monkeypatch.context() as patch:
            slow = Slow(patch, until)
            assert told(bad, tmp_path / "out", slow.reporter) == at_once
        if name == UP and until:
            assert slow.reporter.steps[:2] == ["embeddings and norms", "layer 0"]


def test_a_file_that_ends_early_is_told_late_too(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only the scan reads to its end: the base's of a tensor that is found to differ at its beginning."""
    mine = changed(pair, tmp_path, lambda weights: weights)
    real = Checkpoint._check_length

    def check(self: Checkpoint, name: str, got: int, wanted: int) -> None:
        real(self, name, got - (self.path == mine.base and name == UP), wanted)

    monkeypatch.setattr(Checkpoint, "_check_length", check)
    kind, message = told(mine, tmp_path / "out", Recorder())
    assert kind is CheckpointError
    assert f"truncated while tensor {UP} was read" in message


def test_the_first_of_several_is_told(pair: Pair, tmp_path: Path) -> None:
    """The base's, though in walking order the fine-tuned embedding comes first."""
    bad = spoiled(spoiled(pair, tmp_path / "1", UP, "base"), tmp_path / "2", EMBEDDING)
    assert f"tensor {UP} of {bad.base}" in told(bad, tmp_path / "out", Recorder())[1]


def test_nothing_is_published_before_all_is_known(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = spoiled(pair, tmp_path, "model.layers.1.input_layernorm.weight", "base")  # which nobody computes with
    monkeypatch.setattr(Scan, "check", lambda _: None)
    slow = Slow(monkeypatch)
    assert "1 NaN" in told(bad, tmp_path / "out", slow.reporter)[1]


def test_steps_of_an_earlier_run_outlive_a_run_of_bad_input(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, out = spoiled(pair, tmp_path, UP), tmp_path / "out"
    with pytest.raises(Interrupted):
        pair.compress(out, reporter=Recorder(2))
    kept = files_of(tmp_path / "out.partial")
    Slow(monkeypatch)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="1 NaN"):
            bad.compress(out, resume=resume)
    assert files_of(tmp_path / "out.partial") == kept


def test_a_dry_run_waits_for_all(pair: Pair, tmp_path: Path) -> None:
    bad = spoiled(pair, tmp_path, UP)
    with pytest.raises(CheckpointError, match="1 NaN"):
        planned(bad, tmp_path / "out")


@pytest.fixture
def mine(pair: Pair, tmp_path: Path) -> Pair:
    return Pair(
        shutil.copytree(pair.base, tmp_path / "base"),
        shutil.copytree(pair.finetuned, tmp_path / "finetuned"),
        pair.data,
    )


def stopped(mine: Pair, out: Path, *, known: bool) -> dict[str, Any]:
    """The identity that a run leaves which was interrupted after layer 0, hashes known by then or not."""
    with pytest.MonkeyPatch.context() as patch:
        slow = Slow(patch, "embeddings and norms" if known else None)
        patch.setattr(Scan, "check", lambda scan: scan.wait() if slow.go.is_set() else None)
        slow.reporter.stop_at = 1
        with pytest.raises(Interrupted):
            mine.compress(out, reporter=slow.reporter)
    identity: dict[str, Any] = json.loads((out.with_name("out.partial") / "identity.json").read_text())
    return identity


def touch(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        os.utime(file, (1, 1))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("which", ["base", "finetuned"])
def test_a_run_resumes_what_was_stopped_before_hashes_were_known(
    mine: Pair, tmp_path: Path, artifact: Path, known: bool, which: str
) -> None:
    out = tmp_path / "out"
    identity = stopped(mine, out, known=known)
    hashes = [Checkpoint.open(path).fingerprint() for path in (mine.base, mine.finetuned)]
    assert [identity["base"], identity["fine-tuned"]] == (hashes if known else [None, None])
    touch(getattr(mine, which))
    if not known:  # files that changed may hold anything
        name = {"base": "base", "finetuned": "fine-tuned"}[which]
        kept = files_of(tmp_path / "out.partial")
        with pytest.raises(InputError, match=rf"started with other input \({name}\)"):
            mine.compress(out, resume=True)
        with pytest.raises(InputError, match=rf"started with other input \({name}\)"):
            planned(mine, out, resume=True)
        assert files_of(tmp_path / "out.partial") == kept
        shutil.rmtree(tmp_path / "out.partial")
        stopped(mine, out, known=False)
    steps = Recorder()
    mine.compress(out, resume=True, reporter=steps)
    assert any("2 finished steps of an earlier run used again" in note for note in steps.notes)
    assert files_of(out) == files_of(artifact)
