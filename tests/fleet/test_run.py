"""Fleets at work: what jobs share, jobs that fail, stops and kills; the bytes are those of lone runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fleets import SMALL, fleet_of, tuned, write_jobs
from pairs import Pair, Recorder, edit, files_of
from ranked import Follower, forked

from deltacompress import Recipe, Zoo, compress
from deltacompress.artifact.delta import verify
from deltacompress.checkpoints import reader
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.compression.before import inputs as inputs_module
from deltacompress.compression.job import CompressionJob
from deltacompress.errors import IntegrityError, Interrupted
from deltacompress.fleet import work
from deltacompress.fleet import workers as workers_module
from deltacompress.fleet.jobs_file import Fleet
from deltacompress.fleet.result import FleetFailedError, FleetResult
from deltacompress.fleet.run import compress_fleet, plan_fleet
from deltacompress.fleet.state import JobState, earlier, state_file


@pytest.fixture(scope="module")
def models(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = tmp_path_factory.mktemp("models")
    return [tuned(pair, found / name, seed) for seed, name in enumerate(("first", "second", "third"))]


@pytest.fixture(scope="module")
def alone(pair: Pair, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The bytes of lone runs."""
    place = tmp_path_factory.mktemp("alone")
    for model in models:
        compress(pair.base, model, out=place / model.name, calibration=pair.data, **SMALL)
    return {model.name: files_of(place / model.name) for model in models}


def states(result: FleetResult) -> list[str]:
    return [one.state for one in result.jobs]


def bytes_of(place: Path) -> dict[str, dict[str, bytes]]:
    return {one.name: files_of(one) for one in sorted((place / "out").iterdir()) if one.is_dir()}


def _inode(place: Path, name: str) -> int:
    return (place / "out" / name / "manifest.json").stat().st_ino


def test_bytes_of_lone_runs(pair: Pair, models: list[Path], alone: dict[str, Any], tmp_path: Path) -> None:
    result = compress_fleet(fleet_of(pair, tmp_path, models))
    assert states(result) == ["done"] * 3
    assert bytes_of(tmp_path) == alone
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_file()) == [
        "first.job.json",
        "second.job.json",
        "third.job.json",
    ]
    result.require()
    told = earlier(tmp_path / "out" / "second")
    assert told == result.jobs[1]
    assert told.result is not None
    assert told.result["digest"] == json.loads(alone["second"]["manifest.json"])["digest"]


def test_the_base_is_opened_hashed_and_checked_once(
    pair: Pair, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, read = [], []
    opening, reading = Checkpoint.open, Checkpoint.chunks

    def chunks(self: Checkpoint, name: str) -> Any:
        if self.path == pair.base:
            read.append(name)
        return reading(self, name)

    monkeypatch.setattr(Checkpoint, "open", lambda path: opened.append(Path(path)) or opening(path))
    monkeypatch.setattr(Checkpoint, "chunks", chunks)
    monkeypatch.setattr(Checkpoint, "equals", lambda *_: False)  # is there nothing to hash for
    compress_fleet(fleet_of(pair, tmp_path, models, defaults=SMALL | {"recipe": "int4", "calibration": str(pair.data)}))
    assert opened.count(pair.base) == 1
    assert sorted(read) == sorted(opening(pair.base).tensors)  # each is hashed and checked for NaN in one read


@pytest.mark.parametrize(("when", "first"), [("layer 0", "failed"), ("head", "done")])
def test_a_base_that_changes_meanwhile_is_refused(
    pair: Pair, models: list[Path], tmp_path: Path, when: str, first: str
) -> None:
    """By the job that still reads it, and by those that come."""
    base = shutil.copytree(pair.base, tmp_path / "base")
    path = fleet_of(Pair(base, pair.finetuned, pair.data), tmp_path, models[:2])

    class Changes(Recorder):
        def phase(self, name: str, total: int | None = None) -> None:
            if name.startswith("2/2") and "compressing" not in name:
                return
            if name.startswith("1/2"):
                self.armed = True

        def note(self, message: str) -> None:
            self.notes.append(message)

        def step(self, label: str, **more: Any) -> None:
            if label == when and not self.steps:
                self.steps.append(label)
                edit(base, lambda weights: {name: w + 1 for name, w in weights.items()})

    result = compress_fleet(path, reporter=Changes())
    assert states(result) == [first, "failed"]
    assert all("changed since it was opened" in str(one.error) for one in result.jobs if one.state == "failed")


def test_tokens_are_shared_by_data_tokenizer_and_spec(
    pair: Pair, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, int]] = []
    real = inputs_module.calibration_tokens

    def tokens(finetuned: Checkpoint, source: Any, spec: Any) -> Any:
        made.append((finetuned.path, spec.samples))
        return real(finetuned, source, spec)

    monkeypatch.setattr(inputs_module, "calibration_tokens", tokens)
    other = shutil.copytree(models[2], tmp_path / "other")
    file = other / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    words = vocabulary["model"]["vocab"]
    words["w0"], words["w1"] = words["w1"], words["w0"]
    file.write_text(json.dumps(vocabulary))
    path = fleet_of(pair, tmp_path, [*models[:2], other])
    whole = yaml.safe_load(path.read_text())
    whole["finetunes"].append({"model": str(models[2]), "out": str(tmp_path / "out" / "more"), "samples": 4})
    result = compress_fleet(write_jobs(path, whole))
    assert states(result) == ["done"] * 4
    assert made == [(models[0], 8), (other, 8), (models[2], 4)]
    digests = [json.loads((tmp_path / "out" / name / "manifest.json").read_text())["calibration"]["sha256"]
               for name in ("first", "second", "other", "more")]  # fmt: skip
    assert len(set(digests)) == 3
    assert digests[0] == digests[1]


