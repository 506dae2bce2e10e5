"""The look at fidelity: as much of it as a large vocabulary leaves room for (its value: test_driver.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import Pair

from deltacompress.models.skeleton import Skeleton

VOCABULARY, SAMPLES, LENGTH = 96, 8, 16


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of all logits that are made."""
    run_head, made = Skeleton.run_head, []

    def watch(self: Skeleton, hidden: torch.Tensor) -> torch.Tensor:
        out = run_head(self, hidden)
        if out.shape[-1] == VOCABULARY:
            made.append(tuple(out.shape))
        return out

    monkeypatch.setattr(Skeleton, "run_head", watch)
    return made


def test_sequence_by_sequence(pair: Pair, tmp_path: Path, pieces: list[tuple[int, ...]]) -> None:
    assert pair.compress(tmp_path / "out").kl_on_calibration is not None
    assert pieces == [(1, LENGTH, VOCABULARY)] * SAMPLES * 2


def test_in_pieces_for_a_large_vocabulary_it_says_the_same(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[int, ...]]
) -> None:
    whole = pair.compress(tmp_path / "whole").kl_on_calibration
    pieces.clear()
    monkeypatch.setattr("deltacompress.compression.layerwise.fidelity._LOGITS_AT_A_TIME", 6 * VOCABULARY + 5)
    found = pair.compress(tmp_path / "out").kl_on_calibration
    assert pieces == [(1, length, VOCABULARY) for length in (6, 6, 4)] * SAMPLES * 2
    assert found == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(("room", "shapes"), [(20 * VOCABULARY, [16, 4]), (5, [1])])
def test_a_large_vocabulary_gets_fewer_tokens(
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pieces: list[tuple[int, ...]],
    room: int,
    shapes: list[int],
) -> None:
    monkeypatch.setattr("deltacompress.compression.layerwise.fidelity._LOGITS", room)
    found = pair.compress(tmp_path / "out").kl_on_calibration
    assert pieces == [(1, length, VOCABULARY) for length in shapes] * 2
    assert found is not None
    assert found > 0


def test_none_without_a_teacher(pair: Pair, tmp_path: Path, pieces: list[tuple[int, ...]]) -> None:
    assert pair.compress(tmp_path / "out", recipe="deltazip-2bit").kl_on_calibration is None
    assert pieces == []
