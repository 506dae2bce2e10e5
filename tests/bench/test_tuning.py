"""`bench tuning`: what is trained is what is served and measured; rates, resuming, the table, errors."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pairs import files_of

from deltacompress.bench.tuning import adapters, runs, serving
from deltacompress.bench.tuning import run as tuning
from deltacompress.bench.tuning.adapters import Trained
from deltacompress.bench.tuning.methods import FAMILIES, chosen
from deltacompress.bench.tuning.sharing import alone, together, unless_taken
from deltacompress.bench.tuning.table import to_markdown
from deltacompress.bench.tuning.training import Examples, Plan, batches, mean_loss, padded, train
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.demo.score import encode, read_task
from deltacompress.errors import InputError, Interrupted, NumericsError, OutputError
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.models.tokenizers import load_tokenizer
from deltacompress.reporter import SILENT
from deltacompress.runtime import Runtime

if TYPE_CHECKING:
    from pairs import Pair

ALL = ["full", "int4-24", "lora-r4", "dora-r16", "boft", "rosa-r8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One task, that a few steps begin to learn: repeat the last word."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    (folder / "last").mkdir()
    seen = set[str]()
    for split, count in (("train", 60), ("validation", 20)):
        lines = []
        while len(lines) < count:
            words = [f"w{rng.randrange(1, 9)}" for _ in range(rng.randrange(2, 6))]
            if " ".join(words) in seen:
                continue
            seen.add(" ".join(words))
            lines.append(json.dumps({"prompt": " ".join(words), "completion": f" {words[-1]}"}))
        (folder / "last" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """With the positions that recipes calibrate on."""
    return make_pair("llama", max_position_embeddings=256)


@pytest.fixture
def asked(pair: Pair, data: Path, tmp_path: Path) -> dict[str, Any]:
    sizes = {"steps": 3, "rows": 8, "held_out": 12, "limit": 8}
    own = {"base": pair.base, "data": data, "tasks": ["last"], "methods": ALL, "seeds": (0, 1), "device": "cpu"}
    return own | sizes | {"out": tmp_path / "out"}


@pytest.fixture
def examples(pair: Pair, data: Path) -> Examples:
    return Examples.of(read_task(data / "last" / "train.jsonl"), load_tokenizer(pair.base), 12)


def test_every_method_is_measured_and_nothing_is_trained_twice(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    few = {name: tuple(replace(one, rates=one.rates[:2]) for one in methods) for name, methods in FAMILIES.items()}
    monkeypatch.setattr("deltacompress.bench.tuning.methods.FAMILIES", few)
    found = tuning.run(**asked)
    assert [(one["method"], one["seed"]) for one in found.rows] == [(m, s) for s in (0, 1) for m in ("base", *ALL)]
    for row in found.rows:
        assert 0 <= row["accuracy"] <= 100
        assert row["loss"] > 0
        assert (row["p"] is None) == (row["method"] == "full")
        for name in ("rate", "parameters", "steps"):
            assert (row[name] is None) == (row["method"] in ("base", "int4-24"))
        assert row["steps"] in (None, "plain")
        untimed = row["method"] in ("base", "full")
        assert (row["load_ms"] is None) == (row["added_ms"] is None) == untimed
    sizes = {row["method"]: row["bytes"] for row in found.rows}
    assert sizes["lora-r4"] < sizes["int4-24"] < sizes["full"]
    trained = {row["method"]: row["parameters"] for row in found.rows}
    assert 0 < trained["lora-r4"] < trained["dora-r16"] < trained["full"]
    assert {one["seeds"] for one in found.means} == {2}
    assert (asked["out"] / "tuning.md").read_text().count("\n| ") == len(ALL) + 3
    before = files_of(asked["out"])

    def never(*_: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "train", never)
    assert tuning.run(**asked).rows == found.rows
    assert files_of(asked["out"]) == before
    with pytest.raises(AssertionError, match="trained again"):
        tuning.run(**asked | {"steps": 4})


def test_what_killed_calls_left_is_removed(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """But not what somebody is at."""
    found: list[Path] = []

    def stop(bench: Any, *_: Any) -> Any:
        found[:] = sorted(bench[0].runs.unfinished().values())
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_rows", stop)
    with pytest.raises(Interrupted):
        tuning.run(**asked)
    (store,) = (asked["out"] / "models" / "last").glob("*.jsonl")
    for key in ("full.0.0.001", "boft.0.0.003"):
        (store.with_suffix("") / f".training.{key}").mkdir(parents=True)
    with unless_taken(asked["out"] / "locks", "last.boft.0.0.003") as mine:
        assert mine
        with pytest.raises(Interrupted):
            tuning.run(**asked)
    assert [one.name for one in found] == [".training.boft.0.0.003"]
    with pytest.raises(Interrupted):
        tuning.run(**asked)
    assert found == []


def test_where_nothing_can_be_locked_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    for block in (unless_taken(tmp_path, "one"), alone(tmp_path)):
        with pytest.raises(OutputError, match=r"cannot be written \(No locks available"), block:
            pytest.fail("it is entered")


def test_an_interrupted_call_goes_on(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    trained = list[float]()

    def stopping(model: Any, rows: Any, plan: Plan, rate: float, seed: int) -> str:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(rate)
        return train(model, rows, plan, rate, seed)

    monkeypatch.setattr(runs, "train", stopping)
    few = asked | {"methods": ["lora-r4"], "seeds": (0,)}
    with pytest.raises(Interrupted, match="run it again"):
        tuning.run(**few)
    (models,) = (one for one in (asked["out"] / "models" / "last").iterdir() if one.is_dir())
    assert sorted(one.name for one in models.iterdir()) == ["full.0.0.0001", "full.0.0.0002", "full.0.0.0005"]
    trained[:] = [0.0] * 9  # no more stops
    monkeypatch.setattr(runs, "train", lambda *given: trained.append(given[3]) or train(*given))
    tuning.run(**few)
    assert trained[9:] == [1e-3, *chosen(["lora-r4"])[1].rates]


def test_the_rate_is_that_of_the_least_loss_held_out(
    pair: Pair, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([0.5, math.nan, 0.25, 0.75, 0.4])
    monkeypatch.setattr(runs, "mean_loss", lambda model, rows: next(losses))
    method, base = chosen(["lora-r4"])[1], Checkpoint.open(pair.base)
    every = runs.Runs(base, examples, Plan(1, 2), tmp_path, "cpu", {})
    found = every.made(method, 0, 0, tmp_path, SILENT)
    assert (found.rate, found.held_out) == (method.rates[2], 0.25)
    assert [one.name for one in found.path.parent.iterdir()] == [found.path.name]
    assert every.made(method, 1, 0, tmp_path, SILENT).rate == method.rates[2]
    shutil.rmtree(found.path)  # by hand: it is trained again, at the rate that was chosen
    monkeypatch.setattr(runs, "mean_loss", lambda model, rows: 0.3)
    assert every.made(method, 0, 0, tmp_path, SILENT).path == found.path
    assert found.path.is_dir()
    monkeypatch.setattr(runs, "mean_loss", lambda model, rows: math.nan)
    with pytest.raises(NumericsError, match="lora-r16 diverges at every learning rate"):
        every.made(FAMILIES["lora"][1], 0, 0, tmp_path, SILENT)


def test_calls_at_once_share_the_work(pair: Pair, examples: Examples, tmp_path: Path) -> None:
    """None is done twice, none is left out, and other seeds wait for the rate, whoever finds it."""
    methods, base, begun = chosen(["lora-r4"]), Checkpoint.open(pair.base), list[str]()
    dawn = threading.Barrier(3)

    def call() -> None:
        own = runs.Runs(base, examples, Plan(1, 2), tmp_path / "models", "cpu", {})
        dawn.wait()

        def do(job: runs.Job) -> None:
            begun.append(job.key)
            own._trained.add(job.key, [job.rate, 1, "plain"])
            (own._models / job.key).mkdir(parents=True)
            time.sleep(0.01)

        together(tmp_path / "locks", lambda: own.missing(methods, (0, 1)), lambda job: job.key, do)
        assert own.missing(methods, (0, 1)) == []

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(call) for _ in range(3)]:
            one.result()
    tried = [f"{one.label}.0.{rate:g}" for one in methods for rate in one.rates]
    assert sorted(begun) == sorted([*tried, "full.1.0.0001", "lora-r4.1.0.0003"])
    kept = sorted(
        one.name for one in runs.Runs(base, examples, Plan(1, 2), tmp_path / "models", "cpu", {})._models.iterdir()
    )
    assert kept == ["full.0.0.0001", "full.1.0.0001", "lora-r4.0.0.0003", "lora-r4.1.0.0003"]


def test_all_is_compressed_before_the_first_is_measured(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So calls at once share that, too, and none compresses while the others have nothing left to measure."""
    made, left = list[tuple[str, str]](), list[Any]()

    def compress(base: Path, finetuned: Path, *, out: Path, **_: Any) -> None:
        made.append((finetuned.name, out.name))
        out.mkdir()

    def stop(bench: Any, *_: Any) -> Any:
        left.extend(bench.uncompressed())
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "compress", compress)
    monkeypatch.setattr(tuning.TaskBench, "measured", stop)
    monkeypatch.setattr(runs, "mean_loss", lambda model, rows: 0.5)
    with pytest.raises(Interrupted):
        tuning.run(**asked | {"methods": ["full", "delta"]})
    fulls = ["full.0.0.0001", "full.1.0.0001"]
    assert made == [(full, f"{recipe}.{full}") for recipe in ("int4-24", "int2-24") for full in fulls]
    assert left == []


