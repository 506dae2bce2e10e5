"""Forwards that wait in the middle of a layer, against forwards that run through, and what must end them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greenlet import getcurrent
from plain_layers import GROUPS, plain_inputs
from turns_of_a_layer import FP32, Halves, Rooms, names_of, walk_of

from deltacompress.calibration.forwards import memory, turns
from deltacompress.calibration.forwards.memory import Room
from deltacompress.calibration.forwards.turns import taking_turns
from deltacompress.devices import free_host_bytes
from deltacompress.errors import UnsupportedModelError


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (5, 24), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("architecture", GROUPS)
def test_inputs_are_those_of_the_plain_model(tiny: Callable[..., Any], architecture: str, ids: torch.Tensor) -> None:
    checkpoint = tiny(architecture)
    walk = walk_of(checkpoint, ids)
    groups = names_of(walk.skeleton, GROUPS[architecture])
    outputs = [walk.plain(k) for k in range(3)]
    walk.runs.clear()
    expected = [plain_inputs(checkpoint.model(), batch) for batch in ids.split(2)]
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        for group in groups:
            for k in range(3):
                assert torch.equal(walk.turns.inputs(k, [group[0]])[group[0]], expected[k][group[0]])
                walk.turns.rest(k)
        walk.turns.finish_all()
    assert all(torch.equal(walk.turns._stream[k], outputs[k]) for k in range(3))
    assert walk.runs == dict.fromkeys(walk.skeleton.linear_names(0), 3)  # each token passed the layer once


@pytest.mark.parametrize("places", [0, 4, 7, 1000])
def test_how_many_wait_changes_no_bit(tiny: Callable[..., Any], ids: torch.Tensor, places: int) -> None:
    """Weights change from group to group, as they do when groups are coded; what follows must be of the new ones."""
    walk = walk_of(tiny("llama"), ids, Rooms(places))
    groups = names_of(walk.skeleton, GROUPS["llama"])
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        for group in groups:
            for k in range(3):
                walk.turns.inputs(k, [group[0]])
                walk.turns.rest(k)
            now = walk.skeleton.weights(group)
            walk.skeleton.swap({name: torch.nn.Parameter(weight * 0.9, False) for name, weight in now.items()})
        walk.runs.clear()
        walk.turns.finish_all()
    assert all(torch.equal(walk.turns._stream[k], walk.plain(k)) for k in range(3))
    if places == 0:
        assert set(walk.runs.values()) == {6}  # of finish_all and of plain
    if places == 1000:
        assert walk.runs == {name: 6 if "down_proj" in name else 3 for name in walk.skeleton.linear_names(0)}


def test_several_groups_are_waited_for_at_once(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    checkpoint = tiny("llama")
    walk = walk_of(checkpoint, ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    leaders = [group[0] for group in groups]
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        found = walk.turns.inputs(0, leaders)
    expected = plain_inputs(checkpoint.model(), ids[:2])
    assert list(found) == leaders
    assert all(torch.equal(found[name], expected[name]) for name in leaders)


def test_an_error_in_a_forward_is_its_own_and_ends_those_that_wait(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    walk = walk_of(tiny("llama"), ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    forwards: list[Any] = []

    def lost(*_: Any) -> None:
        raise RuntimeError("lost device: CUDA")

    def until_it_fails() -> None:
        with taking_turns(walk.skeleton, groups, [walk.turns]):
            for k in range(3):
                walk.turns.inputs(k, [groups[1][0]])
                walk.turns.rest(k)
            forwards.extend(walk.turns._waiting.values())
            walk.skeleton.layer(0).mlp.register_forward_pre_hook(lost)
            walk.turns.inputs(1, [groups[2][0]])

    with pytest.raises(RuntimeError, match="lost device"):
        until_it_fails()
    assert len(forwards) == 3
    assert all(forward.dead for forward in forwards)
    assert not walk.turns._waiting
    assert torch.is_grad_enabled()
    assert not any(walk.skeleton.module_of(name)._forward_pre_hooks for group in groups for name in group)


def test_a_layer_that_waits_in_a_block_of_its_own_begins_anew(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    walk = walk_of(tiny("llama"), ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    mlp = walk.skeleton.layer(0).mlp
    inner = mlp.forward

    def in_a_block(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(*args)

    mlp.forward = in_a_block
    outputs = [walk.plain(k) for k in range(3)]
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        for group in groups:
            for k in range(3):
                walk.turns.inputs(k, [group[0]])
                assert not torch.is_autocast_enabled("cpu")
                walk.turns.rest(k)
            assert len(walk.turns._waiting) == (3 if "self_attn" in group[0] else 0)
        walk.turns.finish_all()
    assert all(torch.equal(walk.turns._stream[k], outputs[k]) for k in range(3))


def test_where_memory_runs_out_what_is_captured_goes_though_nothing_waits(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, held = Rooms(0), [100]
    walk = walk_of(tiny("llama"), ids, room)
    expected = [walk.plain(k) for k in range(3)]
    run_layer = walk.skeleton.run_layer

    def short(*args: Any) -> torch.Tensor:
        if held[0]:
            raise torch.OutOfMemoryError("memory")
        return run_layer(*args)

    monkeypatch.setattr(turns, "held_bytes", lambda: held[0])
    monkeypatch.setattr(room, "ran_out", lambda: held.__setitem__(0, 0))
    monkeypatch.setattr(walk.skeleton, "run_layer", short)
    with taking_turns(walk.skeleton, [], [walk.turns]):
        walk.turns.finish_all()
    assert held == [0]
    assert all(torch.equal(walk.turns._stream[k], expected[k]) for k in range(3))


def test_where_memory_runs_out_none_waits_any_more(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Rooms(1000)
    walk = walk_of(tiny("llama"), ids, room)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    expected = [walk.plain(k) for k in range(3)]
    run_layer, failures = walk.skeleton.run_layer, [0]

    def short(*args: Any) -> torch.Tensor:
        if len(walk.turns._waiting) == 2:
            failures[0] += 1
            raise torch.OutOfMemoryError("memory")
        return run_layer(*args)

    monkeypatch.setattr(walk.skeleton, "run_layer", short)
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        for group in groups[:2]:
            for k in range(3):
                walk.turns.inputs(k, [group[0]])
                walk.turns.rest(k)
        assert not walk.turns._waiting
        walk.turns.finish_all()
        monkeypatch.setattr(walk.skeleton, "run_layer", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            walk.turns.inputs(0, [groups[0][0]])
    assert failures == [1]
    assert room.closed
    assert all(torch.equal(walk.turns._stream[k], expected[k]) for k in range(3))


def test_what_a_layer_finished_stays_on_the_device_where_there_is_room(
    tiny: Callable[..., Any], ids: torch.Tensor
) -> None:
    """For one batch of three; the next layer is handed the very tensor. Without a share on the host nothing is kept."""
    for share, kept in ((1.0, 1), (0.0, 0)):
        room = Rooms(1)
        walk = walk_of(tiny("llama"), ids, room, host_share=share)
        expected = [walk.plain(k) for k in range(3)]
        with taking_turns(walk.skeleton, [], [walk.turns]):
            walk.turns.finish_all()
        assert len(walk.turns._stream._kept) == kept
        assert walk.turns._stream.keeps == walk.turns.holds == bool(kept)
        assert all(torch.equal(walk.turns._stream[k], expected[k]) for k in range(3))
        assert not walk.turns.holds


def test_where_memory_runs_out_what_is_kept_is_given_back(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a layer begins, when no forward waits yet; forwards go on waiting after the first time."""
    room = Room(torch.device("cpu"), features=1, hidden=1, tokens=1, note=lambda _note: None)
    walk = walk_of(tiny("llama"), ids, room, host_share=1.0)
    [group] = names_of(walk.skeleton, [["o_proj"]])
    with taking_turns(walk.skeleton, [], [walk.turns]):
        walk.turns.finish_all()
    expected = [walk.skeleton.run_layer(0, one, walk.calls[len(one)][0]) for one in list(walk.turns._stream)]
    for k in range(3):
        walk.turns._stream.replace(k, walk.turns._stream[k], keep=True)
    run_layer = walk.skeleton.run_layer

    def short(*args: Any) -> torch.Tensor:
        if walk.turns._stream.keeps:
            raise torch.OutOfMemoryError("memory")
        return run_layer(*args)

    monkeypatch.setattr(walk.skeleton, "run_layer", short)
    with taking_turns(walk.skeleton, [group], [walk.turns]):
        for k in range(3):
            walk.turns.inputs(k, group)
            walk.turns.rest(k)
        assert sorted(walk.turns._waiting) == [0, 1, 2]
        assert not walk.turns._stream.keeps
        walk.turns.finish_all()
    assert not room.closed
    assert all(torch.equal(walk.turns._stream[k], expected[k]) for k in range(3))


