"""A walk that is interrupted goes on where it was, and gives what it gives in one go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, files_of, make_pair

from deltacompress import compress_to
from deltacompress.budget.measuring import progress as module
from deltacompress.budget.measuring.pair import survey_pair
from deltacompress.budget.measuring.progress import Progress, progress_path
from deltacompress.budget.request import Request
from deltacompress.budget.result import BudgetResult
from deltacompress.budget.rungs import template
from deltacompress.budget.survey import Survey
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.job import CompressionJob
from deltacompress.errors import InputError, Interrupted, OutputError

STREAMS = {"one": [torch.ones(2, 3, 4), torch.zeros(1, 3, 4)], "other 1": [torch.full((1, 1, 4), 0.5)]}
CPU = torch.device("cpu")
LAYERS = 3


@pytest.fixture(autouse=True)
def _each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is kept, however long writing takes beside so little."""
    monkeypatch.setattr(module, "_TIMES", 0)


@pytest.fixture(scope="module", params=["llama", "qwen2-tied"])
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
def whole(deep: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[BudgetResult, dict[str, bytes]]:
    out = tmp_path_factory.mktemp("whole") / "out"
    return budget(deep, out), files_of(out)


@pytest.mark.parametrize("after", range(1, LAYERS + 1))
def test_a_walk_goes_on_where_it_was_interrupted(
    deep: Pair, whole: tuple[BudgetResult, dict[str, bytes]], tmp_path: Path, after: int
) -> None:
    """Also before the head alone; the steps that follow are those that were left, and nothing stays."""
    interrupted(deep, tmp_path / "out", after)
    recorder = Recorder()
    result = budget(deep, tmp_path / "out", resume=True, reporter=recorder)
    assert [f"{progress_path(tmp_path / 'out')}: {after} layers were measured by an earlier run, used again"] == [
        note for note in recorder.notes if "used again" in note
    ]
    layers = [f"layer {i}" for i in range(after, LAYERS)]
    assert recorder.steps[: len(layers) + 2] == ["embedding", *layers, "head"]
    assert (result.first, result.judged) == (whole[0].first, whole[0].judged)
    assert files_of(tmp_path / "out") == whole[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.recipe.yaml"]


@pytest.mark.parametrize("after", [1, 2])
def test_what_is_known_of_the_pair_then_is_the_same(deep: Pair, tmp_path: Path, after: int) -> None:
    """In every number."""

    def surveyed(recorder: Recorder, *, resume: bool = False, out: str = "out") -> Survey:
        given = {"calibration": deep.data, "samples": 8, "seq_len": 16, "device": "cpu", "resume": resume}
        job = CompressionJob.of(deep.base, deep.finetuned, recipe=template(), out=tmp_path / out, **given)
        return survey_pair(job, Inputs(), recorder, request=Request.of(1.2, None, None)).survey

    with pytest.raises(KeyboardInterrupt):
        surveyed(Recorder(after))
    assert surveyed(Recorder(), resume=True) == surveyed(Recorder(), out="whole")


def test_interrupted_twice_it_goes_on_from_the_second(pair: Pair, tmp_path: Path) -> None:
    interrupted(pair, tmp_path / "out", 1)
    with pytest.raises(Interrupted):
        budget(pair, tmp_path / "out", resume=True, reporter=Recorder(1))  # the next layer is kept by then
    recorder = Recorder()
    budget(pair, tmp_path / "out", resume=True, reporter=recorder)
    assert recorder.steps[:2] == ["embedding", "head"]


def test_without_resume_it_is_told_and_stays_until_as_much_is_measured(pair: Pair, tmp_path: Path) -> None:
    """Of other data it is of no use, and goes."""
    out, notes = tmp_path / "out", []
    interrupted(pair, out, 1)
    before = progress_path(out).read_bytes()
    for options, stays in (({}, True), ({"seed": 1}, False)):
        recorder = Recorder(0)
        with pytest.raises(Interrupted):
            budget(pair, out, reporter=recorder, **options)
        assert progress_path(out).exists() == stays
        notes += [note for note in recorder.notes if "earlier run measured" in note]
        assert not stays or progress_path(out).read_bytes() == before
    told = f"{progress_path(out)}: what an earlier run measured"
    assert notes == [
        f"{told} is measured anew; resume=True would have used it",
        f"{told} is of no use to this one, and is removed",
    ]


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


def test_what_is_in_its_place_and_none_of_it_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    other, recorder = progress_path(tmp_path / "out"), Recorder()
    other.write_text("precious")
    with pytest.raises(OutputError, match=r"safetensors: is in the place of what a budget measures, .* move it away"):
        budget(pair, tmp_path / "out", reporter=recorder)
    assert other.read_text() == "precious"
    assert recorder.steps == []


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Progress(path, "this").keep(2, {"a": [1.1, "b"]}, STREAMS)
    reached = Progress(path, "this").read(CPU)
    assert reached is not None
    assert (reached.layers, reached.data) == (2, {"a": [1.1, "b"]})
    assert list(reached.streams) == list(STREAMS)
    for name, some in STREAMS.items():
        assert all(torch.equal(one, other) for one, other in zip(reached.streams[name], some, strict=True))
    assert not Progress(path, "that").fits()
    assert Progress(path, "this").fits()
    assert Progress(tmp_path / "none", "this").read(CPU) is None
    many = {"many": [torch.full((1, 1, 1), float(k)) for k in range(12)]}
    Progress(path, "this").keep(1, None, many)
    reached = Progress(path, "this").read(CPU)
    assert reached is not None
    assert [float(one) for one in reached.streams["many"]] == list(range(12))


def test_writing_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    write: Callable[..., None] = module.write_file

    def slow(*args: Any) -> None:
        now[0] += 2.0
        write(*args)

    monkeypatch.setattr(module, "write_file", slow)
    progress, kept = Progress(tmp_path / "kept", "this"), list[int]()
    for layers in range(1, 8):
        now[0] += 30.0
        progress.keep(layers, None, STREAMS)
        reached = progress.read(CPU)
        assert reached is not None
        kept.append(reached.layers)
    assert kept == [1, 1, 1, 1, 5, 5, 5]  # 2 seconds every 100, at most


def test_what_cannot_be_written_leaves_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    Progress(path, "this").keep(1, None, STREAMS)
    write: Callable[..., None] = module.write_file

    def full(where: Path, chunks: Any) -> None:
        write(where, [b"half"])
        raise OutputError("cannot be written (No space left on device)", where=where, way_out="free some space")

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(OutputError, match="No space left"):
        Progress(path, "this").keep(2, None, STREAMS)
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    reached = Progress(path, "this").read(CPU)
    assert reached is not None
    assert reached.layers == 1
