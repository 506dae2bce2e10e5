"""One captured step for each shape of a batch, whoever is in it; on a CPU, what a graph would do is done again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_calls import alone, drain, engine
from runtime.graphed import Again, as_on_a_gpu, runtime_of
from runtime_cases import lora, random_ids

from deltacompress.errors import BackendError, InternalError
from deltacompress.kernels.adapters.select import ReferenceAdapters
from deltacompress.runtime.batch import FixedBatch
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import Engine
from deltacompress.runtime.engine.steps import graphs, pieces, prompts
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.graphs import Graphs, Shape, bucket, run_limit
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.modules.linear import DecoupledLinear
from deltacompress.runtime.modules.vectors import VectorBank
from deltacompress.runtime.operands.low_rank import LowRank, LowRankProduct
from deltacompress.runtime.operands.operand import Vector
from deltacompress.runtime.operands.product import Site
from deltacompress.runtime.parallel.others import ALONE, Others
from deltacompress.runtime.parallel.plan import Plan, Way
from deltacompress.runtime.parallel.ranks.rank import _KeysAndValues

LONG = Sampling(ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture
def graphed() -> Iterator[None]:
    """Forwards are captured, in a way."""
    with as_on_a_gpu():
        yield


def graphs_of(running: Engine) -> Graphs:
    found = running._scheduler.graphs
    assert found is not None
    return found


@pytest.mark.usefixtures("graphed")
def test_graphs_outlive_arrivals_departures_loads_and_evictions(fleet: tuple[Path, dict[str, Path]]) -> None:
    runtime, plain = runtime_of(fleet), runtime_of(fleet, cuda_graphs=False)
    running, log = engine(runtime, max_batch=5, step_tokens=16)
    names = [None, *"abcdeedcba", None, *"aacceebbdd"] * 2
    asked = [Call(str(i), name, tuple(random_ids(3 + i % 17, i)), 4 + i % 9, LONG) for i, name in enumerate(names)]
    for call in asked:
        running.submit(call)
        running.step()
    drain(running)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(plain, call)
    found = graphs_of(running)
    assert found.replays > 2 * found.plain > 0
    assert found.captured == 7 < len(asked)  # shapes, formats, and vectors that came to lie elsewhere
    assert runtime.residency().loads > 8


@pytest.mark.usefixtures("graphed")
def test_logits_are_used_before_the_next_replay(
    fleet: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are launched before the tokens of the one before are known, and prompts come beside them."""
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    monkeypatch.setattr("deltacompress.runtime.engine.scheduler.computes_beside", lambda _: True)
    real, last = Again.replay, list[torch.Tensor]()

    def replay(self: Again, inputs: torch.Tensor) -> torch.Tensor:
        for logits in last:
            logits.fill_(torch.nan)
        last[:] = [real(self, inputs)]
        return last[0]

    monkeypatch.setattr(Again, "replay", replay)
    running, log = engine(runtime, max_batch=5, step_tokens=16)
    graphs_of(running).at_once = True
    draw, step, ahead = random.Random(0), Decoder.step, list[bool]()

    def noted(self: Decoder, chosen: torch.Tensor | None = None) -> torch.Tensor:
        ahead.append(chosen is not None)
        return step(self, chosen)

    monkeypatch.setattr(Decoder, "step", noted)
    asked = []
    for i in range(12):
        wish = replace(LONG, temperature=draw.choice([0, 1.0]), seed=5, logprobs=draw.choice([None, 2]))
        asked.append(Call(str(i), "abcde"[i % 5], tuple(random_ids(3 + 5 * i % 37, i)), 9 + i % 9, wish))
    for call in asked:
        running.submit(call)
        for _ in range(draw.choice([1, 4, 9])):
            running.step()
    drain(running)
    assert ahead.count(True) > 20
    monkeypatch.undo()
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(plain, call)