def test_another_calibration_file_under_the_same_name_is_other_data(
    pair: Pair, models: list[Path], tmp_path: Path
) -> None:
    data = Path(shutil.copy(pair.data, tmp_path / "data.jsonl"))
    shared = inputs_module.Inputs()
    job = CompressionJob(base="b", finetuned="f", recipe=Recipe.load("int4"), out=Path("o"), calibration=str(data),
                         samples=8, seq_len=16)  # fmt: skip
    opened = Checkpoint.open(models[0])
    first = shared.tokens(opened, job)
    assert shared.tokens(opened, job) is first
    data.write_text("\n".join(reversed(data.read_text().splitlines())) + "\n")
    os.utime(data, ns=(1, 1))
    assert shared.tokens(opened, job).sha256 != first.sha256


def test_a_job_that_fails_stops_no_other(
    pair: Pair, models: list[Path], alone: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(models[1], tmp_path / "second")
    edit(broken, lambda weights: {name: w * float("nan") for name, w in weights.items()})
    path = fleet_of(pair, tmp_path, [models[0], broken, models[2]])
    assert main(["compress", "--jobs", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [one["state"] for one in told["jobs"]] == ["done", "failed", "done"]
    assert told["jobs"][1]["error"]["type"] == "CheckpointError"
    assert "NaN" in told["jobs"][1]["error"]["what"]
    error = json.loads(captured.err.splitlines()[-1])["error"]
    assert error["type"] == "FleetFailedError"
    assert error["exit_code"] == 2
    assert error["what"].startswith("1 of 3 jobs failed: ")
    assert sorted(bytes_of(tmp_path)) == ["first", "third"]
    assert not (tmp_path / "out" / "second.partial").exists()

    shutil.rmtree(broken)
    shutil.copytree(models[1], broken)
    inodes = {name: _inode(tmp_path, name) for name in ("first", "third")}
    result = compress_fleet(path, resume=True)
    assert [one.used_again for one in result.jobs] == [True, False, True]
    assert bytes_of(tmp_path) == alone
    assert {name: _inode(tmp_path, name) for name in inodes} == inodes


def test_the_figures_of_an_earlier_run_are_told_again(pair: Pair, models: list[Path], tmp_path: Path) -> None:
    path = fleet_of(pair, tmp_path, models[:1])
    first = compress_fleet(path).jobs[0].result
    assert first is not None
    assert first["kl_on_calibration"] is not None
    again = compress_fleet(path).jobs[0]
    assert again.used_again
    assert again.result == first
    state_file(tmp_path / "out" / "first").unlink()
    without = compress_fleet(path).jobs[0].result
    assert without is not None
    assert without["kl_on_calibration"] is None


def test_a_file_in_the_place_of_a_state_is_not_replaced(pair: Pair, models: list[Path], tmp_path: Path) -> None:
    path = fleet_of(pair, tmp_path, models[:1])
    (tmp_path / "out").mkdir()
    mine = state_file(tmp_path / "out" / "first")
    mine.write_text('{"state": "mine"}')
    with pytest.raises(Exception, match=r"line 9 .*first\.job\.json: exists already, and is no state of a job"):
        compress_fleet(path)
    assert mine.read_text() == '{"state": "mine"}'


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([ValueError("odd"), IntegrityError("bad"), None], 70),
        ([None, IntegrityError("bad"), OSError(28, "No space left on device")], 3),
        ([MemoryError(), None, None], 2),
    ],
)
def test_one_exit_code(
    pair: Pair, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[Any], code: int
) -> None:
    real, todo = work.run_job, iter(errors)

    def run_job(*given: Any) -> Any:
        if error := next(todo):
            raise error
        return real(*given)

    monkeypatch.setattr(work, "run_job", run_job)
    result = compress_fleet(fleet_of(pair, tmp_path, models))
    assert states(result) == ["failed" if one else "done" for one in errors]
    with pytest.raises(FleetFailedError) as caught:
        result.require()
    assert caught.value.exit_code == code
    for one, state in zip(models, result.jobs, strict=True):
        assert earlier(tmp_path / "out" / one.name) == state


@pytest.mark.parametrize("stop_at", [3, 5, 8])
def test_stopped(pair: Pair, models: list[Path], alone: dict[str, Any], tmp_path: Path, stop_at: int) -> None:
    """Steps: three of the checks, then four of each job."""
    path = fleet_of(pair, tmp_path, models)
    with pytest.raises(
        Interrupted, match=r"interrupted; \d of 3 jobs are done and stay; run again with resume=True"
    ) as stop:
        compress_fleet(path, reporter=Recorder(stop_at))
    done = (stop_at - 3) // 4
    assert f"{done} of 3" in str(stop.value)
    stopped = earlier(tmp_path / "out" / models[done].name)
    assert stopped is not None
    assert stopped.state == "stopped"
    kept = {
        name: (tmp_path / "out" / name / "manifest.json").stat().st_ino
        for name in bytes_of(tmp_path)
        if "." not in name
    }
    assert len(kept) == done
    result = compress_fleet(path, resume=True)
    assert states(result) == ["done"] * 3
    assert [one.used_again for one in result.jobs] == [True] * done + [False] * (3 - done)
    assert bytes_of(tmp_path) == alone
    assert {name: _inode(tmp_path, name) for name in kept} == kept


def test_a_name_is_published_once(pair: Pair, models: list[Path], tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    path = fleet_of(pair, tmp_path, models[:2], zoo=str(tmp_path / "zoo"), out=str(tmp_path / "out"))
    whole = yaml.safe_load(path.read_text())
    whole["finetunes"][0] = {"model": str(models[0]), "name": "team/one"}
    write_jobs(path, whole)
    result = compress_fleet(path)
    assert [one.published for one in result.jobs] == ["team/one@1", None]
    verify(tmp_path / "out" / "team" / "one")
    state_file(tmp_path / "out" / "team" / "one").unlink()  # as if it was killed between the zoo and its state
    again = compress_fleet(path, resume=True)
    assert again.jobs[0].published == "team/one@1"
    assert [(one.name, one.version) for one in zoo.list(all_versions=True)] == [("team/one", 1)]
    whole["finetunes"][0]["seed"] = 5
    third = compress_fleet(write_jobs(path, whole), force=True)
    assert third.jobs[0].published == "team/one@2"


def test_the_plan_of_a_fleet_writes_nothing(pair: Pair, models: list[Path], tmp_path: Path) -> None:
    path = fleet_of(pair, tmp_path, models[:2])
    plans = plan_fleet(path)
    assert [one.job.finetuned for one in plans] == [str(one) for one in models[:2]]
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.yaml"]
    assert main(["compress", "--jobs", str(path), "--dry-run", "-q"]) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.yaml"]


class TestWorkers:
    """Processes of their own; on a CPU each gets its share of the threads. Where how they start is not what is tested,
    they are forked.
    """

    @pytest.fixture(autouse=True)
    def _one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def test_all_done(self, pair: Pair, models: list[Path], tmp_path: Path) -> None:
        heard = Recorder()
        result = compress_fleet(fleet_of(pair, tmp_path, models), workers=2, reporter=heard)
        assert states(result) == ["done"] * 3
        assert sorted(heard.steps[3:]) == sorted(one.label for one in result.jobs)
        assert _workers() == []
        for model in models:
            verify(tmp_path / "out" / model.name, base=pair.base)
            assert earlier(tmp_path / "out" / model.name) in result.jobs

    def test_one_is_killed(self, pair: Pair, models: list[Path], tmp_path: Path) -> None:
        """Its job fails and is told; another worker takes its place; --resume does the rest."""
        path = fleet_of(pair, tmp_path, models)
        killed: list[int] = []
        begun = tmp_path / "out" / "first.job.json"

        def kill() -> None:
            while not begun.exists():
                time.sleep(0.002)
            for worker in workers:
                if "first" in _state(begun).label and not killed:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.append(worker.pid)

        watcher = threading.Thread(target=kill)
        with forked() as workers:
            watcher.start()
            result = compress_fleet(path, workers=2)
            watcher.join()
        assert sorted(states(result)) == ["done", "done", "failed"]
        (failed,) = result.failed
        assert failed.error is not None
        assert failed.error["what"] == "its worker was killed by signal 9"
        assert earlier(Path(failed.out)) == failed
        with forked():
            again = compress_fleet(path, workers=2, resume=True)
        assert states(again) == ["done"] * 3
        assert [one.used_again for one in again.jobs] == [one.state == "done" for one in result.jobs]
        assert not list((tmp_path / "out").glob("*.partial"))

    def test_stopped(self, pair: Pair, models: list[Path], tmp_path: Path) -> None:
        """The workers end before the call does, and keep what they finished."""
        path = fleet_of(pair, tmp_path, models)
        with forked() as workers, pytest.raises(Interrupted, match=r"[01] of 3 jobs are done"):
            compress_fleet(path, workers=2, reporter=Recorder(3))
        assert [one.is_alive for one in workers] == [False, False]
        again = compress_fleet(path, resume=True)
        assert states(again) == ["done"] * 3, [one.error for one in again.jobs]

    def test_one_whose_starter_is_gone(self, pair: Pair, models: list[Path], tmp_path: Path) -> None:
        """It ends in the middle of its job: whoever resumes must not meet it."""
        (one,) = Fleet.load(fleet_of(pair, tmp_path, models[:1])).jobs
        order = {"job": one.job.model_dump(mode="json"), "name": None, "place": one.place, "zoo": None}
        begun = tmp_path / "out" / "first.job.json"
        argv = [sys.executable, "-m", "deltacompress.fleet.worker"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(order | {"command_line": True}) + "\n")
            worker.stdin.flush()
            while not begun.exists():
                time.sleep(0.002)
            worker.stdin.close()
            assert worker.wait(60) == 1
        assert _state(begun).state == "begun"
        assert not (tmp_path / "out" / "first").exists()

    def test_one_that_is_stopped_where_nothing_can_be_raised(
        self, pair: Pair, models: list[Path], tmp_path: Path
    ) -> None:
        """It ends after its job all the same, and waits for no other."""
        (one,) = Fleet.load(fleet_of(pair, tmp_path, models[:1])).jobs
        order = {"job": one.job.model_dump(mode="json"), "name": None, "place": one.place, "command_line": False}
        with forked(stopped_by_a_finalizer):
            worker = Follower(["deltacompress.fleet.worker"], text=True)
            worker.stdin.write(json.dumps(order | {"zoo": None}) + "\n")
            worker.stdin.flush()
            assert worker.wait(60) == Interrupted.exit_code
            (told,) = [json.loads(line) for line in worker.stdout]
            assert told["done"]["state"] == "done"
            worker.stdin.close()
            worker.stdout.close()

    def test_no_more_workers_than_jobs(self, pair: Pair, models: list[Path], tmp_path: Path) -> None:
        heard = Recorder()
        compress_fleet(fleet_of(pair, tmp_path, models[:1]), workers=9, reporter=heard)
        assert heard.steps[1:] == ["embeddings and norms", "layer 0", "layer 1", "head"]  # in this process


class _Stops:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def stopped_by_a_finalizer() -> None:
    """Of a worker: SIGTERM comes while the memory of a job is freed."""

    def free() -> None:
        _Stops()

    work._free_memory = free
    sys.unraisablehook = lambda _: None


def _workers() -> list[int]:
    """Worker processes of this one."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = {int(one) for path in children for one in path.read_text().split()}
    return [one for one in found if b"deltacompress.fleet.worker" in Path(f"/proc/{one}/cmdline").read_bytes()]


def _state(path: Path) -> JobState:
    return JobState.model_validate_json(path.read_text())


def test_a_worker_that_talks_nonsense_fails_its_job_alone(
    pair: Pair, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a half line of one that was killed does: nobody may wait for its answer for ever."""
    loads, spoiled = workers_module.json.loads, []

    def half(line: str) -> Any:
        if "done" in line and not spoiled:
            spoiled.append(line)
            return loads(line[:9])
        return loads(line)

    monkeypatch.setattr(workers_module, "json", SimpleNamespace(loads=half, dumps=json.dumps))
    with forked() as workers:
        result = compress_fleet(fleet_of(pair, tmp_path, models[:2]), workers=2)
    assert sorted(states(result)) == ["done", "failed"]
    assert len(spoiled) == 1
    assert not any(one.is_alive for one in workers)


def test_what_a_stopped_job_read_ahead_is_dropped(pair: Pair, tmp_path: Path) -> None:
    shared = inputs_module.Inputs()
    base = shared.base(str(pair.base))
    waiting = base._ahead["model.norm.weight"] = Future()  # that nobody waits for
    assert shared.base(str(pair.base)) is base
    assert waiting.cancelled()
    assert base.read("model.norm.weight").shape == (32,)


def test_hashes_are_remembered_by_the_instance(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Checkpoint.open(pair.base)
    opened.fingerprint()
    monkeypatch.setattr(reader, "hash_chunks", None)
    assert opened.fingerprint() == opened.fingerprint()
