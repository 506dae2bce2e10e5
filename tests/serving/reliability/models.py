"""A base and its variants, generated in seconds, and what each answers when nobody else asks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pairs import WORDS, Weights, edit, make_pair

from deltacompress.runtime import Runtime

BASE = "base"


@dataclass(frozen=True)
class Question:
    """A prompt, and how many tokens are wanted."""

    prompt: str
    tokens: int


@dataclass(frozen=True)
class Models:
    """base: directory; variants: artifacts by name; nbytes: of one on the device, all alike.

    answers: the greedy one of each model (BASE is one) to each question, computed alone.
    """

    base: Path
    variants: dict[str, Path]
    nbytes: int
    answers: dict[tuple[str, Question], str]

    @property
    def names(self) -> list[str]:
        """The base first."""
        return [BASE, *self.variants]

    @property
    def questions(self) -> list[Question]:
        """All that have an answer."""
        return list(dict.fromkeys(question for _, question in self.answers))


def made(root: Path, *, variants: int, questions: int) -> Models:
    """Write them under `root`; each variant has weights of its own, and so another answer to most questions."""
    pair = make_pair(root, "llama")
    found: dict[str, Path] = {}
    for number in range(variants):
        finetuned = root / f"finetuned-{number}"
        shutil.copytree(pair.base, finetuned)
        edit(finetuned, lambda weights, seed=number: _moved(weights, seed))
        found[f"v{number}"] = root / f"v{number}"
        replace(pair, finetuned=finetuned).compress(found[f"v{number}"], recipe="deltazip-4bit")
        shutil.rmtree(finetuned)
    runtime = Runtime.from_base(pair.base)
    for name, artifact in found.items():
        runtime.load(artifact, name)
    asked = [Question(" ".join(WORDS[i * 7 % 80 : i * 7 % 80 + 1 + i % 6]), 3 + 5 * i % 22) for i in range(questions)]
    answers = {
        (name, question): runtime.generate([(None if name == BASE else name, question.prompt)], question.tokens)[0]
        for name in (BASE, *found)
        for question in asked
    }
    sizes = {one.nbytes for one in runtime.residency().variants}
    assert len(sizes) == 1, sizes
    return Models(pair.base, found, sizes.pop(), answers)


def _moved(weights: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: (one.float() + 0.03 * torch.randn(one.shape, generator=generator)).to(one.dtype)
        for name, one in sorted(weights.items())
    }
