"""`compress_to` from end to end, on tiny pairs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, Recorder, changed, files_of, remove
from safetensors.torch import load_file

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.outputs import publish_directory
from deltacompress.artifact.restoration import restore
from deltacompress.budget import survey, target
from deltacompress.budget.measuring import ladder as rows
from deltacompress.budget.measuring import pair as measuring
from deltacompress.budget.measuring.judge import Judge, Judged
from deltacompress.budget.prediction.frontier import predict
from deltacompress.budget.result import BudgetResult, Prediction
from deltacompress.budget.run import compress_to
from deltacompress.budget.rungs import template
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression import driver
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.job import CompressionJob, CompressResult
from deltacompress.errors import CalibrationError, InputError, Interrupted, OutputError
from deltacompress.reporter import SILENT

TRIED = 0.67
GENEROUS = 46_000
"""More bytes than any choice takes, and fewer than all bits do."""


def budget(pair: Pair, out: Path, **options: Any) -> BudgetResult:
    settings = {"calibration": pair.data, "samples": 8, "seq_len": 16, "device": "cpu"} | options
    return compress_to(pair.base, pair.finetuned, out=out, **settings)


def total(folder: Path) -> int:
    return sum(len(raw) for raw in files_of(folder).values())


def told(pair: Pair, out: Path, size: int, before: str) -> int:
    """The bytes that the refusal of a size tells after these words."""
    with pytest.raises(InputError) as error:
        budget(pair, out, max_size=size)
    return int(str(error.value).split(before)[1].split(" bytes")[0].replace(",", ""))


@pytest.fixture(scope="module")
def ladder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """Bytes of the smallest and of the largest artifact that a budget makes of the pair."""
    fixed = told(pair, tmp_path_factory.mktemp("fixed") / "out", 1000, "too small: ")
    least = told(pair, tmp_path_factory.mktemp("least") / "out", fixed, "makes it ")
    most = budget(pair, tmp_path_factory.mktemp("most") / "out", max_size=GENEROUS)
    return least, most.bytes


@dataclass(frozen=True)
class Whole:
    """A budget that nothing interrupted, for all that is held against one: look, and change nothing."""

    asked: int
    out: Path
    result: BudgetResult
    reporter: Recorder

    @classmethod
    def of(cls, pair: Pair, out: Path, asked: int) -> Whole:
        reporter = Recorder()
        return cls(asked, out, budget(pair, out, max_size=asked, reporter=reporter), reporter)


@pytest.fixture(scope="module")
def middle(pair: Pair, tmp_path_factory: pytest.TempPathFactory, ladder: tuple[int, int]) -> Whole:
    """Halfway between the smallest and the largest."""
    return Whole.of(pair, tmp_path_factory.mktemp("middle") / "out", sum(ladder) // 2)


@pytest.fixture(scope="module")
def _thrice(pair: Pair, tmp_path_factory: pytest.TempPathFactory, ladder: tuple[int, int]) -> Whole:
    with pytest.MonkeyPatch.context() as patch:
        _miss(patch)
        return Whole.of(pair, tmp_path_factory.mktemp("thrice") / "out", sum(ladder) // 2)


@pytest.fixture
def thrice(_thrice: Whole, monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Three attempts, and the first one's recipe again: so does every budget of the test."""
    _miss(monkeypatch)
    return _thrice


def _miss(patch: pytest.MonkeyPatch) -> None:
    """The first attempt wastes more than it may, the others are above."""
    patch.setattr(target, "_NEAR", {"size": 1.0, "kl": 1.0})
    patch.setattr(target, "_AIM_AGAIN", 1.3)
    patch.setattr(rows, "LEAST_ROWS", 256)  # all of them, so that the first attempt is no larger than asked


def test_a_size_is_kept_and_nearly_used(pair: Pair, middle: Whole) -> None:
    result = middle.result
    assert total(middle.out) == result.bytes
    assert 0.98 * middle.asked <= result.bytes <= middle.asked
    assert result.judged.kl > 0
    verify(middle.out, base=pair.base)
    assert sorted(path.name for path in middle.out.parent.iterdir()) == ["out", "out.recipe.yaml"]