def test_times_are_taken_alone(tmp_path: Path) -> None:
    order = list[int]()

    def call() -> None:
        with alone(tmp_path / "locks"):
            order.append(1)
            time.sleep(0.01)
            order.append(-1)

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(call) for _ in range(4)]:
            one.result()
    assert order == [1, -1] * 4


@pytest.mark.parametrize("label", [one for one in ALL if one not in ("full", "int4-24")])
def test_what_was_trained_is_what_is_served(pair: Pair, examples: Examples, tmp_path: Path, label: str) -> None:
    """The runtime's logits of the saved adapter are those of the model that was trained."""
    (method,) = (one for one in chosen([label]) if one.label == label)
    torch.manual_seed(0)
    model: Any = load_model(pair.base)
    trained = Trained(model.requires_grad_(True), method, examples.train)
    before = mean_loss(trained.model, examples.held_out)
    train(trained.model, examples.train, Plan(12, 16), 1e-2, 0)
    after = mean_loss(trained.model, examples.held_out)
    assert after < before - 0.01
    trained.save(tmp_path / "x", torch.float32)
    runtime = Runtime.from_base(pair.base)
    runtime.load(tmp_path / "x", "x")
    ids = examples.held_out[0][0]
    with torch.inference_mode():
        wanted = trained.model(input_ids=torch.tensor([ids])).logits[0]
    (found,) = runtime.logits([("x", ids)])
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    if method.kind == "rosa":
        assert sum(int(one.count_nonzero()) for one in trained._values.values()) > 0


