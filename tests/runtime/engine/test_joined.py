"""Short prompts are rows of a decode step: what they and their neighbours answer is what each answers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_calls import Log, alone, drain, engine, free
from runtime.graphed import as_on_a_gpu, runtime_of
from runtime_cases import random_ids

from deltacompress.errors import BackendError
from deltacompress.kernels.triton import fused
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import Batch
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits
from deltacompress.runtime.engine.live.events import Started
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps import decoder, pages, prompts
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.graphs import joined_bucket
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.pieces import Piece, Pieces
from deltacompress.runtime.modules.attention import fuse_attention
from deltacompress.runtime.parallel.others import Others
from deltacompress.runtime.parallel.plan import Plan
from deltacompress.runtime.parallel.ranks import rank

Fleet = tuple[Path, dict[str, Path]]
LONG = Sampling(ignore_eos=True)


@pytest.fixture(autouse=True)
def joins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prompts join steps here, though attention gathers its pages on a CPU; pages are small."""
    monkeypatch.setattr(Pieces, "joins", Pieces.captures)
    monkeypatch.setattr(scheduler, "Pages", lambda **_: Pages(4))
    with as_on_a_gpu():
        yield


class Watched:
    """How many rows each step had, and how many tokens each piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.pieces = list[int](), list[int]()
        forward, piecewise = Decoder._forward, Pieces.forward

        def rows(own: Decoder, tokens: Any, longest: int, *, joined: bool) -> torch.Tensor:
            self.rows.append(len(tokens.ids))
            return forward(own, tokens, longest, joined=joined)

        def pieces(own: Pieces, piece: Piece) -> torch.Tensor:
            self.pieces.append(piece.columns * len(piece.slots))
            return piecewise(own, piece)

        monkeypatch.setattr(Decoder, "_forward", rows)
        monkeypatch.setattr(Pieces, "forward", pieces)


def begun(runtime: Runtime, *names: str | None, **limits: int) -> tuple[Engine, Log]:
    """An engine in which a call of each of these decodes."""
    running, log = engine(runtime, **limits)
    for call in firsts(*names):
        running.submit(call)
    running.step()
    return running, log


def firsts(*names: str | None) -> list[Call]:
    return [Call(f"first {at}", name, tuple(random_ids(6 + at, 90 + at)), 40, LONG) for at, name in enumerate(names)]


def held(running: Engine, log: Log, runtime: Runtime, asked: list[Call]) -> None:
    """To their ends, as each is alone, and nothing is left."""
    drain(running)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)
    assert running._scheduler.pages.held == len(running._scheduler.prefixes._known)
    assert not running._scheduler._prompts._joined


def test_answers_are_those_of_each_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, None, "a", max_batch=8)
    seen = Watched(monkeypatch)
    lengths = {None: (1, 9, 40), "a": (3, 17), "b": (20, 2), "c": (33,), "e": (5,)}
    asked = [Call(f"{a} {n}", a, tuple(random_ids(n, n)), 6, LONG) for a, many in lengths.items() for n in many]
    for call in asked:
        running.submit(call)
        running.step()
        running.step()
    drain(running)
    assert seen.pieces == []
    assert [rows for rows in seen.rows if rows > 40] == [2 + 40 + len(lengths[None]) - 1]
    held(running, log, plain, asked)
    assert free(runtime)


def test_where_nobody_decodes_or_pages_are_gathered_there_is_nothing_to_join(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Watched(monkeypatch)
    running, _ = begun(runtime_of(fleet, slots=5), "a")
    assert (seen.rows, seen.pieces) == ([1], [6])
    monkeypatch.setattr(Pieces, "joins", lambda *_: False)
    running.submit(Call("later", "a", (5, 6, 7), 5, LONG))
    running.step()
    assert (seen.rows, seen.pieces) == ([1, 2], [6, 3])


def test_several_at_once_and_what_does_not_fit_by_itself(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of those that are together, four here, has a forward of its own, in the same step."""
    monkeypatch.setattr(prompts, "JOINED", 70)
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, "a", max_batch=16)
    seen = Watched(monkeypatch)
    asked = [Call(f"{at}", "abc"[at % 3], tuple(random_ids(30, at)), 5, LONG) for at in range(6)]
    for call in asked:
        running.submit(call)
    running.step()
    assert (seen.rows, seen.pieces) == ([1 + 2 * 30 + 2], [2 * 30])
    assert {call.id for call in asked if log.tokens(call.id)} < {*"0123"}
    assert running.counts.prompt_tokens == 6 + 6 * 30  # each was looked up once
    running.step()
    assert (seen.rows[1:], seen.pieces[1:]) == ([5 + 2 * 30], [])
    assert running.counts.prompt_tokens == running.computed_tokens == 6 + 6 * 30
    held(running, log, plain, asked)


