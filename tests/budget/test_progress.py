"""A walk that is interrupted goes on where it was, and gives what it gives in one go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, files_of, make_pair

from deltacompress import compress_to
from deltacompress.budget import run as running
from deltacompress.budget.measuring import progress as module
from deltacompress.budget.measuring import walk as walking
from deltacompress.budget.measuring.ladder import Ladder
from deltacompress.budget.measuring.pair import survey_pair
from deltacompress.budget.measuring.progress import Progress, Reached, progress_path
from deltacompress.budget.request import Request
from deltacompress.budget.result import BudgetResult
from deltacompress.budget.rungs import Rung, template
from deltacompress.budget.survey import Survey
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.job import CompressionJob
from deltacompress.errors import InputError, Interrupted, NumericsError, OutputError

STREAMS = {"one": [torch.ones(2, 3, 4), torch.zeros(1, 3, 4)], "other 1": [torch.full((1, 1, 4), 0.5)]}
LAYERS = 3


class Phases(Recorder):
    """A recorder of phases, too, with their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[tuple[str, int | None]] = []

    def phase(self, name: str, total: int | None = None) -> None:
        self.phases.append((name, total))


@pytest.fixture(autouse=True)
def _each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is kept, however long writing takes beside so little."""
    monkeypatch.setattr(module, "_TIMES", 0)


@pytest.fixture(scope="module", params=["llama", "qwen2-tied", "mixtral"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=LAYERS)


def budget(pair: Pair, out: Path, **options: Any) -> BudgetResult:
    given = {"calibration": pair.data, "samples": 8, "seq_len": 16, "device": "cpu", "target_ratio": 1.2} | options
    return compress_to(pair.base, pair.finetuned, out=out, **given)


def interrupted(pair: Pair, out: Path, after: int, **options: Any) -> None:
    """While measuring, after so many layers."""
    told = (
        r"^interrupted before all was measured; what was measured so far waits in .*budget\.safetensors: run again with"
    )
    with pytest.raises(Interrupted, match=told):
        budget(pair, out, reporter=Recorder(after), **options)


@pytest.fixture(scope="module")
def whole(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[BudgetResult, dict[str, bytes]]:
    out = tmp_path_factory.mktemp("whole") / "out"
    return budget(pair, out), files_of(out)


@pytest.mark.parametrize("after", [1, 2])
def test_a_walk_goes_on_where_it_was_interrupted(
    pair: Pair, whole: tuple[BudgetResult, dict[str, bytes]], tmp_path: Path, after: int
) -> None:
    """Also before the head alone; the steps that follow are those that were left, and nothing stays."""
    interrupted(pair, tmp_path / "out", after)
    recorder = Phases()
    result = budget(pair, tmp_path / "out", resume=True, reporter=recorder)
    assert [f"{progress_path(tmp_path / 'out')}: {after} layers were measured by an earlier run, used again"] == [
        note for note in recorder.notes if "used again" in note
    ]
    layers = [f"layer {i}" for i in range(after, 2)]
    assert recorder.steps[: len(layers) + 2] == ["embedding", *layers, "head"]
    assert ("measuring", len(layers) + 2) in recorder.phases
    assert (result.first, result.judged) == (whole[0].first, whole[0].judged)
    assert files_of(tmp_path / "out") == whole[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


def test_what_is_known_of_the_pair_then_is_the_same(deep: Pair, tmp_path: Path) -> None:
    """In every number."""

    def surveyed(recorder: Recorder, *, resume: bool = False, out: str = "out") -> Survey:
        given = {"calibration": deep.data, "samples": 8, "seq_len": 16, "device": "cpu", "resume": resume}
        job = CompressionJob.of(deep.base, deep.finetuned, recipe=template(), out=tmp_path / out, **given)
        return survey_pair(job, Inputs(), recorder, request=Request.of(1.2, None, None)).survey

    with pytest.raises(KeyboardInterrupt):
        surveyed(Recorder(LAYERS - 1))
    assert surveyed(Recorder(), resume=True) == surveyed(Recorder(), out="whole")


def test_interrupted_twice_it_goes_on_from_the_second(pair: Pair, tmp_path: Path) -> None:
    interrupted(pair, tmp_path / "out", 1)
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", resume=True, reporter=Recorder(1))  # the next layer is kept by then
    recorder = Recorder()
    budget(pair, tmp_path / "out", resume=True, reporter=recorder)
    assert recorder.steps[:2] == ["embedding", "head"]


@pytest.mark.parametrize("other", [False, True])
def test_without_resume_all_is_measured_anew_and_that_is_told(pair: Pair, tmp_path: Path, other: bool) -> None:
    """Of other data it would have been of no use."""
    out, recorder = tmp_path / "out", Recorder()
    interrupted(pair, out, 1)
    budget(pair, out, reporter=recorder, **{"seed": 1} if other else {})
    assert recorder.steps[:4] == ["embedding", "layer 0", "layer 1", "head"]
    told = f"{progress_path(out)}: what an earlier run measured so far is removed"
    would = "" if other else "; resume=True would have gone on with it"
    assert [note for note in recorder.notes if "earlier run" in note] == [told + would]
    assert not progress_path(out).exists()


def test_without_resume_it_goes_before_anything_is_measured(pair: Pair, tmp_path: Path) -> None:
    interrupted(pair, tmp_path / "out", 1)
    with pytest.raises(Interrupted, match="nothing is kept"):
        budget(pair, tmp_path / "out", reporter=Recorder(0))
    assert list(tmp_path.iterdir()) == []


def test_it_goes_once_all_is_measured(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"waits in .*out\.budget\.json"):
        budget(pair, tmp_path / "out", reporter=Recorder(5))
    assert not progress_path(tmp_path / "out").exists()


def test_nothing_stays_beside_what_loses_nothing(pair: Pair, tmp_path: Path) -> None:
    interrupted(pair, tmp_path / "out", 1)
    budget(pair, tmp_path / "out", target_ratio=None, max_size="1GB", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


def test_what_all_bits_did_not_fit_is_not_tried_again(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    look = running.lossless_job
    monkeypatch.setattr(running, "lossless_job", lambda *args: looked.append(True) or look(*args))
    interrupted(pair, tmp_path / "out", 1)
    assert looked == [True]
    budget(pair, tmp_path / "out", resume=True)
    assert looked == [True]
    interrupted(pair, tmp_path / "other", 1)
    budget(pair, tmp_path / "other", resume=True, target_ratio=1.21)
    assert looked == [True] * 3  # another size might


def test_what_was_read_is_let_go_layer_by_layer(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(pair, tmp_path / "out", 1)
    alive: list[weakref.ref[torch.Tensor]] = []
    read, head, left = Progress.read, walking._head, list[int]()

    def watched(self: Progress) -> Reached | None:
        reached = read(self)
        if reached is not None:
            alive.extend(weakref.ref(one) for some in reached.streams.values() for one in some)
        return reached

    def before_head(walk: Any) -> None:
        left.append(sum(one() is not None for one in alive))
        head(walk)

    monkeypatch.setattr(Progress, "read", watched)
    monkeypatch.setattr(walking, "_head", before_head)
    budget(pair, tmp_path / "out", resume=True)
    assert alive
    assert left == [0]


def test_a_group_that_is_only_rounded_goes_on_so(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    climb, names = Ladder.climb, list[str]()

    def odd(self: Ladder, rungs: Sequence[Rung]) -> Any:
        names.append(self._tensors[0].name)
        if ".0.mlp.down" in names[-1]:
            raise NumericsError("the Hessian is odd", where=names[-1])
        return climb(self, rungs)

    monkeypatch.setattr(Ladder, "climb", odd)
    budget(pair, tmp_path / "whole")
    interrupted(pair, tmp_path / "out", 1)
    names.clear()
    budget(pair, tmp_path / "out", resume=True)
    assert not any(".0." in name for name in names)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_what_is_damaged_or_of_other_input_is_told(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(pair, out, 1)
    kept = progress_path(out)
    raw = kept.read_bytes()

    def refused(told: str, **options: Any) -> None:
        way_out = "remove it, or leave out resume=True to start over"
        with pytest.raises(InputError, match=rf"budget\.safetensors: {told}.*{way_out}$"):
            budget(pair, out, resume=True, **options)

    refused("the unfinished run was started with other input, or by another version .*; give the same again, ", seed=1)
    kept.write_bytes(raw[:-4])
    refused("damaged ")
    kept.write_bytes(raw[:-4] + bytes(byte ^ 1 for byte in raw[-4:]))
    refused(r"damaged \(its checksum is another\)")
    kept.write_bytes(raw.replace(b'\\"layers\\": 1', b'\\"layers\\": 0'))
    refused(r"damaged \(its checksum is another\)")
    kept.write_bytes(raw.replace(b'"reached"', b'"teached"'))
    refused("damaged ")
    kept.unlink()
    kept.mkdir()
    with pytest.raises(OutputError, match=r"budget\.safetensors: .*\(a directory, not a file\)"):
        budget(pair, out, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_in_its_place_and_none_of_it_is_left_alone(pair: Pair, tmp_path: Path, resume: bool) -> None:
    other, recorder = progress_path(tmp_path / "out"), Recorder()
    other.write_text("precious")
    with pytest.raises(OutputError, match=r"safetensors: is in the place of what a budget measures, .* move it away"):
        budget(pair, tmp_path / "out", reporter=recorder, resume=resume)
    assert other.read_text() == "precious"
    assert recorder.steps == []


def progress_at(path: Path, identity: str = "this", *, resume: bool = True) -> Progress:
    return Progress(path, identity, asked="that", resume=resume)


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    progress_at(path).keep(2, {"a": [1.1, "b"]}, STREAMS)
    reached = progress_at(path).read()
    assert reached is not None
    assert (reached.layers, reached.data) == (2, {"a": [1.1, "b"]})
    assert list(reached.streams) == list(STREAMS)
    for name, some in STREAMS.items():
        assert all(torch.equal(one, other) for one, other in zip(reached.streams[name], some, strict=True))
    assert not progress_at(path, "other").fits()
    assert progress_at(path).fits()
    assert progress_at(path, resume=False).read() is None
    assert progress_at(tmp_path / "none").read() is None
    many = {"many": [torch.full((1, 1, 1), float(k)) for k in range(12)]}
    progress_at(path).keep(1, None, many)
    reached = progress_at(path).read()
    assert reached is not None
    assert [float(one) for one in reached.streams["many"]] == list(range(12))


def test_writing_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what grows."""
    monkeypatch.undo()
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    write: Callable[..., None] = module.write_file
    streams = {"one": [torch.ones(1, 1, 100)]}

    def slow(*args: Any) -> None:
        now[0] += 0.02 * sum(one.numel() for one in streams["one"])
        write(*args)

    monkeypatch.setattr(module, "write_file", slow)
    progress, kept = progress_at(tmp_path / "kept"), list[int]()
    for layers in range(1, 13):
        now[0] += 30.0
        progress.keep(layers, None, streams)
        reached = progress.read()
        assert reached is not None
        kept.append(reached.layers)
        if layers == 5:
            streams["one"].append(torch.ones(1, 1, 100))
    assert kept == [1, 1, 1, 1, 5, 5, 5, 5, 5, 5, 5, 12]  # 2 seconds every 100 at most, and 4 every 200


