"""The demo's tasks: right answers by other means, splits that never meet, the same samples from the same seed."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from demo_pair.data import (
    TASKS,
    TRAIN_SAMPLES,
    VALIDATION_SAMPLES,
    Sample,
    Split,
    split_of,
    stream,
    write_task,
)
from demo_pair.words import SORTS
from hypothesis import given, settings
from hypothesis import strategies as st

SORT_OF = {thing: sort for sort, things in SORTS.items() for thing in things}


def _samples(task: str, split: Split, seed: int, count: int) -> list[Sample]:
    return list(islice(stream(task, split, seed), count))


def _items(prompt: str) -> tuple[str, ...]:
    """What a prompt asks about, without the order."""
    return tuple(sorted(re.findall(r"\w+", prompt)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_palindromes_read_the_same_backwards(seed: int) -> None:
    for sample in _samples("palindrome", "train", seed, 20):
        numbers = re.findall(r"\d+", sample.prompt)
        assert 7 <= len(numbers) <= 12
        assert all(str(int(number)) == number and 100 <= int(number) < 10_000 for number in numbers)
        same = [number for number in numbers if number == number[::-1]]
        assert sample.completion == f" [{', '.join(same)}]"
        assert sample.choices is None


def test_palindromes_are_common_and_so_are_near_misses() -> None:
    numbers = [n for s in _samples("palindrome", "train", 0, 500) for n in re.findall(r"\d+", s.prompt)]
    wrong_pairs = [sum(n[i] != n[-1 - i] for i in range(len(n) // 2)) for n in numbers]
    assert 0.25 < wrong_pairs.count(0) / len(numbers) < 0.4
    assert 0.3 < wrong_pairs.count(1) / len(numbers) < 0.6


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_majority_has_one_right_answer_among_its_choices(seed: int) -> None:
    for sample in _samples("majority", "train", seed, 20):
        things = sample.prompt.removesuffix(": most are").split(", ")
        (first, most), (_, second) = Counter(SORT_OF[thing] for thing in things).most_common(2)
        assert most == second + 1
        assert sample.completion == f" {first}"
        assert sample.choices is not None
        assert len(set(sample.choices)) == 4
        assert {SORT_OF[thing] for thing in things} == {choice.strip() for choice in sample.choices}


def test_every_thing_has_one_sort() -> None:
    things = [thing for members in SORTS.values() for thing in members]
    assert len(set(things)) == len(things)


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_whatever_the_seed_or_the_order(task: str) -> None:
    train = {_items(s.prompt) for seed in (0, 1) for s in _samples(task, "train", seed, 1500)}
    validation = {_items(s.prompt) for seed in (0, 2) for s in _samples(task, "validation", seed, 150)}
    assert not train & validation


@pytest.mark.parametrize("task", TASKS)
def test_a_stream_repeats_no_sample_and_follows_its_seed(task: str) -> None:
    first = _samples(task, "train", 7, 400)
    assert len({_items(s.prompt) for s in first}) == 400
    assert first == _samples(task, "train", 7, 400)
    assert first != _samples(task, "train", 8, 400)


def test_about_one_sample_in_sixteen_is_for_validation() -> None:
    held_out = sum(split_of(str(number)) == "validation" for number in range(16_000))
    assert 900 < held_out < 1100


def test_written_files_hold_the_stream(tmp_path: Path) -> None:
    write_task(tmp_path, "majority", seed=3)
    for split, count in (("train", TRAIN_SAMPLES), ("validation", VALIDATION_SAMPLES)):
        lines = (tmp_path / f"{split}.jsonl").read_text().splitlines()
        assert len(lines) == count
        assert set(json.loads(lines[0])) == {"prompt", "completion", "choices"}
        assert {
            split_of(" ".join(sorted(json.loads(line)["prompt"][: -len(": most are")].split(", ")))) for line in lines
        } == {split}


def test_the_data_is_the_same_on_every_machine() -> None:
    """Golden checksums: what the shipped fine-tunes were trained on must not drift."""
    sums = {
        task: zlib.crc32("".join(s.prompt + s.completion for s in _samples(task, "train", 0, 200)).encode())
        for task in TASKS
    }
    assert sums == {"palindrome": 125999920, "majority": 3860851264}