@pytest.mark.parametrize("closed", [False, True])
def test_once_memory_ran_out_no_batch_runs_before_it_is_asked_for(
    tiny: Callable[..., Any], ids: torch.Tensor, closed: bool
) -> None:
    room = Rooms(1000)
    room.closed = closed
    walk = walk_of(tiny("llama"), ids, room, precision=Halves("fp16", wider=FP32))
    groups = names_of(walk.skeleton, GROUPS["llama"])
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        walk.turns.inputs(0, [groups[0][0]])
        assert sorted(walk.turns._waiting) == ([0] if closed else [0, 1])


def test_where_memory_ran_out_less_may_wait_and_in_the_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (1_000_000_000, 2_000_000_000))
    for kind in ("reserved", "allocated"):
        monkeypatch.setattr(f"torch.cuda.memory_{kind}", lambda _device: 0)
    emptied: list[int] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(1))
    notes: list[str] = []
    room = Room(torch.device("cuda"), features=1, hidden=0, tokens=1, note=notes.append)
    given_up: list[int] = []
    monkeypatch.setattr("deltacompress.calibration.forwards.memory.give_up", lambda: given_up.append(len(emptied)))
    with room.keeping(0):
        for left, closed in ((950, False), (855, False), (769.5, False), (692.55, True)):
            assert room.free() == round(left * 1_000_000)
            assert (room.left(), room.closed) == (not closed, closed)
            room.ran_out()
    assert [note.split(":")[0] for note in notes] == ["memory ran out", "memory ran out again"]
    assert len(emptied) == 4
    assert given_up == [0, 1, 2, 3]  # before what torch keeps is given back