def test_the_recipe_alone_gives_the_same_bytes(pair: Pair, tmp_path: Path, middle: Whole) -> None:
    recipe = Recipe.load(middle.out.with_name("out.recipe.yaml"))
    assert recipe == middle.result.recipe
    assert load_delta(middle.out).manifest.recipe == recipe.model_dump(mode="json")
    pair.compress(tmp_path / "again", recipe=recipe, samples=None, seq_len=None)
    assert files_of(tmp_path / "again") == files_of(middle.out)


def test_a_quality_is_kept(pair: Pair, tmp_path: Path, ladder: tuple[int, int], middle: Whole) -> None:
    kl = middle.result.judged.kl
    result = budget(pair, tmp_path / "out", max_kl=kl)
    assert result.judged.kl <= kl
    assert result.bytes < ladder[1]
    looser = budget(pair, tmp_path / "looser", max_kl=4 * kl)
    assert looser.bytes < result.bytes


def test_where_all_bits_fit_none_is_lost(pair: Pair, tmp_path: Path) -> None:
    """Nothing is measured; the recipe is a recipe as any other. Where they do not fit after all, they are left out."""
    recorder = Recorder()
    result = budget(pair, tmp_path / "out", max_size="1GB", reporter=recorder)
    assert (result.attempts, result.first.kl, result.judged.kl) == (1, 0, 0)
    told = f"{result.bytes:,} bytes without any loss: as small as was asked, so that nothing is measured or judged"
    assert recorder.notes == [told]
    assert "head" not in recorder.steps
    restore(tmp_path / "out", base=pair.base, out=tmp_path / "restored")
    assert files_of(tmp_path / "restored") == files_of(pair.finetuned)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml", "restored"]
    recipe = Recipe.load(tmp_path / "out.recipe.yaml")
    assert recipe.lossless
    pair.compress(tmp_path / "again", recipe=recipe, calibration=None, samples=None, seq_len=None)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    assert budget(pair, tmp_path / "just", max_size=result.bytes).judged.kl == 0
    less = budget(pair, tmp_path / "less", max_size=result.bytes - 100, reporter=recorder)
    assert less.judged.kl > 0
    assert any("bytes without any loss: more than was asked" in note for note in recorder.notes)


@pytest.mark.parametrize("fits", [True, False])
def test_interrupted_without_loss_or_after_it_goes_on(pair: Pair, tmp_path: Path, fits: bool) -> None:
    """What was measured for another size is in nobody's way, and is removed with the rest."""
    whole = budget(pair, tmp_path / "whole", max_size="1GB")
    asked: int | str = "1GB" if fits else whole.bytes - 100
    uninterrupted = Recorder()
    budget(pair, tmp_path / "uninterrupted", max_size=asked, reporter=uninterrupted)
    stop_at = 5 if fits else len(uninterrupted.steps) - 2
    waits = r"out\.attempt\.partial: run again with" if fits else r"waits in .*out\.budget\.json"
    with pytest.raises(Interrupted, match=waits):
        budget(pair, tmp_path / "out", max_size=asked, reporter=Recorder(stop_at))
    recorder = Recorder()
    budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "uninterrupted")
    assert any("of an earlier run used again" in note for note in recorder.notes)
    assert not any("more than was asked" in note for note in recorder.notes)
    assert not list(tmp_path.glob("out.[abp]*"))


def test_interrupted_without_loss_another_size_goes_on(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size="1GB", reporter=Recorder(5))
    recorder = Recorder()
    budget(pair, tmp_path / "out", max_size="900MB", seed=3, resume=True, reporter=recorder)
    assert any("of an earlier run used again" in note for note in recorder.notes)