def test_sparse_entries_are_those_of_the_largest_gradients(pair: Pair, examples: Examples) -> None:
    model: Any = load_model(pair.base)
    linears = adapters._linears(model.requires_grad_(True))
    assert "lm_head" not in linears
    found = adapters._largest_gradients(model, linears, examples.train)
    name, one = next(iter(linears.items()))
    sums, ordered = torch.zeros_like(one.weight), batches(examples.train, 16, 0)
    for _ in range(4):
        ids, mask, labels = next(ordered)
        taken = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        sums += torch.autograd.grad(taken, one.weight)[0].square()
    places = found[name]
    assert len(places) == int(adapters.DENSITY * one.weight.numel())
    assert sums.flatten()[places].min() >= sums.flatten().sort(descending=True).values[len(places) - 1]
    assert places.equal(places.sort().values)


def test_all_see_the_same_samples(examples: Examples) -> None:
    first, second, other = (batches(examples.train, 8, seed) for seed in (3, 3, 4))
    one, two, three = (torch.cat([next(some)[2].flatten() for _ in range(6)]) for some in (first, second, other))
    assert one.equal(two)
    assert one.shape != three.shape or not one.equal(three)
    assert len(examples.train) == 48
    assert not set(map(repr, examples.held_out)) <= set(map(repr, examples.train))


