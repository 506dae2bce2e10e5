"""What stays free while a stage is at work: sums and solver of each set of linears, forwards to the next stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pairs import Pair

from deltacompress.calibration.forwards.memory import Room
from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.codecs.settings import ObsSettings
from deltacompress.compression.layerwise import layer, needs
from deltacompress.compression.layerwise.needs import Needs, make_room

Q, O, GATE, DOWN = ["q", "k"], ["o"], ["gate", "up"], ["down"]  # noqa: E741


@dataclass(frozen=True)
class Shape:
    outputs: int
    inputs: int
    needs_fisher: bool = False
    by_outputs: bool = False
    settings: ObsSettings | None = None


CPU = torch.device("cpu")
SHAPES: Any = {"q": Shape(8, 10), "k": Shape(4, 10), "o": Shape(10, 8)}
SHAPES |= {"gate": Shape(30, 10), "up": Shape(30, 10), "down": Shape(10, 30)}


def solver(inputs: int, rows: int) -> int:
    """Three squares, and ten matrices as the linears."""
    return 4 * (3 * inputs**2 + 10 * inputs * rows)


def sums(inputs: int) -> int:
    return 2 * 4 * inputs**2


def forwards(inputs: int, tokens: int, hidden: int = 10) -> int:
    """On a CPU."""
    return 4 * (9 * hidden + 6 * inputs) * tokens


@pytest.mark.parametrize(
    ("stage", "following", "tokens", "wanted"),
    [
        ([Q], [O], 1, solver(10, 12)),
        ([DOWN], [], 1, solver(30, 10)),
        ([DOWN], [], 1000, forwards(30, 1000)),
        ([O], [GATE], 1000, sums(10) + forwards(10, 1000)),
        ([GATE], [DOWN], 1000, sums(30) + forwards(30, 1000)),
        ([GATE], [DOWN, O], 1, solver(10, 60)),
        ([O], [DOWN, O, DOWN], 2, sums(30) + sums(8) + sums(30) + forwards(30, 2)),
    ],
)
def test_the_most_that_is_needed_at_once(
    stage: list[list[str]], following: list[list[str]], tokens: int, wanted: int
) -> None:
    assert Needs(SHAPES, {}, tokens, 10, CPU).beside(stage, following) == wanted


def test_a_gpu_makes_sixteen_bits_of_what_linears_receive() -> None:
    assert Needs(SHAPES, {}, 100, 10, torch.device("cuda")).of_forwards([DOWN]) == 4 * (9 * 10 + 2 * 30) * 100


def test_experts_are_solved_one_by_one_and_have_sums_each() -> None:
    class Two:
        expert_of = {"gate": 0, "up": 1}  # noqa: RUF012

    needs = Needs(SHAPES, {"gate": cast("Any", Two), "up": cast("Any", Two)}, 1000, 10, CPU)
    assert needs.of_solver([GATE]) == solver(10, 30)
    assert needs.of_sums([GATE, DOWN]) == sums(10) + sums(30)
    assert needs.of_sums([GATE, DOWN], 5) == 5 * sums(10) + sums(30)
    assert needs.of_forwards([Q, GATE, DOWN]) == forwards(30, 1000)


def test_what_is_summed_up_by_outputs_takes_their_rows() -> None:
    """Of a linear that is alone; of two that share an input, or of experts, all is as ever."""
    shapes = SHAPES | {name: replace(SHAPES[name], by_outputs=True) for name in ("down", "gate", "up")}
    assert Needs(shapes, {}, 1, 10, CPU).of_sums([DOWN, GATE]) == 4 * 30 * (30 + 10) + sums(10)
    gpu = Needs(shapes, {}, 1, 10, torch.device("cuda"))  # has the weight in bfloat16 besides
    assert gpu.of_sums([DOWN]) == 4 * 30 * (30 + 10) + 2 * 30 * 10
    experts = {"down": cast("Any", object())}
    assert Needs(shapes, experts, 1, 10, CPU).of_sums([DOWN], 2) == 2 * sums(30)


def test_what_recipes_take_besides() -> None:
    """Outputs that weigh: six squares of the widest linear; signs by lot: a scale for each weight; settings that
    differ: sums of its own for each.
    """

    def of(**changes: Any) -> int:
        return Needs(SHAPES | {"q": replace(SHAPES["q"], **changes)}, {}, 1, 10, CPU).of_solver([Q])

    assert of(needs_fisher=True) == solver(10, 12) + 4 * 6 * 8**2
    assert of(settings=ObsSettings(codec="obs", bits=2)) == solver(10, 12) + sums(10)
    drawn = ObsSettings(codec="obs", bits=1, grid="midrise", sparsity="drawn:3:8")
    found = Needs({"q": replace(SHAPES["q"], settings=drawn)}, {}, 1, 10, CPU).of_solver([["q"]])
    assert found == 4 * (3 * 10**2 + 14 * 10 * 8)


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([True], []),
        ([False, True], ["captured"]),
        ([False, False, True], ["captured", "captures"]),
        ([False] * 3 + [True], ["captured", "captures", "kept", "kept"]),
        ([False] * 4, ["captured", "captures", "kept", "kept", "waiting", "waiting"]),
    ],
)
def test_what_waits_is_given_back_where_there_is_too_little(
    answers: list[bool], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(needs, "forget", lambda: done.append("captured"))
    monkeypatch.setattr(needs, "give_up", lambda: done.append("captures"))
    monkeypatch.setattr(LayerTurns, "forget_kept", lambda _turns: done.append("kept"))
    monkeypatch.setattr(LayerTurns, "begin_all_anew", lambda _turns: done.append("waiting"))
    monkeypatch.setattr(Room, "has", lambda _room, nbytes: nbytes == 700 and answers.pop(0))
    make_room([cast("Any", None)] * 2, Room(CPU, features=1, hidden=1, tokens=1, note=print), 700)
    assert done == wanted
    assert not answers


def test_each_stage_keeps_its_own(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free while a group is solved is what is free otherwise, but for what the two keep."""
    free = 1 << 40
    monkeypatch.setattr("deltacompress.calibration.forwards.memory.free_host_bytes", lambda: free)
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 16})
    seen = []
    encode = layer.encode

    def see(walk: Any, group: Any, *given: Any) -> Any:
        seen.append(((free >> 1) - walk.room.free(), [name.split(".")[-2] for name in group]))
        return encode(walk, group, *given)

    monkeypatch.setattr(layer, "encode", see)
    rooms: list[Room] = []
    original = Room.__init__
    monkeypatch.setattr(
        Room, "__init__", lambda room, *args, **given: rooms.append(room) or original(room, *args, **given)
    )
    make_pair("llama").compress(tmp_path / "out", recipe="int4-24")
    hidden, kv, mlp, tokens = 32, 16, 48, 16
    attention, after = (sums(width) + forwards(width, tokens, hidden) for width in (hidden, mlp))
    assert seen[:4] == [
        (max(solver(hidden, hidden + 2 * kv), attention), ["q_proj", "k_proj", "v_proj"]),
        (max(solver(hidden, hidden), attention), ["o_proj"]),
        (max(solver(hidden, 2 * mlp), after), ["gate_proj", "up_proj"]),
        (max(solver(mlp, hidden), forwards(mlp, tokens, hidden)), ["down_proj"]),
    ]
    assert (free >> 1) - rooms[-1].free() == max(sums(mlp) + solver(mlp, 0), forwards(mlp, tokens, hidden))


def test_what_a_solver_let_go_is_given_back_before_the_next_forwards(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    encode, collect = layer.encode, layer.collect
    monkeypatch.setattr(layer, "encode", lambda *given: done.append("solved") or encode(*given))
    monkeypatch.setattr(layer, "collect", lambda *given, **named: done.append("runs") or collect(*given, **named))
    monkeypatch.setattr(Room, "tidy", lambda _room: done.append("tidied"))
    make_pair("llama").compress(tmp_path / "out", recipe="int4-24")
    after = [following for one, following in pairwise(done) if one == "solved"]
    assert after == ["tidied"] * done.count("runs") != []