def test_what_a_gpu_has_is_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (700, 2000))
    for kind in ("reserved", "allocated"):
        monkeypatch.setattr(f"torch.cuda.memory_{kind}", lambda _device: 0)
    room = Room(torch.device("cuda"), features=1, hidden=0, tokens=1, note=print)
    assert room.has(700)
    assert not room.has(701)
    assert Room(torch.device("cpu"), features=1, hidden=0, tokens=1, note=print).has(1 << 60)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_batch_that_overflows_runs_again_in_wider_numbers(
    tiny: Callable[..., Any], ids: torch.Tensor, scale: float
) -> None:
    checkpoint = tiny("llama")
    walk = walk_of(checkpoint, ids, precision=Halves("fp16", wider=FP32))
    groups = names_of(walk.skeleton, GROUPS["llama"])
    [up] = [name for name in walk.skeleton.linear_names(0) if "up_proj" in name]
    walk.skeleton.swap({up: torch.nn.Parameter(walk.skeleton.weights([up])[up] * scale, False)})
    expected = [walk.plain(k) for k in range(3)]
    rounded = []
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        for group in groups:
            for k in range(3):
                found = walk.turns.inputs(k, [group[0]])[group[0]]
                assert torch.isfinite(found).all()
                rounded.append(torch.equal(found, found.half().float()))
                walk.turns.rest(k)
        walk.turns.finish_all()
    overflows = scale > 1
    assert rounded == [True] * 9 + [not overflows] * 3
    assert (walk.turns.precision == FP32) == overflows
    assert walk.turns.wide_from == (0 if overflows else -1)
    close = [torch.allclose(walk.turns._stream[k], expected[k], rtol=1e-2, atol=1e-2 * scale) for k in range(3)]
    assert all(close)