def test_interrupted_before_the_judge_bits_that_did_not_fit_are_not_tried_again(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they lie about meanwhile."""
    asked = budget(pair, tmp_path / "whole", max_size="1GB").bytes - 100

    def stopped(*_: Any) -> None:
        assert not (tmp_path / "out.attempt").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("deltacompress.budget.measuring.pair.Judge", stopped)
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size=asked)
    monkeypatch.undo()
    recorder = Recorder()
    budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert not any("without any loss" in note for note in recorder.notes)


def test_a_generous_size_after_another_that_was_asked(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        budget(pair, tmp_path / "out", max_kl=1e-12)
    assert (tmp_path / "out.budget.json").exists()
    assert budget(pair, tmp_path / "out", max_size="1GB", resume=True).judged.kl == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]
    (tmp_path / "other.budget.json").write_text("precious")
    with pytest.raises(OutputError, match="is in the place of what a budget measures"):
        budget(pair, tmp_path / "other", max_size="1GB", resume=True)
    assert (tmp_path / "other.budget.json").read_text() == "precious"


def test_a_poor_candidate_is_told_as_by_a_prediction(pair: Pair, middle: Whole) -> None:
    predicted = predict(pair.base, pair.finetuned, calibration=pair.data, samples=8, seq_len=16, device="cpu")
    assert [note for note in middle.reporter.notes if note in predicted.notes] == list(predicted.notes)
    assert any("a poor candidate" in note for note in predicted.notes)


WAITS = r"; what was measured waits in .*/out\.budget\.json, and is used again with resume=True$"


def test_what_cannot_be_reached_says_what_can(pair: Pair, tmp_path: Path, ladder: tuple[int, int]) -> None:
    """And that the measuring need not be done again."""
    with pytest.raises(
        InputError, match=r"max_kl 1e-12: no choice .* the least upper bound is .*, at [\d,]+ bytes.*" + WAITS
    ):
        budget(pair, tmp_path / "out", max_kl=1e-12)
    recorder = Recorder()
    with pytest.raises(
        InputError, match=r"target_ratio 10000: too large: [\d,]+ bytes are exact tensors.* predicted KL of.*" + WAITS
    ):
        budget(pair, tmp_path / "out", target_ratio=10000, resume=True, reporter=recorder)
    assert recorder.steps == []
    assert budget(pair, tmp_path / "out", max_size=ladder[0], resume=True).bytes <= ladder[0]


def test_a_size_below_what_is_exact_is_told_before_anything_is_measured(pair: Pair, tmp_path: Path) -> None:
    recorder = Recorder()
    alone = r"bytes are exact tensors, side files and manifest alone \([\d,]+x\); nothing was measured; ask for"
    for asked, told, way_out in (
        ({"max_size": 5}, "too small", "more"),
        ({"target_ratio": 10000}, "too large", "less"),
    ):
        with pytest.raises(InputError, match=rf"{told}: [\d,]+ {alone} {way_out} than that: all else comes on top$"):
            budget(pair, tmp_path / "new" / "out", reporter=recorder, **asked)
    assert recorder.steps == []
    assert list(tmp_path.iterdir()) == []


def test_too_little_data_to_hold_any_back(pair: Pair, tmp_path: Path) -> None:
    """The samples that are told can be had."""
    told = r"\d+ tokens, samples 34 x seq_len 16 needs 544, and 8 records more to judge by; there are 4; use samples "
    with pytest.raises(CalibrationError, match=told) as error:
        budget(pair, tmp_path / "out", target_ratio=2, samples=34)
    assert list(tmp_path.iterdir()) == []
    rows = int(str(error.value).split("use samples ")[1].split()[0])
    assert rows >= 30
    with pytest.raises(InputError, match="nothing was measured"):
        budget(pair, tmp_path / "out", max_size=5, samples=rows)


def test_no_data(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="give calibration FILE"):
        budget(pair, tmp_path / "out", target_ratio=2, calibration=None)


def test_an_artifact_that_is_there_is_not_replaced(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "out")
    before = files_of(tmp_path)
    with pytest.raises(OutputError, match=r"out: holds a finished artifact, .* or make it anew with force=True"):
        budget(pair, tmp_path / "out", max_size=GENEROUS)
    assert files_of(tmp_path) == before


def test_a_recipe_that_is_there_is_not_replaced_unasked(pair: Pair, tmp_path: Path) -> None:
    """It may have been edited. What a gate has kept is left alone, too."""
    edited = tmp_path / "out.recipe.yaml"
    edited.write_text("edited")
    (tmp_path / "out.candidate").mkdir()
    (tmp_path / "out.candidate" / "mine").touch()
    recorder = Recorder()
    with pytest.raises(OutputError, match=r"recipe\.yaml: exists already; force=True replaces it"):
        budget(pair, tmp_path / "out", max_size=GENEROUS, reporter=recorder)
    assert recorder.steps == []
    assert edited.read_text() == "edited"
    result = budget(pair, tmp_path / "out", max_size=GENEROUS, force=True)
    assert Recipe.load(edited) == result.recipe
    assert files_of(tmp_path / "out.candidate") == {"mine": b""}


def test_what_no_budget_made_is_told_before_any_work(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "out.attempt").mkdir()
    (tmp_path / "out.attempt" / "mine").touch()
    recorder = Recorder()
    with pytest.raises(OutputError, match=r"out\.attempt: exists already, and holds mine"):
        budget(pair, tmp_path / "out", max_size=GENEROUS, force=True, reporter=recorder)
    assert recorder.steps == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EAGAIN])
def test_without_a_lock_nothing_begins(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Of another run's directory nothing is removed, whoever made it."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, "no")

    recorder = Recorder()
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError):
        budget(pair, tmp_path / "new" / "out", max_size=GENEROUS, reporter=recorder)
    assert (recorder.steps, recorder.notes) == ([], [])
    assert (tmp_path / "new" / "out.partial").exists() == (code == errno.EAGAIN)
    assert (tmp_path / "new").exists() == (code == errno.EAGAIN)


def test_what_is_in_the_place_of_unfinished_work_is_told_before_any(pair: Pair, tmp_path: Path) -> None:
    """Of an attempt, too; and what is read to resume must be a file."""
    place, recorder = tmp_path / "out.attempt.partial", Recorder()

    def refused(told: str, *, resume: bool = False) -> None:
        with pytest.raises(OutputError, match=told):
            budget(pair, tmp_path / "out", max_size=GENEROUS, resume=resume, reporter=recorder)
        assert (recorder.steps, recorder.notes) == ([], [])

    place.symlink_to(tmp_path)
    refused(r"out\.attempt\.partial: is a symbolic link")
    place.unlink()
    os.mkfifo(place)
    refused(r"out\.attempt\.partial: ")
    place.unlink()
    place.mkdir()
    (place / "thesis.txt").touch()
    refused(r"out\.attempt\.partial: holds thesis\.txt, no work of a run")
    remove(place)
    (tmp_path / "out.budget.json").mkdir()
    refused(r"out\.budget\.json: .*\(a directory, not a file\)", resume=True)


def test_what_is_in_the_place_of_measurements_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "out.budget.json"
    other.write_text("precious")
    recorder = Recorder()
    with pytest.raises(OutputError, match=r"budget\.json: is in the place of what a budget measures, .* move it away"):
        budget(pair, tmp_path / "out", max_size=GENEROUS, force=True, reporter=recorder)
    assert recorder.steps == []
    assert other.read_text() == "precious"


def test_all_attempts_miss(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is left; there is nothing else."""
    monkeypatch.setattr(target.Target, "above", lambda *_: True)
    with pytest.raises(InputError, match=r"3 attempts; ask .* last attempt lies in .*attempt, and .*out\.budget\.json"):
        budget(pair, tmp_path / "out", max_size=sum(ladder) // 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.attempt", "out.budget.json"]
    monkeypatch.undo()
    recorder, more = Recorder(), sum(ladder) // 2 + 1000
    assert budget(pair, tmp_path / "out", max_size=more, resume=True, reporter=recorder).bytes <= more
    assert "embedding" not in recorder.steps  # not measured again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


def test_folders_that_are_missing_are_made_and_taken_back(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="before all was measured"):
        budget(pair, tmp_path / "new" / "dir" / "out", max_size=GENEROUS, reporter=Recorder(0))
    assert list(tmp_path.iterdir()) == []
    budget(pair, tmp_path / "new" / "dir" / "out", max_size=GENEROUS)
    assert sorted(path.name for path in (tmp_path / "new" / "dir").iterdir()) == ["out", "out.recipe.yaml"]


@dataclass
class _Reaching:
    """A reporter that calls `then` at its first step."""

    then: Callable[[], object]
    notes: list[str] = field(default_factory=list)
    reached: bool = False

    def phase(self, name: str, total: int | None = None) -> None: ...

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        if not self.reached:
            self.reached = True
            self.then()

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_a_second_run_is_refused_before_it_measures(pair: Pair, tmp_path: Path) -> None:
    """Also one of `compress`; the first is not disturbed, and the lock goes with it, however it ends."""
    refused = Recorder()

    def another() -> None:
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
        for begin in (
            lambda: budget(pair, tmp_path / "out", max_size="2GB", reporter=refused),
            lambda: pair.compress(tmp_path / "out", reporter=refused),
        ):
            with pytest.raises(OutputError, match=r"out\.partial: another run is writing there; wait for it or choose"):
                begin()
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="before all was measured"):
        budget(pair, tmp_path / "out", max_size=GENEROUS, reporter=_Reaching(another))
    assert refused.steps == []
    assert list(tmp_path.iterdir()) == []
    budget(pair, tmp_path / "out", max_size=GENEROUS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


def test_what_a_compression_has_left_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    """Of the same OUT, interrupted: a budget only locks its place."""
    with pytest.raises(Interrupted):
        pair.compress(tmp_path / "out", reporter=Recorder(2))
    left = files_of(tmp_path / "out.partial")
    assert left
    budget(pair, tmp_path / "out", max_size=GENEROUS)
    assert files_of(tmp_path / "out.partial") == left


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that nobody may write to")
def test_where_nothing_can_be_made_is_told_before_anything_is_measured(pair: Pair, tmp_path: Path) -> None:
    """Though access rights promise it."""
    recorder = Recorder()
    with pytest.raises(OutputError, match=r"^/proc/out\.partial: cannot be written .*; choose another output dir"):
        budget(pair, Path("/proc/out"), max_size=GENEROUS, reporter=recorder)
    assert recorder.steps == []


def test_interrupted_before_a_layer_was_measured_nothing_is_left(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="before all was measured, nothing is kept: run it again"):
        budget(pair, tmp_path / "out", max_size=GENEROUS, reporter=Recorder(0))
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_of_no_use_for_other_data(pair: Pair, tmp_path: Path, ladder: tuple[int, int]) -> None:
    asked = sum(ladder) // 2
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size=asked, reporter=Recorder(5))
    with pytest.raises(
        InputError, match=r"budget\.json: the unfinished run was started with other input, or by an.*; give"
    ):
        budget(pair, tmp_path / "out", max_size=asked, seed=1, resume=True)
    kept = tmp_path / "out.budget.json"
    written = json.loads(kept.read_text())
    old = {name: value for name, value in written.items() if name != "sha256"}
    old["tried"] = [{"bytes": 1, "judged": {"kl": 0.1, "error": 0.1, "tokens": 1}}]  # as once, without groups
    changed = written | {"survey": written["survey"] | {"fixed_bytes": -1}}
    for data, wrong in (
        ([], "damaged .*;"),
        ({}, "damaged .*;"),
        (changed, r"damaged \(its checksum is another\);"),
        (old, "written by another version of deltacompress, with other fields;"),
        (written | {"of": "{}"}, ".* other input, or by another version of deltacompress; give the same again,"),
    ):
        kept.write_text(json.dumps(data))
        with pytest.raises(
            InputError, match=rf"budget\.json: {wrong} remove it, or leave out resume=True to start over$"
        ):
            budget(pair, tmp_path / "out", max_size=asked, resume=True)
    recorder = Recorder(2)
    with pytest.raises(Interrupted, match="before all was measured"):
        budget(pair, tmp_path / "out", max_size=asked, seed=1, reporter=recorder)
    again = budget(pair, tmp_path / "out", max_size=asked, seed=1)
    [note] = [one for one in recorder.notes if "earlier run measured" in one]
    assert note.endswith("out.budget.json: what an earlier run measured is of no use to this one, and is removed")
    whole = budget(pair, tmp_path / "whole", max_size=asked, seed=1)
    assert files_of(again.compressed.out) == files_of(whole.compressed.out)


def test_what_was_measured_is_measured_anew_without_resume_and_that_is_told(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int]
) -> None:
    """Also for another size: it is of the pair."""
    recorder = Recorder(5)
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size=ladder[0], reporter=Recorder(5))
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size=ladder[1], reporter=recorder)
    told = "out.budget.json: what an earlier run measured is measured anew; resume=True would have used it"
    assert any(note.endswith(told) for note in recorder.notes)