@pytest.mark.parametrize("earlier", [False, True])
def test_what_cannot_be_written_stops_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """It is told once, and what was kept before stays until all is measured; so does no half of it."""
    out, seen, recorder = tmp_path / "out", list[list[str]](), Recorder()
    (tmp_path / ".out.budget.safetensors.partial").write_text("of a run that was killed")
    if earlier:
        interrupted(pair, out, 1)
    write: Callable[..., None] = module.write_file

    def full(where: Path, chunks: Any) -> None:
        write(where, [b"half"])
        seen.append(sorted(path.name for path in tmp_path.iterdir() if "safetensors" in path.name))
        raise OutputError("cannot be written (No space left on device)", where=where, way_out="free some space")

    monkeypatch.setattr(module, "write_file", full)
    before = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))
    with pytest.raises(Interrupted):
        budget(pair, out, reporter=Recorder(2 - earlier), resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    budget(pair, out, reporter=recorder, resume=True)
    mine = (
        f"{progress_path(out)}: what is measured is not kept for resume=True: cannot be written (No space left on dev"
    )
    assert [note for note in recorder.notes if "not kept" in note] == [f"{mine}ice)"]
    assert seen == 2 * [[".out.budget.safetensors.partial", *(["out.budget.safetensors"] if earlier else [])]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


def test_a_folder_in_the_place_of_what_is_written_stops_nothing(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / ".out.budget.safetensors.partial").mkdir()
    recorder = Recorder()
    budget(pair, tmp_path / "out", reporter=recorder)
    assert [note for note in recorder.notes if "is not kept for resume=True: cannot be written" in note]
    assert (tmp_path / "out").is_dir()
