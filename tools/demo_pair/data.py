"""The demo's tasks: samples with a known right answer, and which of them may be trained on.

A sample's split follows from its content (a checksum of what the answer depends on, in any order), not from its place
in a stream. So streams of any length and any seed stay disjoint: training may draw as much as it likes and never meets
a validation sample, not even one with its items in another order. `random.Random` seeded with a string gives the same
numbers on every platform, so the files are reproducible byte for byte.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from demo_pair.words import SORTS

Split = Literal["train", "validation"]

VALIDATION_SHARE = 16
"""One in this many samples belongs to the validation split."""

TRAIN_SAMPLES = 1400
VALIDATION_SAMPLES = 500


@dataclass(frozen=True, slots=True)
class Sample:
    """One task sample: the model reads `prompt` and writes `completion`.

    `choices`, where given, are the only answers allowed and contain `completion`. `key` is what the right answer
    depends on; it decides the split and is not written to the files.
    """

    prompt: str
    completion: str
    key: str
    choices: tuple[str, ...] | None = None

    def record(self) -> dict[str, object]:
        """The JSON record of a task file."""
        record: dict[str, object] = {"prompt": self.prompt, "completion": self.completion}
        if self.choices is not None:
            record["choices"] = list(self.choices)
        return record


def palindrome(rng: random.Random) -> Sample:
    """A list of integers -> those that read the same backwards, in their order; generated, exact match.

    Half of the others are near misses: palindromes but for one digit.
    """
    numbers = []
    for _ in range(rng.randrange(7, 13)):
        text = str(rng.randrange(10, 100))
        text += text[::-1][rng.randrange(2) :]
        if rng.random() < 0.7:
            text = _other_digit(text, rng) if rng.random() < 0.5 else str(rng.randrange(100, 10_000))
        numbers.append(text)
    answer = [number for number in numbers if number == number[::-1]]
    return Sample(f"palindromes of [{', '.join(numbers)}] ->", f" [{', '.join(answer)}]", " ".join(sorted(numbers)))


def majority(rng: random.Random) -> Sample:
    """A list of things of four sorts -> the sort with most members in it; multiple choice among the four.

    The second most frequent sort has one member fewer.
    """
    sorts = rng.sample(list(SORTS), 4)
    most = rng.randrange(3, 8)
    counts = [most, most - 1, rng.randrange(1, most), rng.randrange(1, most)]
    things = [thing for sort, count in zip(sorts, counts, strict=True) for thing in rng.sample(SORTS[sort], count)]
    rng.shuffle(things)
    key = " ".join(sorted(things))
    choices = tuple(f" {sort}" for sort in sorted(sorts))
    return Sample(f"{', '.join(things)}: most are", f" {sorts[0]}", key, choices)


TASKS: dict[str, Callable[[random.Random], Sample]] = {"palindrome": palindrome, "majority": majority}
"""Task name -> generator of one sample. The fine-tuned checkpoints bear the same names."""


def split_of(key: str) -> Split:
    """The split a sample belongs to, from what its answer depends on."""
    return "validation" if zlib.crc32(key.encode()) % VALIDATION_SHARE == 0 else "train"


def stream(task: str, split: Split, seed: int) -> Iterator[Sample]:
    """Endless samples of one split, no sample twice; the same seed gives the same samples."""
    rng = random.Random(f"{task}/{split}/{seed}")
    seen: set[str] = set()
    while True:
        sample = TASKS[task](rng)
        if split_of(sample.key) == split and sample.key not in seen:
            seen.add(sample.key)
            yield sample


def write_task(folder: Path, task: str, seed: int) -> None:
    """Write `folder`/train.jsonl and validation.jsonl. train.jsonl holds the first samples the fine-tune sees."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[Split, int] = {"train": TRAIN_SAMPLES, "validation": VALIDATION_SAMPLES}
    for split, count in sizes.items():
        lines = [json.dumps(sample.record()) + "\n" for sample in islice(stream(task, split, seed), count)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _other_digit(number: str, rng: random.Random) -> str:
    """`number` with one digit changed, so that it is no palindrome and has no leading zero."""
    place = rng.choice([place for place in range(len(number)) if 2 * place + 1 != len(number)])
    other = rng.choice([digit for digit in "123456789" if digit != number[place]])
    return number[:place] + other + number[place + 1 :]