@pytest.mark.parametrize("stop_at", [5, 7])
def test_interrupted_while_compressing_it_goes_on(pair: Pair, tmp_path: Path, middle: Whole, stop_at: int) -> None:
    asked = middle.asked
    with pytest.raises(Interrupted, match=r"waits in .*out\.budget\.json: run again with resume=True"):
        budget(pair, tmp_path / "out", max_size=asked, reporter=Recorder(stop_at))
    assert not (tmp_path / "out").exists()
    recorder = Recorder()
    budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert any("measured by an earlier run, used again" in note for note in recorder.notes)
    assert files_of(tmp_path / "out") == files_of(middle.out)


@pytest.mark.parametrize("stop_at", [19, 20, 29])
def test_interrupted_in_any_attempt_it_goes_on(pair: Pair, tmp_path: Path, thrice: Whole, stop_at: int) -> None:
    asked, whole, recorder = thrice.asked, thrice.result, Recorder()
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size=asked, reporter=Recorder(stop_at))
    result = budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert files_of(tmp_path / "out") == files_of(thrice.out)
    assert (tmp_path / "out.recipe.yaml").read_bytes() == thrice.out.with_name("out.recipe.yaml").read_bytes()
    assert (result.judged, result.first, result.predicted) == (whole.judged, whole.first, whole.predicted)
    assert result.attempts == whole.attempts == 3
    assert [row["budget"] for row in result.rows()] == ["asked", "predicted", "reached"]
    again = replace(result, predicted=Prediction(5, 0.25)).rows()
    assert [row["budget"] for row in again] == ["asked", "predicted", "predicted again", "reached"]
    assert (again[2]["bytes"], again[2]["kl"]) == (5, 0.25)
    begun = (stop_at - 4) // 8 * 8 + 4  # the first step of that attempt: eight each, after measuring's four
    assert recorder.steps == thrice.reporter.steps[begun:]
    assert not list(tmp_path.glob("out.[abp]*"))


