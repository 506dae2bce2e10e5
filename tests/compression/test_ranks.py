"""Several ranks, on CPUs: what they make is what one process makes, and whoever ends takes all others along."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pairs import Pair, Recorder, files_of
from ranked import CONTEXT, Follower, cpu_ranks
from torch import distributed

from deltacompress import plan
from deltacompress.artifact.delta import Delta, load_delta, verify
from deltacompress.bench import layers as bench
from deltacompress.cli.main import main
from deltacompress.codecs.formats.packed import PackedSpec, decode, unpack_levels
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before import prepare
from deltacompress.compression.layerwise import model
from deltacompress.errors import (
    BackendError,
    CheckpointError,
    DeltaCompressError,
    InputError,
    InternalError,
    Interrupted,
)

TOKENS_PER_BATCH = 32  # two of the sequences below
SHIPPED = model.TOKENS_PER_BATCH["cpu"]
EXACT = {"codec": "exact"}
SPLIT: dict[str, Any] = {"devices": [0, 1], "samples": 7}


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.TOKENS_PER_BATCH, "cpu", TOKENS_PER_BATCH)


def small_batches() -> None:
    model.TOKENS_PER_BATCH["cpu"] = TOKENS_PER_BATCH


@pytest.fixture
def followers() -> Iterator[list[Follower]]:
    with cpu_ranks(small_batches) as started:
        yield started
        assert started
        assert not any(one.is_alive for one in started)


def chosen(delta: Delta, name: str) -> torch.Tensor:
    """What the solver chose: for each weight its code, -1 where it is pruned; of 16 bits the value."""
    spec, parts = PackedSpec.from_json(delta.record(name).params, name), delta.parts(name)
    if spec.bits == 16:
        return decode(spec, parts)
    codes, mask, _ = unpack_levels(spec, parts)
    return torch.where(mask, codes.int(), -1)


def assert_alike(one: Path, other: Path, *, codes_equal: float = 0.999, loss: float = 1e-3) -> None:
    """So many codes are equal, and losses nearly: sums were taken in another order, no more."""
    first, second = load_delta(one), load_delta(other)
    same = total = 0
    for record in first.manifest.tensors:
        twin = second.record(record.name)
        assert (twin.status, twin.format, twin.params) == (record.status, record.format, record.params)
        assert twin.damp_fraction == record.damp_fraction
        assert (twin.loss or 0.0) == pytest.approx(record.loss or 0.0, rel=loss)
        assert (twin.kept is None) == (record.kept is None)
        assert (twin.kept or 0.0) == pytest.approx(record.kept or 0.0, rel=loss)
        if record.codec == "obs":
            own, twins = chosen(first, record.name), chosen(second, record.name)
            same, total = same + int((own == twins).sum()), total + own.numel()
        else:
            assert {part.sha256 for part in twin.parts} == {part.sha256 for part in record.parts}
    assert total
    assert same / total >= codes_equal


@pytest.fixture(scope="module")
def wide_pair(make_pair: Callable[..., Pair]) -> Pair:
    """In float32, so that batches of other sizes do not round to other values; with rows that three do not divide."""
    return make_pair("llama", dtype=torch.float32, intermediate_size=44)


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit"])
def test_two_make_what_one_makes_and_the_same_bytes_twice(
    wide_pair: Pair, tmp_path: Path, followers: list[Follower], recipe: str
) -> None:
    alone = wide_pair.compress(tmp_path / "one", recipe=recipe, samples=33)
    result = wide_pair.compress(tmp_path / "two", recipe=recipe, samples=33, devices=[0, 1])
    wide_pair.compress(tmp_path / "again", recipe=recipe, samples=33, devices=[0, 1])
    verify(tmp_path / "two")
    assert files_of(tmp_path / "two") == files_of(tmp_path / "again") != files_of(tmp_path / "one")
    assert_alike(tmp_path / "one", tmp_path / "two")
    assert result.backend == f"2 x {alone.backend}"
    assert len(followers) == 2


def test_sums_by_outputs_are_cut_as_rows_are(
    make_pair: Callable[..., Pair], tmp_path: Path, followers: list[Follower]
) -> None:
    """Of down: 32 outputs and 96 inputs; 8 bits, so that each code tells by how much its target was shifted."""
    pair = make_pair("llama", dtype=torch.float32, intermediate_size=96)
    rule = {"kind": "linear", "codec": "obs", "bits": 8, "asymmetric": 1.0}
    recipe = Recipe.parse({"name": "mine", "rules": [rule, {"codec": "exact"}]})
    pair.compress(tmp_path / "one", recipe=recipe, samples=33)
    pair.compress(tmp_path / "two", recipe=recipe, samples=33, devices=[0, 1])
    assert_alike(tmp_path / "one", tmp_path / "two", codes_equal=0.99)
    assert followers


def test_three_batches_on_two_and_rows_that_do_not_divide_on_three(
    wide_pair: Pair, tmp_path: Path, followers: list[Follower]
) -> None:
    wide_pair.compress(tmp_path / "one", samples=5)
    for ranks in (2, 3):
        wide_pair.compress(tmp_path / "several", samples=5, devices=list(range(ranks)), force=True)
        verify(tmp_path / "several")
        assert_alike(tmp_path / "one", tmp_path / "several")
    assert len(followers) == 3


RULES: dict[str, dict[str, Any]] = {
    "unstructured": {"bits": 4, "sparsity": "unstructured:0.5"},
    "pruned": {"bits": 16, "sparsity": "2:4", "refine_sweeps": 0},
    "searched": {"bits": 2, "range_search": (0.8, 1.0), "refit_scales": True},
    "drawn": {"bits": 1, "grid": "midrise", "sparsity": "drawn:3:8", "damp_fraction": 3.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_other_rules(wide_pair: Pair, tmp_path: Path, followers: list[Follower], rule: str) -> None:
    recipe = Recipe.parse(
        {
            "name": rule,
            "rules": [{"kind": "linear", "codec": "obs", **RULES[rule]}, {"codec": "rtn", "bits": 8}],
            "sequential": False,
        }
    )
    wide_pair.compress(tmp_path / "one", recipe=recipe, samples=33)
    wide_pair.compress(tmp_path / "two", recipe=recipe, samples=33, devices=[0, 1])
    verify(tmp_path / "two")
    if rule == "unstructured":  # which weights are kept is decided among all of a block: one flip moves another
        assert_alike(tmp_path / "one", tmp_path / "two", codes_equal=0.9, loss=0.05)
    else:
        assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("architecture", ["mixtral", "gpt2"])
def test_drawn_patterns_of_experts_and_of_transposed_linears(
    make_pair: Callable[..., Pair], tmp_path: Path, followers: list[Follower], architecture: str
) -> None:
    pair = make_pair(architecture, dtype=torch.float32)
    recipe = Recipe.parse({"name": "drawn", "rules": [{"kind": "linear", "codec": "obs", **RULES["drawn"]}, EXACT]})
    pair.compress(tmp_path / "one", recipe=recipe, samples=32)
    pair.compress(tmp_path / "two", recipe=recipe, samples=32, devices=[0, 1])
    verify(tmp_path / "two")
    assert_alike(tmp_path / "one", tmp_path / "two")


def test_experts(make_pair: Callable[..., Pair], tmp_path: Path, followers: list[Follower]) -> None:
    """Each expert's sums and counts are those of all tokens, whichever rank they are on, and so are its notes."""
    pair = make_pair("mixtral", dtype=torch.float32)
    told = [Recorder(), Recorder()]
    pair.compress(tmp_path / "one", samples=8, reporter=told[0])
    pair.compress(tmp_path / "two", samples=8, devices=[0, 1], reporter=told[1])
    verify(tmp_path / "two")
    assert_alike(tmp_path / "one", tmp_path / "two", codes_equal=0.99)
    tokens = [
        {record.name: record.tokens for record in load_delta(tmp_path / name).manifest.tensors}
        for name in ("one", "two")
    ]
    assert tokens[0] == tokens[1]
    assert any(tokens[0].values())
    routed = [[note for note in one.notes if "experts that tokens go to" in note] for one in told]
    assert routed[0] == routed[1] != []