def test_the_loss_is_of_all_tokens_that_are_written(pair: Pair, examples: Examples) -> None:
    model, tokenizer = load_model(pair.base), load_tokenizer(pair.base)
    total = count = 0.0
    for ids, labels in examples.held_out:
        with torch.inference_mode():
            told = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for position, label in enumerate(labels[1:]):
            if label != -100:
                total, count = total - float(told[position, label]), count + 1
    assert mean_loss(model, examples.held_out) == pytest.approx(total / count, rel=1e-5)
    long = (examples.held_out[0][0] * 4, [-100] * 4 + (examples.held_out[0][0] * 4)[4:])
    uneven = [*examples.train[:40], long]  # more than a batch, and one of many tokens
    apart = [(mean_loss(model, [row]), sum(one != -100 for one in row[1][1:])) for row in uneven]
    weighed = sum(value * tokens for value, tokens in apart) / sum(tokens for _, tokens in apart)
    assert mean_loss(model, uneven) == pytest.approx(weighed, rel=1e-5)
    rows = [encode(tokenizer, "w1 w2 w3", " w4"), encode(tokenizer, "w1", " w2")]
    ids, mask, labels = padded(rows)
    assert mask.sum(1).tolist() == [len(row) for row, _ in rows]
    assert (labels[1][mask[1] == 0] == -100).all()
    assert ids.shape == labels.shape


def test_methods_by_name() -> None:
    assert [one.label for one in chosen(["delta", "lora-r16"])] == ["full", "int4-24", "int2-24", "lora-r16"]
    assert chosen(["full"]) == FAMILIES["full"]
    with pytest.raises(InputError, match="no method 'qlora'; give some of full, int4-24"):
        chosen(["qlora"])
    with pytest.raises(InputError, match="lora-r16 is named twice"):
        chosen(["lora", "lora-r16"])


def test_means() -> None:
    row = {"task": "t", "method": "m", "stderr": 1.0, "p": 0.1, "loss": 0.5, "bytes": 10, "rate": 1e-3}
    row |= {"load_ms": 4.0, "added_ms": 0.5, "parameters": 1200, "steps": "captured"}
    rows = [row | {"accuracy": 50.0}, row | {"accuracy": 54.0, "p": 0.3, "stderr": 3.0, "load_ms": 6.0}]
    (found,) = tuning.means(rows)
    assert (found["accuracy"], found["stderr"], found["seeds"]) == (52.0, 2.0, 2)
    assert found["spread"] == pytest.approx(8**0.5)
    assert found["p"] == pytest.approx(0.2)
    assert (found["load_ms"], found["added_ms"]) == (5.0, 0.5)
    assert "| 10 | 1,200 | 5.0 | 0.50 | 0.001 | 2 | captured |" in to_markdown([found])
    (one,) = tuning.means([row | {"accuracy": 50.0, "p": None, "loss": None, "load_ms": None}])
    assert (one["spread"], one["p"], one["loss"], one["load_ms"]) == (None, None, None, None)
    assert "| 10 | 1,200 | - | 0.50 | 0.001 | 1 | captured |" in to_markdown([one])