def test_an_output_that_overflows_is_made_again_too(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    walk = walk_of(tiny("llama"), ids, precision=Halves("fp16", wider=FP32))
    expected = walk.plain(0)

    def overflow(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("inf") if walk.turns.precision.wider else output

    walk.skeleton.layer(0).register_forward_hook(overflow)
    with taking_turns(walk.skeleton, [], [walk.turns]):
        walk.turns.finish(0)
        walk.turns.settle()
    assert torch.equal(walk.turns._stream[0], expected)


@pytest.mark.parametrize("where", ["inputs", "output"])
def test_what_ran_ahead_of_an_overflow_runs_again(tiny: Callable[..., Any], ids: torch.Tensor, where: str) -> None:
    """The second of three batches overflows: it and the third are wide, and the first stays as it is."""
    walk = walk_of(tiny("llama"), ids, precision=Halves("fp16", wider=FP32))
    groups = names_of(walk.skeleton, GROUPS["llama"])
    layer, narrow = walk.skeleton.layer(0), []

    def begin(_module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        current: Any = getcurrent()
        current.k = next(k for k, one in enumerate(walk.batches) if torch.equal(one, hidden))

    def overflow(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        current: Any = getcurrent()
        narrow.append((current.k, walk.turns.precision.wider is not None))
        return output * float("inf") if narrow[-1] == (1, True) else output

    expected = [walk.plain(k) for k in range(3)]
    layer.register_forward_pre_hook(begin, with_kwargs=True)
    (layer.mlp.up_proj if where == "inputs" else layer).register_forward_hook(overflow)
    found = {}
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        for k in range(3):
            found[k] = walk.turns.inputs(k, [groups[-1][0]])[groups[-1][0]]
            walk.turns.finish(k)
        walk.turns.settle()
    assert narrow == [(0, True), (1, True), (2, True), (1, False), (2, False)]
    assert walk.turns.wide_from == 1
    assert torch.equal(found[0], found[0].half().float())
    assert [torch.equal(walk.turns._stream[k], expected[k]) for k in range(3)] == [False, True, True]


def test_inputs_that_ran_ahead_are_those_that_were_wanted(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    walk = walk_of(tiny("llama"), ids, precision=Halves("fp16", wider=FP32))
    plain = walk_of(tiny("llama"), ids, precision=Halves("fp16"))
    groups = names_of(walk.skeleton, GROUPS["llama"])
    for one in (walk, plain):
        with taking_turns(one.skeleton, groups, [one.turns]):
            one.turns.inputs(0, [groups[0][0]])
            one.found = one.turns.inputs(1, [groups[1][0]])
    assert list(walk.found) == [groups[1][0]]
    assert torch.equal(walk.found[groups[1][0]], plain.found[groups[1][0]])


def test_rotary_tables_are_rounded_as_the_inputs(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = walk_of(tiny("llama"), ids, precision=Halves("fp16"))
    seen: list[torch.dtype] = []

    def look(_i: int, hidden: torch.Tensor, call: Any) -> torch.Tensor:
        seen.extend(table.dtype for table in call.kwargs["position_embeddings"])
        return hidden

    monkeypatch.setattr(walk.skeleton, "run_layer", look)
    walk.turns.finish(0)
    walk.turns.precision = FP32
    walk.turns.finish(0)
    assert seen == [torch.float16] * 2 + [torch.float32] * 2


def test_a_linear_that_runs_twice_or_never_or_on_another_input_is_refused(
    tiny: Callable[..., Any], ids: torch.Tensor
) -> None:
    walk = walk_of(tiny("llama"), ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    q, k, o = groups[0][0], groups[0][1], groups[1][0]
    attention = walk.skeleton.layer(0).self_attn
    with taking_turns(walk.skeleton, [[q, o]], [walk.turns]), pytest.raises(UnsupportedModelError, match="share"):
        walk.turns.finish(0)
    inner = attention.q_proj.forward
    attention.q_proj.forward = lambda x: attention.k_proj(x).repeat(1, 1, len(inner(x)[0, 0]) // len(x[0, 0]) * 2)
    with taking_turns(walk.skeleton, [[k]], [walk.turns]), pytest.raises(UnsupportedModelError, match="than once"):
        walk.turns.finish(0)
    attention.forward = lambda **_: (walk.batches[0], None)
    with taking_turns(walk.skeleton, [[o]], [walk.turns]), pytest.raises(UnsupportedModelError, match="did not run"):
        walk.turns.inputs(0, [o])


def test_the_room_is_what_is_free_less_what_the_walk_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: 0.95 GB of 1 GB, less five matrices of 1,000 x 1,000 in f32."""
    taken = [0]
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (1_000_000_000, 2_000_000_000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: taken[0])
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _device: taken[0])
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    notes: list[str] = []
    room = Room(torch.device("cuda"), features=1000, hidden=500, tokens=100, note=notes.append)
    taken[0] = 950_000_000 - 20_000_000
    assert room.left()
    taken[0] += 1
    assert not room.left()
    taken[0] -= 1_000_000
    monkeypatch.setattr("deltacompress.calibration.forwards.memory.held_bytes", lambda: 1_000_000)
    assert not room.left()  # torch has that for captures, and counts it as free
    assert room.has(1_000_000_000 - 1_000_000)
    assert not room.has(1_000_000_000 - 1_000_000 + 1)
    monkeypatch.setattr("deltacompress.calibration.forwards.memory.held_bytes", lambda: 0)
    assert room.left()
    taken[0] = 0
    wide = Room(torch.device("cuda"), features=1000, hidden=500, tokens=10_000, note=notes.append)
    taken[0] = 950_000_000 - 260_000_000 + 1
    assert not wide.left()
    with wide.keeping(200_000_000):
        assert wide.free() == 60_000_000 - 1
        taken[0] = 750_000_000 + 1
        assert not wide.left()
    assert wide.free() == -60_000_001


def test_on_a_cpu_half_of_what_is_free_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1_000_000_000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory)
    room = Room(torch.device("cpu"), features=1000, hidden=500, tokens=100, note=print)
    Memory.available = 520_000_000
    assert room.left()
    Memory.available -= 1
    assert not room.left()
    with room.keeping(19_000_000):
        assert room.free() == 999_999


def test_a_container_has_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """600 of 1000 MB are used, 100 of them by files that were read: 500 can be had of the machine's 2000."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 2_000_000_000}))
    monkeypatch.setattr("deltacompress.devices._CGROUP", tmp_path)
    assert free_host_bytes() == 2_000_000_000
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("600000000\n")
    (tmp_path / "memory.stat").write_text("anon 500000000\ninactive_file 100000000\n")
    assert free_host_bytes() == 500_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes() == 2_000_000_000


def test_the_first_wide_batch_is_that_again(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    walk = walk_of(tiny("llama"), ids, precision=Halves("fp16", wider=FP32))
    assert walk.turns.wide_from == -1
    walk.turns.wide_from = 1
    seen = []
    for k in range(3):
        walk.turns.finish(k)
        seen.append(walk.turns.precision.inputs)
    walk.turns.settle()
    assert seen == ["fp16", "fp32", "fp32"]
    assert walk.turns.wide_from == 1


def test_gaps_ofhost_bytes_are_given_back_where_the_process_outgrows_what_it_needed(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes in MiB: what it has, and what is left of that where gaps are given back."""
    now, left, trims = [500], [300], []

    def trim(pad: int) -> None:
        trims.append(pad)
        now[0] = left[0]

    monkeypatch.setattr(memory, "_resident", lambda: now[0] << 20)
    monkeypatch.setattr(memory, "_malloc_trim", lambda: trim)
    walk = walk_of(tiny("llama"), ids, Room(torch.device("cpu"), features=32, hidden=16, tokens=48, note=print))
    [group] = names_of(walk.skeleton, [["o_proj"]])
    found = []
    with taking_turns(walk.skeleton, [group], [walk.turns]):
        for has, needs in ((500, 300), (332, 0), (333, 200), (332, 0), (333, 320), (352, 0), (353, 350), (382, 0)):
            now[0], left[0] = has, needs
            walk.turns.inputs(0, group)
            walk.turns.rest(0)
            walk.turns.begin_anew(0)
            found.append(now[0])
    assert found == [300, 332, 200, 332, 320, 352, 350, 382]
    assert trims == [0] * 4
    walk.turns._room.device = torch.device("cuda")
    now[0] = 1000
    walk.turns._room.tidy()
    walk.turns._room.device = torch.device("cpu")
    monkeypatch.setattr(memory, "_malloc_trim", lambda: None)  # a system without it
    walk.turns._room.tidy()
    assert now == [1000]
