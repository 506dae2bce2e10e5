"""Prompts in pieces are the whole prompts, and no step computes more of them than it may."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_cases import Served, oracle_tokens, random_ids

from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.requests import Request, Told
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.pieces import Piece, Pieces
from deltacompress.runtime.engine.steps.prefixes import Prefixes
from deltacompress.runtime.engine.steps.prompts import Prompts
from deltacompress.runtime.engine.text import TextStream


def prompts_of(runtime: Runtime, step_tokens: int) -> Prompts:
    pages = Pages(4)
    return Prompts(Pieces(runtime.model, pages), Told(None), step_tokens, pages, Prefixes(pages, 0))


def request(index: int, length: int, slot: int = 0) -> Request:
    text = TextStream(lambda _: "", (), streams=False)
    made = Request(index, None, random_ids(length, index), 96, 9, "length", frozenset(), text, Sampling())
    made.slot = slot
    return made


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), step_tokens=st.integers(1, 50))
def test_pieces_are_the_whole(runtime: Runtime, lengths: list[int], step_tokens: int) -> None:
    made = [request(i, length) for i, length in enumerate(lengths)]
    prompts = prompts_of(runtime, step_tokens)
    prompts.add(made)
    sizes: list[int] = []
    serving = runtime.model.model.forward

    def watched(*, input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(input_ids.numel())
        return serving(input_ids=input_ids, **rest)

    through: list[Request] = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.model.model, "forward", watched)
        while prompts.requests or len(through) == 0:
            before = len(sizes)
            through += prompts.step().through
            prompts.take()
            assert 0 < sum(sizes[before:]) <= step_tokens
    assert sorted(one.index for one in through) == [*range(len(lengths))]
    wanted = runtime.logits([(None, one.ids) for one in made])
    for one, logits in zip(made, wanted, strict=True):
        assert one.tokens == [int(logits[-1].argmax())]
    for one in through:
        alone, again = prompts_of(runtime, 8192), request(one.index, len(one.ids))
        alone.add([again])
        with torch.inference_mode():
            assert alone.step().through == [again]
        for part in ("keys", "values"):
            for layer in range(2):
                found, own = (
                    getattr(of._pages, part)[layer][:, which.pages].flatten(1, 2)[:, : len(one.ids)]
                    for of, which in ((prompts, one), (alone, again))
                )
                torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3", "phi3", "gpt-neox"])
def test_each_architecture_takes_pieces(served: Callable[..., Served], architecture: str) -> None:
    """Windows of attention, soft caps and scaled positions included."""
    one = served(architecture)
    runtime = Runtime.from_base(one.pair.base)
    runtime.load(one.artifact, "v")
    ids = random_ids(23)
    found: list[int] = []

    class Heard(Told):
        def token(self, request: Request, picked: Any, text: str) -> None:
            found.append(picked.token)

    scheduler = runtime._scheduler(Heard(None), max_batch=2, step_tokens=5)
    [made] = runtime._input.requests([("v", ids)], _generation())
    scheduler.submit(made)
    while scheduler.busy:
        scheduler.step()
    assert found == oracle_tokens(one.restored, ids, 6)[: len(found)]
    assert len(found) in (6, found.index(next(iter(made.eos), -1)) + 1 if set(found) & made.eos else 6)


def _generation() -> Any:
    from deltacompress.runtime.engine.generation_config import GenerationConfig

    return GenerationConfig.checked(6, (), Sampling(), None, streams=False)


def test_those_that_ended_or_gave_way_are_left_out(runtime: Runtime) -> None:
    prompts = prompts_of(runtime, 12)
    made = [request(i, 4) for i in range(6)]
    prompts.add(made)
    made[1].finished = "cancelled"
    prompts.drop({made[2], made[4]})
    assert [one.index for one in prompts.requests] == [0, 3, 5]
    rows: list[int] = []
    serving = runtime.model.serving
    runtime.model.serving = lambda batch, *rest: (rows.append(len(batch.slots)), serving(batch, *rest))[1]  # type: ignore[method-assign]
    with torch.inference_mode():
        found = [one.index for _ in range(2) for one in prompts.step().through]
    assert found == [0, 3, 5]
    assert rows == [1, 2]
    assert prompts.step().through == []


def test_scores_of_a_prompt_that_is_begun_anew(runtime: Runtime) -> None:
    """Those of the pieces that were given up are not told twice."""
    prompts, made = prompts_of(runtime, 2), request(0, 11)
    made.sampling = Sampling(prompt_logprobs=0)
    prompts.add([made])
    with torch.inference_mode():
        assert prompts.step().through == []
        assert len(made.prompt_scores) == 2
        prompts.drop({made})
        prompts.add([made])
        while not prompts.step().through:
            pass
    assert [one.token for one in made.prompt_scores] == made.ids[1:]


def test_more_at_once_where_nobody_waits_for_tokens(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.runtime.engine.policy.portions.ALONE_TOKENS", 9)
    for alone, pieces in ((False, [2] * 7), (True, [9, 5])):
        prompts, made = prompts_of(runtime, 2), request(0, 14)
        prompts.add([made])
        before = prompts._pieces.forward

        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            sizes: list[int] = []
            patch.setattr(prompts._pieces, "forward", partial(noted, sizes, before))
            while not prompts.step(alone=alone).through:
                pass
        assert sizes == pieces
        assert len({*made.pages}) == 4


def test_prompts_that_share_a_captured_piece_take_a_step_with_all_that_it_is_padded_to(runtime: Runtime) -> None:
    """32 of 128 tokens for a step, as few wait: one prompt of 18 leaves no room for two that are padded to 16 each."""
    prompts, sizes = prompts_of(runtime, 128), list[int]()
    made = [request(i, length) for i, length in enumerate((18, 3, 5, 2, 4, 3))]
    made[3].sampling = made[4].sampling = Sampling(prompt_logprobs=0)  # together, and not captured
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltacompress.runtime.engine.policy.portions._FEWEST", 1)
        for module in ("pieces", "prompts"):
            patch.setattr(f"deltacompress.runtime.engine.steps.{module}.SMALLEST", 16)
        patch.setattr(prompts._pieces, "captures", lambda slot: True)
        patch.setattr(prompts._pieces, "forward", partial(noted, sizes, prompts._pieces.forward))
        prompts.add(made[:1])
        prompts.add(made[1:3])
        prompts.add(made[3:5])
        prompts.add(made[5:])
        found = []
        while prompts.requests:
            found.append([one.index for one in prompts.step().through])
    assert found == [[0], [1, 2], [3, 4, 5]]
    assert sizes == [18, 5, 4, 3]


def noted(sizes: list[int], forward: Callable[[Piece], torch.Tensor], piece: Piece) -> torch.Tensor:
    sizes.append(piece.columns)
    return forward(piece)