def test_what_serving_takes(pair: Pair, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load, and the base's own step, are not counted; what was measured is kept."""
    torch.manual_seed(0)
    folder = tmp_path / "lora"
    Trained(load_model(pair.base), chosen(["lora-r4"])[1], examples.train).save(folder, torch.float32)
    loads, steps = iter([900.0, 1.0, 3.0, 2.0]), list[tuple[str | None, bool]]()

    @contextmanager
    def clock(times: list[float]) -> Iterator[None]:
        yield
        times.append(next(loads))

    def step(runtime: Runtime, vocabulary: int, names: list[str | None], count: int) -> tuple[list[float], list[float]]:
        steps.append((names[0], "it" in runtime.variants))
        assert vocabulary == runtime.model.base.layout.config.vocab_size
        return [2.0 if names == [None] else 2.75] * count, [99.0] * count

    monkeypatch.setattr(serving, "clocked", clock)
    monkeypatch.setattr(serving, "timed_steps", step)
    times = serving.Times(pair.base, tmp_path / "kept", "cpu", {"a": 1})
    assert times.of([folder], SILENT) == {folder: serving.Served(2.0, 0.75)}
    assert steps == [(None, True), ("it", True)] * 2
    times.close()
    again = serving.Times(pair.base, tmp_path / "kept", "cpu", {"a": 1})
    assert again.of([folder], SILENT) == {folder: serving.Served(2.0, 0.75)}
    assert len(steps) == 4
    again.close()
    other = serving.Times(pair.base, tmp_path / "kept", "cpu", {"a": 2})
    with pytest.raises(RuntimeError, match="StopIteration"):  # measured anew
        other.of([folder], SILENT)
    other.close()


def test_what_is_wrong_is_told_before_anything_is_trained(
    asked: dict[str, Any],
    pair: Pair,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runs, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(InputError, match="60 samples, of which 60 are to be held out; give held_out less"):
        tuning.run(**asked | {"held_out": 60})
    both = tmp_path / "data" / "last"
    both.mkdir(parents=True)
    for split in ("train", "validation"):
        shutil.copy(data / "last" / "train.jsonl", both / f"{split}.jsonl")
    with pytest.raises(InputError, match=r"validation\.jsonl: 8 of its samples are in train\.jsonl, too"):
        tuning.run(**asked | {"data": tmp_path / "data"})
    with pytest.raises(InputError, match="seeds: names none, or one twice"):
        tuning.run(**asked | {"seeds": (1, 1)})
    with pytest.raises(InputError, match="no such folder; give one with <task>/train"):
        tuning.run(**asked | {"data": tmp_path / "none"})
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="training adapters needs PEFT: pip install"):
        tuning.run(**asked)
    own = ["bench", "tuning", str(pair.base), str(data), "--out", str(asked["out"]), "--device", "cpu"]
    for more, told in (
        (["--tasks", "lats"], "no lats/train.jsonl: did you mean last?"),
        (["--tasks", "last", "--methods", "x"], "no method 'x'"),
        (["--tasks", "last", "--seeds", "a"], "a is no list of numbers"),
    ):
        assert main([*own, *more]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert err.count("\n") == 1


def test_the_verb(pair: Pair, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    own = ["bench", "tuning", str(pair.base), str(data), "--out", str(tmp_path / "out"), "--device", "cpu", "--json"]
    sizes = ["--steps", "2", "--rows", "4", "--held-out", "6", "--limit", "5", "--seeds", "0"]
    assert main([*own, "--tasks", "last", "--methods", "full,lora-r4", *sizes]) == 0
    told = capsys.readouterr()
    means = json.loads(told.out)["means"]
    assert told.err == "training and measuring\n"
    assert [one["method"] for one in means] == ["base", "full", "lora-r4"]