def test_what_joins_is_of_what_a_step_has(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, "a", step_tokens=90)
    seen = Watched(monkeypatch)
    asked = [Call(f"{at}", "b", tuple(random_ids(40, at)), 5, LONG) for at in range(3)]
    for call in asked:
        running.submit(call)
    for _ in range(2):
        running.step()
    assert (seen.rows, seen.pieces) == ([1 + 2 * 40, 3 + 40], [])
    held(running, log, plain, asked)


@pytest.mark.parametrize("looks", [10 * 45 - 1, 10 * 45])
def test_the_end_of_a_long_prompt_joins(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """Unless what its tokens look at is too much: 40 and those before each."""
    monkeypatch.setattr(prompts, "_LOOKED_AT", looks)
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, "b", None, step_tokens=20)
    seen = Watched(monkeypatch)
    asked = [Call("long", "a", tuple(random_ids(50, 1)), 5, LONG)]
    running.submit(asked[0])
    drain(running)
    joins = looks == 10 * 45
    assert seen.pieces == [20, 20] + [10] * (not joins)
    assert seen.rows[2] == (2 + 10 if joins else 3)
    held(running, log, plain, asked)


@pytest.mark.parametrize(("name", "most"), [("JOINED", 20), ("_LOOKED_AT", 20 * 10)])
def test_what_is_too_long_does_not_join(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """By its own tokens, or by what these look at."""
    monkeypatch.setattr(prompts, name, most)
    running, _ = begun(runtime_of(fleet, slots=5), "a")
    seen = Watched(monkeypatch)
    for at, length in enumerate((21, 20)):
        running.submit(Call(f"{at}", "a", tuple(random_ids(length, at)), 5, LONG))
        running.step()
    assert (seen.rows, seen.pieces) == ([2, 2 + 20], [21])


@pytest.mark.parametrize("step_tokens", [512, 180])
@pytest.mark.parametrize(("name", "most"), [("JOINED", 39), ("_LOOKED_AT", 20 * 20 - 1)])
def test_what_is_too_long_beside_others_does_not_join(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str, most: int, step_tokens: int
) -> None:
    """Two that came together, or one after the other: step_tokens is too little for a piece of both."""
    monkeypatch.setattr(prompts, name, most)
    running, _ = begun(runtime_of(fleet, slots=5), "a", step_tokens=step_tokens)
    seen = Watched(monkeypatch)
    for at in range(2):
        running.submit(Call(f"{at}", "a", tuple(random_ids(20, at)), 5, LONG))
    running.step()
    assert (seen.rows, seen.pieces) == ([1 + 20 + 1], [20])
    running.submit(Call("later", "a", tuple(random_ids(20, 2)), 5, LONG))
    running.step()
    assert (seen.rows[1:], seen.pieces[1:]) == ([3 + 20], [])


def test_prompt_scores_have_a_forward_of_their_own(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    running, log = begun(runtime_of(fleet, slots=5), "a")
    seen = Watched(monkeypatch)
    running.submit(Call("scored", "a", (5, 6, 7), 1, Sampling(prompt_logprobs=0)))
    drain(running)
    assert seen.pieces == [3]
    assert log.end("scored").tokens == 1


@pytest.mark.parametrize("step_tokens", [512, 180])
def test_what_joined_is_known_to_later_prompts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, step_tokens: int) -> None:
    """From the next forward on: a prompt of the same beginning that has a forward of its own before it computes all.

    step_tokens: so many that the two are looked up together, or so few that they are one after the other.
    """
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    log = Log()
    running = runtime.engine(log, EngineLimits(prefix_bytes=1 << 30, step_tokens=step_tokens))
    running.submit(Call("first", "a", (5, 6), 60, LONG))
    running.step()
    seen = Watched(monkeypatch)
    monkeypatch.setattr(prompts, "JOINED", 24)
    same = random_ids(22, 3)
    asked = [Call(f"{at}", "a", (*same, *random_ids(at, at)), 4, LONG) for at in (1, 8)]
    for call in asked:
        running.submit(call)
    running.step()
    assert (seen.rows, seen.pieces) == ([1 + 23 + 1], [30])
    asked.append(Call("later", "a", (*same, 9), 4, LONG))
    running.submit(asked[-1])
    running.step()
    assert seen.rows[-1] == 3 + 23 - 20  # five pages of four are known
    drain(running)
    started = [one for one in log.events["later"] if isinstance(one, Started)]
    assert len(started) == 1
    for call in asked:
        assert log.tokens(call.id) == alone(plain, call)[0]


def test_what_joined_and_nothing_else_is_known(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, "a")
    seen = Watched(monkeypatch)
    asked = [Call(f"{new}", "a", (*random_ids(14, 3), *range(5, 5 + new)), 4, LONG) for new in (0, 2)]
    for call in asked:
        running.submit(call)
        running.step()
    assert (seen.rows, seen.pieces) == ([1 + 14, 2 + 16 - 12], [])  # three pages of four are known
    held(running, log, plain, asked)


def test_one_that_is_cancelled_while_it_joins(fleet: Fleet) -> None:
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, "a", "b")
    other = Call("other", "c", tuple(random_ids(12, 9)), 6, LONG)
    running.submit(Call("gone", "c", tuple(random_ids(9, 8)), 6, LONG))
    running.submit(other)
    running.step()
    running.cancel("gone")
    held(running, log, plain, [other])
    assert (log.tokens("gone"), log.end("gone").finish) == ((), "cancelled")