def test_transposed_linears(make_pair: Callable[..., Pair], tmp_path: Path, followers: list[Follower]) -> None:
    pair = make_pair("gpt2", dtype=torch.float32)
    pair.compress(tmp_path / "one", samples=32)
    pair.compress(tmp_path / "two", samples=32, devices=[0, 1])
    verify(tmp_path / "two")
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def whole(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted run of two makes."""
    out = tmp_path_factory.mktemp("ranks") / "whole"
    with cpu_ranks(small_batches), pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.TOKENS_PER_BATCH, "cpu", TOKENS_PER_BATCH)
        pair.compress(out, **SPLIT)
    return out


class Killing(Recorder):
    """Kills a follower once a step is done."""

    def __init__(self, followers: list[Follower], after: str) -> None:
        super().__init__()
        self._followers, self._after = followers, after

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        super().step(label, loss=loss, memory_bytes=memory_bytes)
        if label == self._after:
            self._followers[-1].kill()


def steps_in(out: Path) -> list[str]:
    partial = out.with_name(out.name + ".partial")
    return sorted(path.name for path in partial.iterdir() if path.name != "identity.json")


def test_a_rank_that_is_killed(pair: Pair, tmp_path: Path, followers: list[Follower], whole: Path) -> None:
    """The run ends with what happened; what is finished is good, and goes on with as many ranks, to the same bytes."""
    out = tmp_path / "out"
    reporter = Killing(followers, "layer 0")
    with pytest.raises(BackendError, match=r"^the process on cpu was killed by signal 9; ") as caught:
        pair.compress(out, reporter=reporter, **SPLIT)
    assert caught.value.exit_code == 2
    assert any("run again with resume=True" in note for note in reporter.notes)
    assert not out.exists()
    assert steps_in(out) == ["step-layer-00000.safetensors", "step-outer.safetensors"]
    for other in ({"samples": 7}, {"samples": 7, "devices": [0, 1, 2]}):
        with pytest.raises(InputError, match=r"started with other input \(processes\)"):
            pair.compress(out, resume=True, **other)
    pair.compress(out, resume=True, **SPLIT)
    assert files_of(out) == files_of(whole)


@pytest.mark.parametrize("stop_at", [0, 2])
def test_ctrl_c(pair: Pair, tmp_path: Path, followers: list[Follower], whole: Path, stop_at: int) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted, match=r"interrupted, nothing published; .*run again with resume=True"):
        pair.compress(out, reporter=Recorder(stop_at), **SPLIT)
    assert not out.exists()
    assert not any(one.is_alive for one in followers)
    pair.compress(out, resume=True, **SPLIT)
    assert files_of(out) == files_of(whole)


def breaks() -> None:
    small_batches()
    original = model.compress_layer

    def broken(walk: Any, i: int, streams: Any) -> float | None:
        if i == 1 and walk.ranks.rank == 1:
            raise CheckpointError("is gone", where="the second layer", way_out="get it again")
        return original(walk, i, streams)

    model.compress_layer = broken


def goes_wrong() -> None:
    model.compress_layer = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tweak", "kind", "told"),
    [
        (breaks, CheckpointError, "the second layer: is gone; get it again"),
        (goes_wrong, InternalError, "internal error: TypeError: 'NoneType' object is not callable"),
    ],
)
def test_a_rank_that_raises(
    pair: Pair, tmp_path: Path, tweak: Callable[[], None], kind: type[DeltaCompressError], told: str
) -> None:
    """Its error is the run's, not that another rank lost it; what it leaves is what a run in one process would."""
    out = tmp_path / "out"
    with cpu_ranks(tweak) as started, pytest.raises(DeltaCompressError) as caught:
        pair.compress(out, devices=[0, 1, 2], samples=7)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(told)
    assert not any(one.is_alive for one in started)
    assert not out.exists()
    assert (tmp_path / "out.partial").exists() == (kind is InternalError)


def test_an_error_of_the_first_rank_is_its_own(
    pair: Pair, tmp_path: Path, followers: list[Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "compress_layer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.compress(tmp_path / "out", **SPLIT)


def test_a_follower_that_ends_before_they_meet(pair: Pair, tmp_path: Path) -> None:
    with cpu_ranks(leaves), pytest.raises(BackendError, match=r"^the process on cpu ended with code 9; "):
        pair.compress(tmp_path / "out", **SPLIT)
    assert not (tmp_path / "out.partial").exists()


def leaves() -> None:
    os._exit(9)


def test_notes_of_the_others_are_told(pair: Pair, tmp_path: Path) -> None:
    reporter = Recorder()
    with cpu_ranks(has_no_memory):
        pair.compress(tmp_path / "out", reporter=reporter, **SPLIT)
    assert "cpu: memory ran out" in " ".join(reporter.notes)


def has_no_memory() -> None:
    from deltacompress.calibration.forwards.memory import Room

    original = Room.__init__

    def init(self: Room, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.ran_out()

    Room.__init__ = init  # type: ignore[method-assign]


def test_a_process_that_is_in_a_group_already(pair: Pair, tmp_path: Path) -> None:
    """Its group stays as it is."""
    hook = sys.excepthook
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with (
            cpu_ranks() as started,
            pytest.raises(BackendError, match=r"^devices: this process is one of a torch\.distributed group already; "),
        ):
            pair.compress(tmp_path / "out", **SPLIT)
        assert not started
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook


def test_the_dry_run_counts_the_share_of_one(pair: Pair, tmp_path: Path) -> None:
    given: dict[str, Any] = {"calibration": pair.data, "samples": 8, "seq_len": 16, "recipe": "int4-24"}
    alone = plan(pair.base, pair.finetuned, out=tmp_path / "out", device="cpu", **given).to_json()
    with cpu_ranks() as started:
        two = plan(pair.base, pair.finetuned, out=tmp_path / "out", devices="0,1", **given).to_json()
    assert not started
    assert two["device"] == "cpu, cpu"
    assert 2 * two["memory"]["streams_bytes"] == alone["memory"]["streams_bytes"] > 0
    assert two["memory"]["statistics_bytes"] == alone["memory"]["statistics_bytes"]
    assert two["calibration_tokens"] == alone["calibration_tokens"]
    assert two["time"]["tflop"] == alone["time"]["tflop"]
    with cpu_ranks(), pytest.raises(InputError, match=r"^devices: 2 samples are too few for 3 GPUs"):
        plan(pair.base, pair.finetuned, out=tmp_path / "out", devices="0,1,2", **given | {"samples": 2})


def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "chosen_devices", prepare_cpus)
    with cpu_ranks() as started:
        data = bench.run(devices="0,1", samples=4, seq_len=32, layers=1, stages=True, scratch=tmp_path).to_json()
    assert len(started) == 1
    assert data["devices"] == 2
    assert "between ranks" in str(data)


def prepare_cpus(numbers: tuple[int, ...] | None, _device: str) -> tuple[torch.device, ...]:
    assert numbers == (0, 1)
    return (torch.device("cpu"),) * 2


def test_fewer_samples_than_ranks(pair: Pair, tmp_path: Path) -> None:
    with cpu_ranks() as started, pytest.raises(InputError, match=r"^devices: 2 samples are too few for 3 GPUs"):
        pair.compress(tmp_path / "out", devices=[0, 1, 2], samples=2)
    assert not started


def test_what_does_not_calibrate_runs_in_one_process(pair: Pair, tmp_path: Path) -> None:
    reporter = Recorder()
    with cpu_ranks() as started:
        result = pair.compress(tmp_path / "out", recipe="lossless", devices=[0, 1], reporter=reporter)
    assert not started
    assert not result.backend.startswith("2 x")
    assert "devices: only cpu is used, since recipe lossless does not calibrate layer by layer" in reporter.notes


def first_process(argv: list[str], stop: int, waits: Connection, told: Path, threads: int) -> None:
    """A command line on two CPUs, whose followers are started as ever; at layer `stop` it says so and waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(threads)
    original = model.compress_layer

    def waiting(walk: Any, i: int, streams: Any) -> float | None:
        if i == stop:
            waits.send(i)
            time.sleep(120)  # longer than a stop is waited for below
        return original(walk, i, streams)

    model.compress_layer = waiting
    prepare.chosen_devices = lambda numbers, _device: (torch.device("cpu"),) * len(numbers or (0,))
    os._exit(main(argv))


@pytest.mark.slow
def test_real_processes(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C of a command line, then SIGKILL of its first process: the others end, and what is there goes on.

    Each time when one step more is there, while the others wait for the first process.
    """
    monkeypatch.setitem(model.TOKENS_PER_BATCH, "cpu", SHIPPED)  # what those processes have: sums round by the batch
    out = tmp_path / "out"
    argv = ["auto" if one == "cpu" else one for one in pair.argv(out, "--devices", "0,1", "--resume")]
    for layer, (number, code) in enumerate(((signal.SIGINT, 2), (signal.SIGKILL, -9))):
        (waits, there), told = CONTEXT.Pipe(duplex=False), tmp_path / f"told-{layer}"
        given = (argv, layer, there, told, torch.get_num_threads())
        first = CONTEXT.Process(target=first_process, args=given, daemon=True)
        first.start()
        there.close()
        assert waits.recv() == layer
        assert len(list(out.with_name("out.partial").glob("step-*.safetensors"))) == layer + 1
        assert first.pid is not None
        others = psutil.Process(first.pid).children()
        assert len(others) == 1
        os.kill(first.pid, number)
        first.join(60)
        assert first.exitcode == code
        assert ("--resume" in told.read_text()) == (number == signal.SIGINT)
        assert psutil.wait_procs(others, timeout=30)[1] == []
        assert not out.exists()
    with cpu_ranks():
        pair.compress(out, resume=True, devices=[0, 1])
        pair.compress(tmp_path / "whole", devices=[0, 1])
    assert files_of(out) == files_of(tmp_path / "whole")
