"""Counted noise: a stream of its own for every request, the same in any company."""

from __future__ import annotations

import math

import pytest
import torch

from deltacompress.runtime.engine.sampling.draws import gumbel, key, uniforms

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """The generator's output function, in plain whole numbers."""
    value = state & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_against_whole_numbers() -> None:
    keys = [key(0, 0), key(7, 3), key(-1, 12)]
    found = uniforms(keys, 50, CPU)
    for row, start in enumerate(keys):
        for token in range(50):
            bits = splitmix(start + (token + 1) * 0x9E3779B97F4A7C15) >> 12
            assert found[row, token] == (bits + 0.5) * 2.0**-52


def test_the_known_outputs_of_splitmix() -> None:
    """Of a state that starts at 0, as published with the generator: its first outputs."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = uniforms([0], 3, CPU)[0]
    assert found.tolist() == [((one >> 12) + 0.5) * 2.0**-52 for one in first]


def test_never_at_the_ends() -> None:
    found = uniforms([key(seed, 1) for seed in range(50)], 2000, CPU)
    assert 0 < float(found.min()) < float(found.max()) < 1
    assert torch.isfinite(gumbel([5], 2000, CPU)).all()


def test_even_and_without_a_likeness_to_neighbours() -> None:
    """Moments of the uniform distribution, and correlations of seeds, of counts and of tokens next to each other."""
    size = 4000
    rows = [uniforms([key(seed, count)], size, CPU)[0] for seed, count in ((0, 0), (1, 0), (0, 1), (2, 0))]
    error = 4 / math.sqrt(size)
    for one in rows:
        assert float(one.mean()) == pytest.approx(0.5, abs=error * math.sqrt(1 / 12))
        assert float((one < 0.1).double().mean()) == pytest.approx(0.1, abs=error * 0.3)
    stacked = torch.corrcoef(torch.stack([*rows, rows[0].roll(1)]))
    assert float((stacked - torch.eye(5)).abs().max()) < error


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63, 2**64 + 3])
def test_any_seed(seed: int) -> None:
    assert 0 <= key(seed, 4) <= MASK
    assert key(seed, 4) != key(seed, 5)


def test_the_width_of_a_vocabulary_changes_nothing() -> None:
    keys = [key(1, 2), key(3, 4)]
    assert torch.equal(gumbel(keys, 300, CPU)[:, :70], gumbel(keys, 70, CPU))
    assert torch.equal(gumbel(keys[1:], 70, CPU)[0], gumbel(keys, 70, CPU)[1])


def test_gumbel_noise_draws_from_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = 8000
    noise = gumbel([key(9, count) for count in range(draws)], 4, CPU)
    found = torch.bincount((logits + noise).argmax(-1), minlength=4) / draws
    wanted = logits.softmax(-1)
    for share, probability in zip(found.tolist(), wanted.tolist(), strict=True):
        assert share == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / draws))