@pytest.mark.parametrize(
    ("kind", "name", "most"), [(Decoder, "_forward", 512), (Pieces, "forward", 16)], ids=["step", "prompt beside it"]
)
def test_no_memory_for_what_prompts_join(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, most: int
) -> None:
    """Nobody has a page after that, those included that were to join and have no row yet."""
    monkeypatch.setattr(prompts, "JOINED", most)
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = begun(runtime, "a", "b")
    asked = [Call(f"{at}", "c", tuple(random_ids(12, at)), 6, LONG) for at in range(2)]
    for call in asked:
        running.submit(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, no_memory)
        running.step()
    assert not any(one.pages for one in running._known.values())
    held(running, log, plain, [*firsts("a", "b"), *asked])


def no_memory(*_: object, **__: object) -> torch.Tensor:
    raise BackendError("no memory")


def test_one_that_gave_way_with_the_token_that_ends_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is made after that; when its turn comes it neither joins nor takes others with it."""
    monkeypatch.setattr(scheduler, "Pages", lambda **given: Pages(4, **given))
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = engine(runtime, max_batch=3, kv_tokens=10 * 4)
    tell = Request.tell

    def told(own: Request) -> str:
        piece = tell(own)
        if own.gave_way and own.finished is None:
            own.finished = "stop"
        return piece

    asked = [Call(str(new), "a", tuple(random_ids(5, new)), new, LONG) for new in (24, 10, 23)]
    for call in asked:
        running.submit(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "tell", told)
        drain(running)
    assert [(log.end(one.id).finish, log.end(one.id).preempted) for one in asked] == [
        ("length", 0),
        ("length", 0),
        ("stop", 1),
    ]
    for call in asked:
        tokens = log.tokens(call.id)
        assert tokens == alone(plain, call)[0][: len(tokens)]
    assert running._scheduler.pages.held == len(running._scheduler.prefixes._known)


def test_seats_are_given_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has as many seats as there are rows at most, whoever comes and goes, and one for nobody."""
    monkeypatch.setattr(decoder, "_ROWS", 1)
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    running, log = engine(runtime, max_batch=3)
    asked = [Call(f"{at}", "abc"[at % 3], tuple(random_ids(3 + at % 9, at)), 2 + at % 5, LONG) for at in range(30)]
    for call in asked:
        running.submit(call)
        running.step()
        seats = running._scheduler.decoder._seats
        assert {*seats} == {*running._scheduler.decoder.rows}
        assert len({*seats.values()}) == len(seats)
        assert all(1 <= seat <= 3 for seat in seats.values())
    held(running, log, plain, asked)


