"""Log-likelihoods and divergences against sums that are written out, and where a vocabulary ends."""

from __future__ import annotations

from math import inf, log

import pytest
import torch

from deltacompress.numerics import likelihood
from deltacompress.numerics.likelihood import kl_divergence, log_likelihoods, mask_beyond, say_something, score_tokens


def test_the_likelihood_of_a_continuation_is_the_sum_over_its_tokens() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.1, 0.2, 0.7]]).log() + 3
    scores = score_tokens(logits, torch.tensor([0, 2, 1]))
    assert (scores.dtype, scores.shape) == (torch.float64, (2, 3))
    first, second = log_likelihoods(scores, [2, 1])
    assert first.log_likelihood == pytest.approx(log(0.5) + log(0.7))
    assert second.log_likelihood == pytest.approx(log(0.2))
    assert (first.greedy, second.greedy) == (True, False)
    assert [one.greedy for one in log_likelihoods(scores, [1, 2])] == [True, False]  # the second of the two is not


def test_logits_of_less_precision_are_scored_in_fp32() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(5)
    assert torch.equal(score_tokens(logits, targets), score_tokens(logits.float(), targets))


def test_a_token_beyond_the_vocabulary_is_never_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 5.0]])
    assert mask_beyond(logits, [3, 4]) is logits
    masked = mask_beyond(logits, [2, 3])
    assert masked.tolist() == [[0.0, 0.0, -inf], [0.0, 0.0, 5.0]]
    assert score_tokens(masked, torch.tensor([0, 2]))[0, 0] == pytest.approx(log(0.5))
    whole = mask_beyond(logits[:, None].expand(2, 4, 3), [2, 3])  # a size for each row, whatever its positions
    assert torch.equal(whole, masked[:, None].expand(2, 4, 3))


@pytest.mark.parametrize("at_a_time", [1, 5, 1 << 23])
def test_the_divergence_is_of_each_row(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) = ln(4/3) / 2; the other way round it is 0.1308."""
    monkeypatch.setattr(likelihood, "_AT_A_TIME", at_a_time)
    half, other = torch.tensor([[0.5, 0.5]] * 3).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.25, 0.75]]).log()
    found = kl_divergence(half, other)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.5 * log(4 / 3), 0, 0.5 * log(4 / 3)], abs=1e-7)
    assert kl_divergence(other, half)[0] == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-7)


def test_small_divergences_keep_their_digits() -> None:
    """Terms of both signs, a thousand times what they come to: their sum is taken in fp64."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 30_000, generator=draw)
    near = logits + 1e-3 * torch.randn(4, 30_000, generator=draw)
    # by fp64: a log_softmax of fp32 rounds on each CPU as it likes, by as much as what is looked for
    target, found = (one.double().log_softmax(-1).float() for one in (logits, near))
    p, q = target.double(), found.double()
    expected = torch.stack([(one.exp() * (one - two)).sum() for one, two in zip(p, q, strict=True)])
    assert float(expected.max()) < 1e-6
    assert kl_divergence(target, found).tolist() == pytest.approx(expected.tolist(), rel=1e-9)


def test_what_the_target_excludes_costs_nothing_and_what_it_needs_everything() -> None:
    sure, half = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert kl_divergence(sure, half).tolist() == pytest.approx([log(2)])
    assert kl_divergence(sure, sure).tolist() == [0]
    assert kl_divergence(half, sure).tolist() == [inf]


def test_tokens_that_one_of_two_lacks_are_left_out() -> None:
    half, wide = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert kl_divergence(half, wide).tolist() == pytest.approx([0.5 * log(4 / 3)])
    assert kl_divergence(wide, half).tolist() == pytest.approx([0.75 * log(1.5) + 0.25 * log(0.5)])


def test_logits_say_something_where_each_row_has_a_largest_one() -> None:
    logits = torch.tensor([[0.0, 1.0, -inf], [2.0, 0.0, 0.0]])  # one is ruled out
    assert say_something(logits)
    for value in (inf, float("nan")):
        damaged = logits.clone()
        damaged[1, 1] = value
        assert not say_something(damaged)
    assert not say_something(torch.full((1, 3), -inf))
