"""Recipes with `fisher: true`, from checkpoints to artifacts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, files_of
from ranked import cpu_ranks

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.calibration import gradients
from deltacompress.codecs import obs
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.layerwise import fisher, layer
from deltacompress.errors import Interrupted
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.coupling import Coupling


def recipe(**options: Any) -> Recipe:
    linear = {"kind": "linear", "codec": "obs", "bits": 2, "sparsity": "2:4", "fisher": True} | options
    return Recipe.parse({"name": "with-fisher", "rules": [linear, {"codec": "exact"}]})


@pytest.fixture
def couplings(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the linears whose rows were coupled, as they are solved."""
    found: list[list[str]] = []

    class Noted(Coupling):
        def __init__(self, fisher: Any, names: Any) -> None:
            found.append(list(names))
            super().__init__(fisher, names)

    monkeypatch.setattr(obs, "Coupling", Noted)
    return found


def test_every_group_of_linears_is_coupled(pair: Pair, tmp_path: Path, couplings: list[list[str]]) -> None:
    pair.compress(tmp_path / "with", recipe=recipe())
    assert [[name.split(".")[-2] for name in group] for group in couplings] == 2 * [
        ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"],
    ]  # fmt: skip
    verify(tmp_path / "with", base=pair.base)
    couplings.clear()
    pair.compress(tmp_path / "without", recipe=recipe(fisher=False))
    assert not couplings
    digests = [load_delta(tmp_path / name).manifest.digest for name in ("with", "without")]
    assert digests[0] != digests[1]


def test_it_needs_no_asymmetric_targets(pair: Pair, tmp_path: Path, couplings: list[list[str]]) -> None:
    pair.compress(tmp_path / "out", recipe=recipe(asymmetric=0))
    assert len(couplings) == 8


