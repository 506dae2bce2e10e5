"""What each wish does to logits, against formulas in fp64, and that no row minds its neighbours."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.requests import NO_TOKEN, Request
from deltacompress.runtime.engine.sampling.choose import Wanted, choose, score
from deltacompress.runtime.engine.sampling.shaping import adjusted, drawable
from deltacompress.runtime.engine.text import TextStream

SIZE = 40


def request(
    *, ids: list[int] | None = None, tokens: list[int] | None = None, vocabulary: int = SIZE, **wishes: Any
) -> Request:
    text = TextStream(lambda _: "", (), streams=False)
    made = Request(0, None, ids or [1, 2], vocabulary, 9, "length", frozenset({3}), text, Sampling(**wishes))
    made.tokens = tokens or []
    return made


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def kept(scores: Tensor) -> set[int]:
    return {token for token, one in enumerate(scores.tolist()) if one > float("-inf")}


def test_greedy_takes_the_largest_of_the_own_vocabulary() -> None:
    given = logits(3)
    given[1, 35] = 100.0
    found = choose(given, [request(), request(vocabulary=30), request()])
    assert [one.token for one in found] == [
        int(given[0].argmax()),
        int(given[1, :30].argmax()),
        int(given[2].argmax()),
    ]
    assert all(one.logprob is None and one.top == () for one in found)


@pytest.mark.parametrize("penalty", [1.3, 0.5])
def test_penalties(penalty: float) -> None:
    given = logits(1)[0].double()
    tokens, ids = [5, 5, 7, 9, 5], [1, 9, 11]
    one = request(
        ids=ids, tokens=tokens, repetition_penalty=penalty, presence_penalty=0.4, frequency_penalty=-0.2, min_tokens=5
    )
    wanted = given.clone()
    for token in {*ids, *tokens}:
        wanted[token] = given[token] / penalty if given[token] > 0 else given[token] * penalty
    for token, times in Counter(tokens).items():
        wanted[token] -= 0.4 - 0.2 * times
    torch.testing.assert_close(adjusted(given, one).double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_bias_comes_after_penalties_and_decides() -> None:
    given = logits(1)
    worst = int(given[0].argmin())
    found = choose(given, [request(logit_bias=((worst, 50.0), (0, -50.0)))])
    assert found[0].token == worst
    assert choose(given, [request()])[0].token != worst


def test_no_end_before_its_time() -> None:
    given = logits(2)
    given[:, 3] = 50.0
    early, late = request(tokens=[8], min_tokens=2), request(tokens=[8, 8], min_tokens=2)
    found = choose(given, [early, late])
    assert found[0].token == int(given[0].masked_fill(torch.arange(SIZE) == 3, -1e9).argmax())
    assert found[1].token == 3


def test_tokens_that_the_head_does_not_have() -> None:
    """A prompt may have more of them than can come out."""
    assert choose(logits(1), [request(ids=[1, 300], repetition_penalty=2.0)])[0].token < SIZE


@pytest.mark.parametrize("top_k", [1, 3, SIZE, 1000])
def test_top_k(top_k: int) -> None:
    given = logits(1)
    order = given[0].argsort(descending=True).tolist()
    assert kept(drawable(given, [Sampling(1.0, top_k=top_k)])[0]) == set(order[:top_k])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1.0])
def test_top_p_is_of_the_warmed_probabilities(top_p: float) -> None:
    given = logits(1)
    probabilities = (given[0].double() / 1.7).softmax(-1)
    wanted, share = set(), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if share >= top_p:
            break
        wanted.add(token)
        share += float(probabilities[token])
    assert kept(drawable(given, [Sampling(1.7, top_p)])[0]) == wanted


def test_top_p_of_what_top_k_left() -> None:
    given = torch.tensor([[3.0, 2.9, 2.8, 2.7]])
    assert kept(drawable(given, [Sampling(1.0, 0.6, top_k=2)])[0]) == {0, 1}  # .525 of the two, not .28 of all
    assert kept(drawable(given, [Sampling(1.0, 0.5, top_k=2)])[0]) == {0}


def test_a_repetition_penalty_alone() -> None:
    given = torch.zeros(1, SIZE)
    given[0, 9], given[0, 7] = 1.0, 1.5
    assert choose(given, [request(ids=[9], repetition_penalty=0.5)])[0].token == 9
    assert choose(given, [request(ids=[7], repetition_penalty=2.0)])[0].token == 9


def test_top_p_is_full_with_the_token_that_reaches_it() -> None:
    assert len(kept(drawable(torch.zeros(1, 4), [Sampling(1.0, 0.5)])[0])) == 2


def test_min_p_is_a_share_of_the_likeliest() -> None:
    given = logits(1)
    probabilities = (given[0].double() / 0.7).softmax(-1)
    wanted = {token for token, one in enumerate(probabilities.tolist()) if one >= 0.05 * float(probabilities.max())}
    assert kept(drawable(given, [Sampling(0.7, min_p=0.05)])[0]) == wanted
    assert 1 < len(wanted) < SIZE


def test_what_is_left_has_the_warmed_logits() -> None:
    given = logits(2)
    found = drawable(given, [Sampling(0.5), Sampling(2.0)])
    wanted = torch.stack([(given[0].double() / 0.5).log_softmax(-1), (given[1].double() / 2).log_softmax(-1)])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_no_temperature_is_too_small(temperature: float) -> None:
    given = logits(1)
    assert choose(given, [request(temperature=temperature)])[0].token == int(given[0].argmax())


def test_alone_or_among_others() -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 1.2, "seed": 3, "top_k": 5, "repetition_penalty": 1.2},
        {"presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 2.0, "seed": 8, "logit_bias": ((4, 2.0),), "logprobs": 0},
    ]
    given = logits(len(wishes))
    asked = [request(tokens=[row, 6, 6], **wish) for row, wish in enumerate(wishes)]
    together = choose(given, asked)
    assert together == [choose(given[row : row + 1], [one])[0] for row, one in enumerate(asked)]
    assert together[::-1] == choose(given.flip(0), asked[::-1])


def test_a_draw_is_of_the_seed_and_of_how_many_tokens_there_are() -> None:
    given = torch.zeros(1, SIZE)

    def drawn(seed: int, count: int) -> int:
        return choose(given, [request(tokens=[9] * count, temperature=1.0, seed=seed)])[0].token

    assert [drawn(1, count) for count in range(12)] == [drawn(1, count) for count in range(12)]
    assert len({drawn(1, count) for count in range(40)}) > 15
    assert [drawn(1, count) for count in range(12)] != [drawn(2, count) for count in range(12)]


def test_logprobs_are_of_the_logits_before_any_wish() -> None:
    given = logits(2)
    wishes = Sampling(5.0, 0.2, seed=1, logprobs=4, repetition_penalty=3.0)
    asked = [replace(request(), sampling=wishes), replace(request(vocabulary=20), sampling=wishes)]
    for row, one in enumerate(choose(given, asked)):
        own = given[row, : asked[row].vocabulary].double().log_softmax(-1)
        assert one.logprob == pytest.approx(float(own[one.token]), abs=1e-5)
        values, tokens = own.topk(4)
        assert [token for token, _ in one.top] == tokens.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_scores_of_given_tokens() -> None:
    given = logits(3)
    found = score(given, [Wanted(5, 0), Wanted(0, 2), Wanted(39, 500)])
    wanted = given.double().log_softmax(-1)
    assert [one.token for one in found] == [5, 0, 39]
    assert [one.logprob for one in found] == pytest.approx(
        [float(wanted[i, t]) for i, t in enumerate((5, 0, 39))], abs=1e-5
    )
    assert [len(one.top) for one in found] == [0, 2, SIZE]
    assert found[1].top[0][0] == int(wanted[1].argmax())


@pytest.mark.parametrize(("wishes", "finish"), [({}, "eos"), ({"ignore_eos": True}, None)])
def test_an_end_token_that_is_to_be_ignored(wishes: dict[str, Any], finish: str | None) -> None:
    one = request(**wishes)
    one.take(3)
    assert one.finished == finish
    for _ in range(7):
        one.take(3)
    assert one.finished == finish
    one.take(3)
    assert one.finished == (finish or "length")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("wishes", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"logit_bias": ((4, 2.0),)}])
def test_logits_that_are_not_finite_give_no_token(value: float, wishes: dict[str, Any]) -> None:
    given = logits(2)
    given[1, 7] = value
    first, second = choose(given, [request(**wishes), request(**wishes)])
    assert first == choose(given[:1], [request(**wishes)])[0]
    assert (first.token >= 0, second.token) == (True, NO_TOKEN)


def test_a_token_that_is_ruled_out_may_be_anything() -> None:
    given = logits(1)
    given[0, 35] = float("nan")
    assert choose(given, [request(vocabulary=30)])[0].token == int(given[0, :30].argmax())