def test_steps_that_prompts_join_are_captured_and_told_to_other_ranks(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These compute the same, from tables of their own."""
    runtime, plans, given = runtime_of(fleet, slots=5), list[Plan](), list[torch.Tensor]()
    told = Others()
    monkeypatch.setattr(told, "forward", lambda plan: (plans.append(plan()), nullcontext())[1])
    monkeypatch.setattr(runtime.model, "others", told)
    serving = Decoder.forward_rows

    def noted(own: Decoder, batch: Batch, inputs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        given.append(serving(own, batch, inputs, table))
        return given[-1]

    monkeypatch.setattr(Decoder, "forward_rows", noted)
    monkeypatch.setattr(rank, "Pages", lambda: Pages(4))
    running, _ = begun(runtime, "a", "b")
    other = rank._KeysAndValues(runtime.model)
    alike = 0
    for at in range(12):
        running.submit(Call(f"{at}", (None, *"abc")[at % 4], tuple(random_ids(5 + at, at)), 7, LONG))
        running.step()
        with torch.inference_mode():
            own = given[-1]
            for plan in plans:
                other.forward(plan, plan.pages[1], torch.tensor(plan.inputs))
            torch.testing.assert_close(given[-1], own)
            alike += len(own) == joined_bucket(len(own))
        plans.clear()
        given.clear()
    found = running._scheduler.graphs
    assert found is not None
    assert alike > 3
    assert other._graphs is not None
    assert {*other._graphs.by_shape} == {*found.by_shape}


def test_steps_that_prompts_join_are_captured_before_there_are_any(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is given pages here, as on a GPU, which it gathers by itself."""
    monkeypatch.setattr(fused, "attends", lambda *_: False)
    monkeypatch.setattr(pages, "_FIRST", 1024)  # as a GPU's memory is taken at once
    monkeypatch.setattr(decoder, "_ROWS", 1)
    runtime, plain = runtime_of(fleet, slots=5), runtime_of(fleet, cuda_graphs=False)
    runtime.model.paged = fuse_attention(runtime.model.model, runtime.model.context)
    assert runtime.model.paged
    running, log = engine(runtime, max_batch=18, step_tokens=2048)
    running.warm()
    graphs = running._scheduler.graphs
    assert graphs is not None
    shapes, before = {*graphs.by_shape}, graphs.plain
    table = running._scheduler.decoder._table
    seen = Watched(monkeypatch)
    asked = [Call(f"{at}", name, (7, 8), 40, LONG) for at, name in enumerate(("a", None))]
    waves = [[32] * 16, [25] * 7, [3], [60, 60], [45] * 8]
    for at, wave in enumerate(waves):
        for number, length in enumerate(wave):
            asked.append(Call(f"{at} {number}", "a", tuple(random_ids(length, number)), 2, LONG))
    sent = iter(asked)
    for wave in [[2, 2], *waves]:
        for _ in wave:
            running.submit(next(sent))
        for _ in range(3):
            running.step()
    assert max(seen.rows) == 2 + 512
    assert ({*graphs.by_shape}, graphs.plain) == (shapes, before)
    assert running._scheduler.decoder._table is table
    held(running, log, plain, asked)


def test_rows_beside_a_prompt_are_few_shapes() -> None:
    assert [joined_bucket(rows) for rows in (1, 64, 65, 129, 193, 257, 600)] == [64, 64, 128, 192, 256, 384, 640]