def test_what_was_interrupted_comes_to_the_same_bytes(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.compress(tmp_path / "whole", recipe=recipe())
    compress_layer = layer._compress

    def stopped(walk: Any, i: int, *rest: Any) -> Any:
        if i == 1:
            raise KeyboardInterrupt
        return compress_layer(walk, i, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "_compress", stopped)
        with pytest.raises(Interrupted):
            pair.compress(tmp_path / "parts", recipe=recipe())
    pair.compress(tmp_path / "parts", recipe=recipe(), resume=True)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_what_cannot_be_differentiated_is_told_and_solved_row_by_row(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_layer = Skeleton.run_layer

    def opaque(self: Skeleton, i: int, hidden: torch.Tensor, call: Any) -> torch.Tensor:
        return run_layer(self, i, hidden.detach(), call)

    reporter = Recorder()
    monkeypatch.setattr(Skeleton, "run_layer", opaque)
    pair.compress(tmp_path / "out", recipe=recipe(), reporter=reporter)
    assert any("no gradients of this model, so rows are solved apart" in note for note in reporter.notes)
    parts = [load_delta(tmp_path / "out").manifest.tensors]
    monkeypatch.undo()
    pair.compress(tmp_path / "without", recipe=recipe(fisher=False))
    parts.append(load_delta(tmp_path / "without").manifest.tensors)
    assert [one.sha256 for one in parts[0]] == [one.sha256 for one in parts[1]]


def test_what_was_read_ahead_is_dropped_where_gradients_fail(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    load = layer._load

    def failed(*given: Any) -> None:
        read = given[4]
        read.func.__self__._ahead["a weight"] = Future()
        raise RuntimeError("no way back")

    def noted(walk: Any, i: int) -> None:
        left.append(len(walk.plan.finetuned._ahead))
        load(walk, i)

    monkeypatch.setattr(fisher, "fisher_information", failed)
    monkeypatch.setattr(layer, "_load", noted)
    pair.compress(tmp_path / "out", recipe=recipe())
    assert left == [0, 0]


def test_a_forward_that_fails_only_where_it_is_differentiated(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LayerCall.run

    def in_place(self: LayerCall, module: Any, hidden: torch.Tensor) -> Any:
        return run(self, module, hidden.mul_(1.0))  # of a leaf that wants a gradient: RuntimeError

    reporter = Recorder()
    monkeypatch.setattr(LayerCall, "run", in_place)
    pair.compress(tmp_path / "out", recipe=recipe(), reporter=reporter)
    assert any("rows are solved apart" in note for note in reporter.notes)


def test_memory_that_runs_out_is_no_reason_to_do_without(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of an artifact depends on the memory that there is."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(fisher, "fisher_information", full)
    with pytest.raises(torch.OutOfMemoryError):
        pair.compress(tmp_path / "out", recipe=recipe())
    assert not (tmp_path / "out").exists()


def test_what_a_device_cannot_differentiate_is_told(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise NotImplementedError("the backward of this is not there on CUDA")

    reporter = Recorder()
    monkeypatch.setattr(fisher, "fisher_information", missing)
    pair.compress(tmp_path / "out", recipe=recipe(), reporter=reporter)
    assert any("rows are solved apart, as with fisher: false (the backward" in note for note in reporter.notes)


def test_what_has_no_gradients_of_its_own_is_told(pair: Pair, tmp_path: Path, couplings: list[list[str]]) -> None:
    rules = [{"kind": ["linear", "head"], "codec": "obs", "bits": 2, "fisher": True}, {"codec": "exact"}]
    reporter = Recorder()
    pair.compress(tmp_path / "out", recipe=Recipe.parse({"name": "all", "rules": rules}), reporter=reporter)
    told = "lm_head.weight has no gradients of its own, so its rows are solved apart, as with fisher: false"
    assert told in reporter.notes
    assert len(couplings) == 8


def test_nothing_is_left_of_layers_that_were_finished(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    take = layer.take_fisher

    def noted(walk: Any, i: int, known: dict[str, Any], groups: Any) -> None:
        take(walk, i, known, groups)
        left.append(len(known))

    monkeypatch.setattr(layer, "take_fisher", noted)
    with pytest.raises(Interrupted):
        pair.compress(tmp_path / "out", recipe=recipe(), reporter=Recorder(7))  # in layer 1, which follows four and two
    left.clear()
    pair.compress(tmp_path / "out", recipe=recipe(), resume=True)
    assert left == [7, 0]


def test_experts_are_solved_row_by_row(
    make_pair: Callable[..., Pair], tmp_path: Path, couplings: list[list[str]]
) -> None:
    mixture = make_pair("mixtral")
    mixture.compress(tmp_path / "out", recipe=recipe())
    verify(tmp_path / "out", base=mixture.base)
    coupled = {name for group in couplings for name in group}
    assert coupled
    assert not any("expert" in name for name in coupled)


def test_a_transposed_linear(make_pair: Callable[..., Pair], tmp_path: Path, couplings: list[list[str]]) -> None:
    turned = make_pair("gpt2")
    turned.compress(tmp_path / "out", recipe=recipe())
    verify(tmp_path / "out", base=turned.base)
    assert any("c_fc" in name for group in couplings for name in group)


def test_ranks_add_up_what_each_has(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, which take gradients at all sequences between them, each has the sums of one that has all."""
    monkeypatch.setattr(gradients, "_TOKENS_AN_OUTPUT", 1000)
    found: list[dict[str, torch.Tensor]] = []
    take = layer.take_fisher

    def noted(walk: Any, *rest: Any) -> None:
        take(walk, *rest)
        found.append({name: one.clone() for name, one in walk.fisher.items()})

    monkeypatch.setattr(layer, "take_fisher", noted)
    pair.compress(tmp_path / "one", recipe=recipe(), samples=8)
    alone, found = found, []
    with cpu_ranks(every_token):
        pair.compress(tmp_path / "two", recipe=recipe(), samples=8, devices=[0, 1])
    verify(tmp_path / "two", base=pair.base)
    for one, two in zip(alone, found, strict=True):
        assert one.keys() == two.keys()
        for name, matrix in one.items():
            assert float(two[name].trace()) == pytest.approx(float(matrix.trace()), rel=0.25), name  # other draws


def every_token() -> None:
    gradients._TOKENS_AN_OUTPUT = 1000