@pytest.mark.usefixtures("graphed")
def test_kinds_that_take_turns_are_captured_once(fleet: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    """Packed in two formats and adapters, five of them in three slots: whoever comes back is served as it is."""
    names = [None, "a", "b", "a", "c", "lora4", "b", None, "lora40", "c", "a", "lora4"]
    runtimes = [runtime_of(fleet, slots=3, cuda_graphs=cuda_graphs) for cuda_graphs in (False, True)]
    for rank in (4, 40):
        folder = lora(tmp_path / str(rank), fleet[0], rank, rank)
        for runtime in runtimes:
            runtime.load(folder, f"lora{rank}")
    plain, runtime = runtimes
    running, log = engine(runtime, max_batch=6, step_tokens=24)
    captured = []
    for turn in range(4):
        for i, name in enumerate(names):
            running.submit(Call(f"{turn} {i}", name, tuple(random_ids(3 + 5 * i % 60, i)), 5 + i % 11, LONG))
            running.step()
        drain(running)
        captured.append(graphs_of(running).captured)
    for i, name in enumerate(names):
        expected = alone(plain, Call("", name, tuple(random_ids(3 + 5 * i % 60, i)), 5 + i % 11, LONG))[0]
        assert [log.tokens(f"{turn} {i}") for turn in range(4)] == [expected] * 4
    assert captured == [4, 9, 9, 13]  # by shapes, and some of them again, when adapters came


@pytest.mark.usefixtures("graphed")
def test_what_a_slot_needs_is_known_when_tables_move(fleet: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    """For adapters of more ranks than these had, while variants come and go."""
    runtime, found = runtime_of(fleet, slots=9), set()

    def look() -> None:
        model = runtime.model
        slots = [0, *(one.slot for one in runtime.variants.values() if one.slot is not None)]
        each = {slot: model._found_kind(slot) for slot in slots}
        assert {slot: model.traits([slot]) for slot in slots} == each
        assert model.traits(slots) == frozenset(one for kind in each.values() for one in kind or ())

    look()
    for rank in (4, 40, 200, 300):
        runtime.load(lora(tmp_path / str(rank), fleet[0], rank, rank), f"lora{rank}")
        runtime.cache.acquire([f"lora{rank}"])
        look()
        found.add(runtime.model.traits([runtime.variants["lora4"].slot or 0]))
    assert len(found) == 4  # of 16 ranks, of 64, of 256, of 512
    for name in ("b", "lora4", "c"):
        if name == "lora4":
            runtime.cache.release([name])
        runtime.unload(name)
        look()


@pytest.mark.usefixtures("graphed")
def test_the_same_shapes_are_captured_once(fleet: tuple[Path, dict[str, Path]]) -> None:
    running, _ = engine(runtime_of(fleet, slots=5), max_batch=8)
    captured = []
    for number in range(8):
        for name in "abcde":
            running.submit(Call(f"{name} {number}", name, tuple(random_ids(5, number)), 12, LONG))
        drain(running)
        captured.append(graphs_of(running).captured)
    assert captured[4:] == [3] * 4  # of rows, of one prompt, and of four; with one format, and with both


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("fleet", ["llama", "qwen2"], indirect=True)  # the second has biases
def test_short_prompts_share_a_captured_piece(
    fleet: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base and of variants, of like length: four and three of up to 16 tokens, two of up to 32, a longer one."""
    for module in (pieces, prompts):
        monkeypatch.setattr(module, "SMALLEST", 16)
        monkeypatch.setattr(module, "TOGETHER", 64)
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = engine(runtime, max_batch=16)
    running.warm()
    found = graphs_of(running)
    shapes, before, plainly = {*found.by_shape}, found.replays, found.plain
    lengths = {None: (3, 16), "a": (7, 20, 10), "b": (9, 40), "c": (11, 30), "d": (5,)}
    asked = [
        Call(f"{name} {size}", name, tuple(random_ids(size, size)), 1, LONG)
        for name, sizes in lengths.items()
        for size in sizes
    ]
    scored = Call("scored", "e", (5, 6, 7), 1, replace(LONG, prompt_logprobs=0))
    for call in (*asked, scored):
        running.submit(call)
    drain(running)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(plain, call)
    assert found.replays - before == 4
    assert found.plain == plainly
    assert {*found.by_shape} == shapes


@pytest.mark.usefixtures("graphed")
def test_what_the_host_decides_on_runs_plainly(fleet: tuple[Path, dict[str, Path]]) -> None:
    """A vocabulary that grew, say; the others' steps are captured again when it is gone."""
    runtime = runtime_of(fleet, slots=5)
    slot = runtime.variants["b"].slot
    linear = next(one for one in runtime.model.model.modules() if isinstance(one, DecoupledLinear))
    product = next(iter(linear._products.values()))
    running, _ = engine(runtime, max_batch=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(product), "traits", lambda self, of: None if of == slot else {type(self)})
        for name in "ab":
            running.submit(Call(name, name, (5,) * 24, 12 if name == "b" else 24, LONG))
        drain(running)
    found = graphs_of(running)
    assert (found.plain, found.replays) == (2 + 11 + 3, 9)  # their prompts, too


@pytest.mark.usefixtures("graphed")
def test_prompts_are_captured_before_there_are_any(fleet: tuple[Path, dict[str, Path]]) -> None:
    runtime = runtime_of(fleet, slots=5)
    running, log = engine(runtime, max_batch=4)
    running.warm()
    found = graphs_of(running)
    of_prompts = {shape for shape in found.by_shape if shape.tokens > 1}
    assert {(shape.tokens, shape.variants) for shape in of_prompts} >= {(64, False), (64, True)}
    plain, pages = found.plain, running._scheduler.pages.version
    assert all(one.users == 0 for one in runtime.variants.values())
    asked = [Call(str(i), name, tuple(random_ids(9 + i, i)), 1, LONG) for i, name in enumerate([None, *"abcde"])]
    for call in asked:  # of both formats; with a first token they end
        running.submit(call)
        drain(running)
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime_of(fleet, cuda_graphs=False), call)
    assert (found.plain, {*found.by_shape}, running._scheduler.pages.version) == (plain, of_prompts, pages)


@pytest.mark.usefixtures("graphed")
def test_steps_are_captured_before_there_are_any(fleet: tuple[Path, dict[str, Path]]) -> None:
    runtime = runtime_of(fleet, slots=5)
    running, _ = engine(runtime, max_batch=20)
    decoder, found = running._scheduler.decoder, graphs_of(running)
    found.at_once = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.model, "paged", True)
        patch.setattr(Decoder, "forward_step", lambda self, batch, inputs, width: torch.zeros(len(inputs) // 3, 1))
        for slot in (0, runtime.variants["c"].slot):
            decoder.warm(slot, 20, 1000)
    widths = {shape.pages for shape in found.by_shape}
    assert widths == {decoder._table.shape[1]}
    shapes = {(shape.rows, shape.run, shape.variants) for shape in found.by_shape}
    base = {(rows, 1, False) for rows in (1, 2, 4, 8, 16, 32)}
    few = {(rows, run) for rows in (1, 2, 4, 8, 16, 32) for run in {1, min(8, rows), rows}}
    sizes = (64, 128, 192, 256, 384, 512, 640)  # of 2 to 531 tokens
    joined = {(rows, min(rows, 128), False) for rows in sizes}
    all_of_one = {(rows, run, True) for rows in sizes for run in (min(rows, 128), rows)}
    assert shapes == base | {(rows, run, True) for rows, run in few} | joined | all_of_one


@pytest.mark.usefixtures("graphed")
def test_an_engine_that_has_no_memory_to_warm_up_serves(fleet: tuple[Path, dict[str, Path]]) -> None:
    runtime = runtime_of(fleet, slots=5)
    running, log = engine(runtime)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "warm", Mock(side_effect=BackendError("no memory to capture a forward")))
        with pytest.raises(BackendError, match="no memory to capture"):
            running.warm()
    assert not graphs_of(running).by_shape
    assert (running._scheduler.pages.count, runtime.variants["a"].users) == (1, 0)
    call = Call("a", "a", (5, 6, 7), 4, LONG)
    running.submit(call)
    drain(running)
    assert log.tokens("a") == alone(runtime_of(fleet, cuda_graphs=False), call)[0]
    assert not graphs_of(running).at_once


@pytest.mark.usefixtures("graphed")
def test_another_rank_forgets_what_the_first_forgets(
    fleet: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps over a table that has become too narrow: from 2 pages of a row to 8 and more."""
    monkeypatch.setattr("deltacompress.runtime.engine.steps.decoder._WIDTH", 2)
    runtime, plans = runtime_of(fleet), list[Plan]()
    told = Others()
    monkeypatch.setattr(told, "forward", lambda plan: (plans.append(plan()), nullcontext())[1])
    monkeypatch.setattr(runtime.model, "others", told)
    running, _ = engine(runtime, max_batch=4, step_tokens=16)
    other = _KeysAndValues(runtime.model)
    widths = set()
    for number, name in enumerate((None, "a", "b")):
        running.submit(Call(str(number), name, tuple(random_ids(9 + number, number)), 90 - 20 * number, LONG))
    while running.step():
        with torch.inference_mode():
            for plan in plans:
                other.forward(plan, plan.pages[1], torch.tensor(plan.inputs))
        plans.clear()
        if other._graphs is not None:
            assert {*other._graphs.by_shape} == {*graphs_of(running).by_shape}
            widths |= {shape.pages for shape in other._graphs.by_shape if shape.tokens == 1}
    assert len(widths) > 2
    assert len({shape.pages for shape in graphs_of(running).by_shape if shape.tokens == 1}) < len(widths)


def test_without_graphs_there_is_nothing_to_warm(fleet: tuple[Path, dict[str, Path]]) -> None:
    running, _ = engine(runtime_of(fleet, cuda_graphs=False))
    running.warm()
    assert running._scheduler.pages.count == 1


class Kinds:
    """A model of which slots bring these traits."""

    others = ALONE

    def __init__(self, **traits: set[str] | None) -> None:
        self.of = {int(slot[1:]): found for slot, found in traits.items()}
        self.installed = {*self.of}

    def launched(self, slots: Iterable[int]) -> frozenset[str]:
        return self.traits(slots) or frozenset()

    def traits(self, slots: Iterable[int]) -> frozenset[str] | None:
        found = [self.of[slot] for slot in slots if slot]
        return None if None in found else frozenset(one for each in found for one in each or ())


def test_when_forwards_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(graphs, "GraphedStep", Again)
    pages = Pages(4)
    made = Graphs(Kinds(s1={"two bits"}, s2={"four bits"}, s3={"two bits"}, s4=None), pages)  # type: ignore[arg-type]
    one, other = Shape(2, 1, 1, 8, True), Shape(4, 1, 1, 8, True)

    def run(shape: Shape, *slots: int) -> tuple[int, ...] | None:
        """The slots that a forward was captured over, if there was one."""
        inputs = torch.tensor([7, 8])

        def step(batch: FixedBatch, given: torch.Tensor) -> torch.Tensor:
            return given + len(batch.active())

        found = made.run(shape, slots, lambda: inputs, step, lambda way: pytest.fail(f"nobody else is told {way}"))
        if found is None:
            return None
        assert made.last is made.by_shape[shape]
        batch = made.by_shape[shape].batch
        assert batch.index.tolist() == [*slots, *[0] * (shape.rows - len(slots))]
        assert found.tolist() == [7 + len(batch.active()), 8 + len(batch.active())]
        return tuple(sorted(made.by_shape[shape].serves))  # type: ignore[attr-defined]

    assert [run(one, 1), run(one, 1, 3), run(other, 1), run(one, 1)] == [None] * 4
    assert [run(one, 1), run(one, 3), run(one, 0, 3)] == [(0, 1)] * 3  # what is of one kind needs one
    assert made.captured == 1
    assert run(one, 2) == run(one, 1, 3) == run(one, 1, 2) == (0, 2, 3)  # and serves what it served before
    assert made.captured == 2
    assert run(one, 1, 4) is None
    assert run(one, 4) is None
    assert (made.plain, made.replays) == (6, 6)
    assert [run(other, 3), run(other, 3), run(other, 3)] == [None, None, (0, 3)]
    pages.take(5)
    assert [run(one, 1) for _ in range(4)] == [None, None, None, (0, 1)]  # pages lie elsewhere
    assert [*made.by_shape] == [one]
    assert made.captured == 4


def test_memory_that_no_graph_holds_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ends the process's captures in it with an assertion."""
    handles = itertools.count()
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: next(handles))
    taken, fails = list[int](), [False]

    class Captured(Again):
        def __init__(self, step: Any, inputs: Any, pool: Any, *args: Any) -> None:
            taken.append(pool)
            if fails[0]:
                raise torch.OutOfMemoryError("none left")
            super().__init__(step, inputs, pool, *args)

    monkeypatch.setattr(graphs, "GraphedStep", Captured)
    pages = Pages(4)
    made = Graphs(Kinds(s1={"two bits"}), pages)  # type: ignore[arg-type]
    step, more, prompt = Shape(2, 1, 1, 8, True), Shape(4, 1, 1, 8, True), Shape(1, 2, 64, 8, True)

    def capture(shape: Shape) -> None:
        keep = [0] if shape is prompt else []
        made.forward(shape, Way.CAPTURED, [1], torch.tensor([7, 8]), lambda _, given: given, keep)

    capture(step)
    capture(more)
    made.forget_steps()  # and no graph is left
    capture(step)
    capture(prompt)
    made.forget_steps()  # that of a prompt is
    capture(step)
    made.clear()
    fails[0] = True
    with pytest.raises(BackendError, match="no memory to capture a forward"):
        capture(step)
    fails[0] = False
    capture(step)
    assert taken == [0, 0, 1, 1, 1, 2, 3]


def test_shapes() -> None:
    assert [bucket(rows) for rows in (1, 2, 3, 8, 9, 16, 17, 32, 33, 100)] == [1, 2, 4, 8, 16, 16, 32, 32, 48, 112]
    assert [run_limit(rows, 64) for rows in (1, 2, 8, 9, 33, 64)] == [1, 8, 8, 64, 64, 64]
    assert [run_limit(rows, 160) for rows in (8, 9, 128, 129, 150)] == [8, 128, 128, 144, 160]


def test_vectors_stay_in_place_until_a_higher_slot_has_one() -> None:
    base = torch.arange(3.0)
    bank, batch = VectorBank(base), FixedBatch(4, 1, [0, 1, 2], CPU)
    assert bank.traits(1) == set()
    bank.set(1, Vector({"vector": base + 1}))
    batch.take([0, 1, 2])
    [before] = bank.traits(1) or ()
    vectors = bank.stacked(batch)
    assert bank.shaped(batch, 2).tolist() == [[0, 1, 2], [1, 2, 3], [0, 1, 2], [0, 1, 2]]
    bank.set(1, Vector({"vector": base + 5}))
    assert bank.stacked(batch) is vectors
    assert bank.shaped(batch, 2)[1].tolist() == [5, 6, 7]
    bank.set(1, None)
    assert torch.equal(vectors, base.expand_as(vectors))
    bank.set(1, Vector({"vector": base + 1}))
    bank.set(9, Vector({"vector": base + 9}))
    assert torch.equal(vectors, base.expand_as(vectors))  # for graphs that still read it
    assert bank.traits(1) == bank.traits(9) != {before}
    batch = FixedBatch(4, 1, [0, 1, 9], CPU)
    batch.take([1, 2, 9])
    assert bank.shaped(batch, 2)[:, 0].tolist() == [1, 0, 9, 0]
    assert VectorBank(base).stacked(batch).tolist() == [[0, 1, 2]]


def test_when_vectors_move_does_not_depend_on_who_reads_them() -> None:
    """So that ranks agree, of which one looks for graphs and the other captures what it is told to."""
    read, unread = VectorBank(torch.zeros(3)), VectorBank(torch.zeros(3))
    batch, found = FixedBatch(2, 1, [0, 1, 4], CPU), []
    for slot, value in ((1, 1), (4, 4), (4, None), (4, 5), (2, 2)):
        for bank in (read, unread):
            bank.set(slot, None if value is None else Vector({"vector": torch.full((3,), float(value))}))
        found.append(read.traits(1))
    assert found[1:] == [found[-1]] * 4
    assert read.stacked(batch).tolist() == unread.stacked(batch).tolist()
    assert read.stacked(batch)[:6, 0].tolist() == [0, 1, 2, 0, 5, 0]


def test_a_rank_whose_graphs_serve_something_else_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(graphs, "GraphedStep", Again)
    made = Graphs(Kinds(s1={"two bits"}, s2={"four bits"}), Pages(4))  # type: ignore[arg-type]
    shape, inputs = Shape(2, 1, 1, 8, True), torch.tensor([7, 8])
    made.forward(shape, Way.CAPTURED, [1], inputs, lambda _, given: given)
    made.forward(shape, Way.REPLAYED, [1], inputs, lambda _, given: given)
    with pytest.raises(InternalError, match="a rank's graphs are not those of the first one"):
        made.forward(shape, Way.REPLAYED, [2], inputs, lambda _, given: given)


def test_tables_of_low_rank_that_were_left_serve_nobody() -> None:
    product = LowRankProduct(Site(4, 3, None, ReferenceAdapters(CPU, "a test")))
    small, large = (LowRank({"a": torch.ones(r, 4), "b": torch.ones(3, r)}) for r in (2, 200))
    product.set(1, small)
    [before] = product.traits(1) or ()
    product.set(2, large)
    assert product.traits(1) == product.traits(2) != {before}
    assert before.records.count_nonzero() == 0  # type: ignore[attr-defined]
    assert before in product._left  # whatever else a graph was captured for, it may read this one
    product.set(3, replace(small, tensors=small.tensors | {"bias": torch.ones(3)}))
    assert product.traits(3) is None


def test_a_fixed_batch_is_of_whoever_it_took() -> None:
    batch = FixedBatch(6, 2, [0, 3, 5], CPU)
    assert (batch.active(), batch.uniform) == ((0, 3, 5), None)
    for slots, runs in (([0, 0, 0, 3, 5, 5], [(3, 4, 2), (4, 6, 4)]), ([5, 5, 4], [(0, 2, 4), (2, 3, 3)]), ([], [])):
        batch.take(slots)
        assert batch.index.tolist() == [*slots, *[0] * (6 - len(slots))]
        assert batch.rows(6).on_device.runs() == runs
    with pytest.raises(ValueError, match="3 rows of 6 requests of 1 tokens"):
        batch.rows(3)