def interrupted_at_the_second_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, calls = Judge.judge, list[str]()

    def interrupted(self: Judge, artifact: str, base: Checkpoint) -> Judged:
        calls.append(artifact)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return judge(self, artifact, base)

    monkeypatch.setattr(Judge, "judge", interrupted)


def test_interrupted_while_an_attempt_is_measured_it_goes_on(
    pair: Pair, tmp_path: Path, thrice: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = thrice.asked
    interrupted_at_the_second_judging(monkeypatch)
    with pytest.raises(Interrupted, match="what was measured waits in"):
        budget(pair, tmp_path / "out", max_size=asked)
    recorder = Recorder()
    result = budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert files_of(tmp_path / "out") == files_of(thrice.out)
    assert result.judged == thrice.result.judged
    assert recorder.steps.count("head") == 2  # the second is whole: the third, and the first one's recipe again


@pytest.fixture
def tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth of the 8 sequences is enough to predict by; all that is tried loses TRIED of it in the end."""
    monkeypatch.setattr(measuring, "_LEAST_TOKENS", 32)
    monkeypatch.setattr(measuring, "_MORE_TOKENS", 0)
    for name in ("_AFTER_TRIAL", "_AFTER_TRIAL_WITH_FISHER"):
        monkeypatch.setattr(survey, name, TRIED)


@pytest.mark.usefixtures("tried_first")
def test_a_choice_is_tried_on_few_sequences_and_corrected(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `fisher`; the prediction is made of what the trial took and lost, and no trace of it is left.

    Nobody reads the KL of a trial on its calibration tokens.
    """
    looked: list[int] = []
    look = driver.calibration_kl
    monkeypatch.setattr(driver, "calibration_kl", lambda *given: (looked.append(1), look(*given))[1])
    found: list[tuple[Recipe, int, float]] = []
    judge = Judge.judge

    def judged(self: Judge, artifact: str, base: Checkpoint) -> Judged:
        one, delta = judge(self, artifact, base), load_delta(artifact)
        found.append((Recipe.model_validate(delta.manifest.recipe), delta.summary()["artifact_bytes"], one.kl))
        return one

    monkeypatch.setattr(Judge, "judge", judged)
    asked, phases = sum(ladder) // 2, list[str]()
    recorder = Recorder()
    monkeypatch.setattr(recorder, "phase", lambda name, total=None: phases.append(name))
    result = budget(pair, tmp_path / "out", max_size=asked, reporter=recorder)
    assert phases[:4] == ["measuring", "trial: compressing", "gradients", "compressing"]
    trial, *attempts = found
    assert (trial[0].calibration.samples, attempts[0][0].calibration.samples) == (2, 8)
    assert [{getattr(rule, "fisher", False) for rule in one[0].rules} for one in (trial, attempts[0])] == [
        {False},
        {False, True},
    ]
    assert len(attempts) == result.attempts == len(looked)
    assert result.compressed.kl_on_calibration is not None
    seconds = result.to_json()
    assert 0 < seconds["trial_seconds"] < seconds["total_seconds"] - seconds["survey_seconds"] - seconds["seconds"]
    assert result.bytes <= asked
    assert result.first.kl == pytest.approx(TRIED * trial[2], rel=0.3)  # another choice than that tried
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


@pytest.mark.usefixtures("tried_first")
@pytest.mark.parametrize("stop_at", [7, 14])
def test_interrupted_in_or_after_a_trial_it_goes_on(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int], stop_at: int
) -> None:
    """Measuring has four steps, the trial four (it has no gradients), an attempt eight."""
    asked, uninterrupted, recorder = sum(ladder) // 2, Recorder(), Recorder()
    whole = budget(pair, tmp_path / "whole", max_size=asked, reporter=uninterrupted)
    with pytest.raises(Interrupted, match=r"waits in .*out\.budget\.json"):
        budget(pair, tmp_path / "out", max_size=asked, reporter=Recorder(stop_at))
    assert len(json.loads((tmp_path / "out.budget.json").read_text())["tried"]) == (stop_at > 8)
    result = budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert (result.first, result.judged) == (whole.first, whole.judged)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert len(recorder.steps) <= len(uninterrupted.steps) - (8 if stop_at > 8 else 4)
    assert not list(tmp_path.glob("out.[abp]*"))


@pytest.mark.usefixtures("tried_first")
def test_a_prediction_is_scaled_by_a_trial(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a choice halfway: ten times its KL, of which half as much is left, is five times each; where all sequences are
    few, nothing is tried.
    """
    judge, tried = Judge.judge, list[Any]()

    def louder(self: Judge, artifact: str, base: Checkpoint) -> Judged:
        one = judge(self, artifact, base)
        tried.append((load_delta(artifact).summary()["artifact_bytes"], one.kl))
        return Judged(10 * one.kl, one.error, one.tokens)

    given: dict[str, Any] = {"calibration": pair.data, "samples": 8, "seq_len": 16, "device": "cpu"}
    plain = predict(pair.base, pair.finetuned, **given)
    monkeypatch.setattr(Judge, "judge", louder)
    for name in ("_AFTER_TRIAL", "_AFTER_TRIAL_WITH_FISHER"):
        monkeypatch.setattr(survey, name, TRIED / 2)
    loud = predict(pair.base, pair.finetuned, **given)
    ((nbytes, kl),) = tried
    assert [one.bytes for one in loud.points] == [one.bytes for one in plain.points]
    assert [one.kl for one in loud.points] == pytest.approx([5 * one.kl for one in plain.points])
    assert plain.points[0].bytes < nbytes < plain.points[-1].bytes
    near = min(plain.points, key=lambda one: abs(one.bytes - nbytes))
    assert near.kl == pytest.approx(TRIED * kl, rel=0.5)
    monkeypatch.undo()
    monkeypatch.setattr(Judge, "judge", louder)
    predict(pair.base, pair.finetuned, **given)
    assert len(tried) == 1


@pytest.mark.usefixtures("tried_first")
def test_a_trial_is_of_one_device(pair: Pair, tmp_path: Path) -> None:
    made = {"base": pair.base, "finetuned": pair.finetuned, "recipe": template(), "calibration": pair.data}
    job = CompressionJob.of(**made, out=tmp_path / "out", samples=8, seq_len=16, device="cpu")
    surveyed = measuring.survey_pair(job, Inputs(), SILENT)
    trial = surveyed.trial(job.model_copy(update={"devices": (3, 5)}))
    assert trial is not None
    assert (trial.samples, trial.devices) == (2, (3,))
    assert surveyed.trial(job.model_copy(update={"samples": 2})) is None
    assert surveyed.trial(job) == job.model_copy(update={"samples": 2})


def test_a_pair_of_which_only_norms_differ(pair: Pair, tmp_path: Path) -> None:
    """Nothing is to be chosen: there is one size."""
    old = load_file(pair.base / "model.safetensors")
    only = changed(pair, tmp_path, lambda new: {name: (new if "norm" in name else old)[name] for name in new})
    (point,) = predict(only.base, only.finetuned, calibration=only.data, samples=8, seq_len=16, device="cpu").points
    assert point.kl == 0
    result = budget(only, tmp_path / "out", max_size=point.bytes)
    assert (result.attempts, result.judged.kl) == (1, 0)
    assert (result.trial_seconds, result.survey_seconds > 0) == (0, True)
    verify(tmp_path / "out", base=only.base)
    floor = told(only, tmp_path / "least", 1000, "too small: ")
    assert result.bytes - 200 < floor <= result.bytes <= point.bytes
    with pytest.raises(InputError, match=rf"max_size {floor - 1}: too small: .* alone .*; nothing was measured;"):
        budget(only, tmp_path / "least", max_size=floor - 1)
    with pytest.raises(InputError) as error:
        budget(only, tmp_path / "least", max_size=floor)
    assert "nothing was measured" not in str(error.value)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_other_models(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str) -> None:
    """Tied embeddings; linears that lie as [in, out]."""
    result = budget(make_pair(architecture), tmp_path / "out", max_size=GENEROUS)
    assert 0 < result.judged.kl < 1
    verify(tmp_path / "out")


def test_what_an_earlier_attempt_kept_is_not_lost(thrice: Whole) -> None:
    """The first one's recipe is used again."""
    result, notes = thrice.result, thrice.reporter.notes
    assert result.bytes <= thrice.asked
    assert result.attempts == 3
    assert any("attempt 1" in note and "would do" in note for note in notes)
    assert any("attempt 3" in note and "recipe of one that kept it" in note for note in notes)
    assert load_delta(thrice.out).manifest.recipe == result.recipe.model_dump(mode="json")


@pytest.mark.usefixtures("tried_first")
def test_interrupted_while_an_attempt_after_a_trial_is_measured_it_is_not_made_again(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sum(ladder) // 2
    whole = budget(pair, tmp_path / "whole", max_size=asked)
    interrupted_at_the_second_judging(monkeypatch)
    with pytest.raises(Interrupted, match="what was measured waits in"):
        budget(pair, tmp_path / "out", max_size=asked)
    recorder = Recorder()
    result = budget(pair, tmp_path / "out", max_size=asked, resume=True, reporter=recorder)
    assert recorder.steps.count("head") == result.attempts - 1 == whole.attempts - 1
    assert any("out.attempt: " in note and "used again" in note for note in recorder.notes)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.usefixtures("tried_first")
def test_what_an_interrupted_run_left_of_a_trial_is_no_attempt(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sum(ladder) // 2

    remove_all = shutil.rmtree

    def interrupted(path: Path, **options: Any) -> None:
        if Path(path) == tmp_path / "out.attempt":
            raise KeyboardInterrupt
        remove_all(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", max_size=asked)
    monkeypatch.setattr(shutil, "rmtree", remove_all)
    assert len(json.loads((tmp_path / "out.budget.json").read_text())["tried"]) == 1
    assert (tmp_path / "out.attempt").exists()
    seen: list[bool] = []
    compress = driver.run_job

    def looked(*given: Any, **options: Any) -> CompressResult:
        seen.append((tmp_path / "out.attempt").exists())
        return compress(*given, **options)

    monkeypatch.setattr("deltacompress.budget.run.run_job", looked)
    budget(pair, tmp_path / "out", max_size=asked, resume=True)
    assert seen[0] is False


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("force", [True, False])
def test_interrupted_after_it_was_published_it_says_so(
    pair: Pair, tmp_path: Path, ladder: tuple[int, int], monkeypatch: pytest.MonkeyPatch, fits: bool, force: bool
) -> None:
    asked, out = "1GB" if fits else sum(ladder) // 2, tmp_path / "out"
    if force:
        budget(pair, out, max_size=asked, seed=1)

    def interrupted(*given: Any, **options: Any) -> None:
        publish_directory(*given, **options)
        raise KeyboardInterrupt

    if force:
        with pytest.raises(Interrupted, match="before all was measured" if not fits else r"out\.attempt\.partial"):
            budget(pair, out, max_size=asked, force=True, reporter=Recorder(2))
        remove(tmp_path / "out.attempt.partial")
    monkeypatch.setattr("deltacompress.budget.run.publish_directory", interrupted)
    with pytest.raises(Interrupted, match=r"^interrupted, but .*out was published, and is as it was asked$"):
        budget(pair, out, max_size=asked, force=force)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.recipe.yaml"}
    verify(out, base=pair.base)
