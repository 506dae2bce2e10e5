"""The decoupled runtime as a scorer: one base in memory, the variants beside it, rows of all of them in one batch.

Answers are written by the runtime's own scheduler: what is evaluated is what is served. Scoring runs the same modules,
through the batches of checkpoints.py, which share the prompt of a question among its choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.evaluation.checkpoints import CheckpointScorer, Variants
from deltacompress.evaluation.scorer import Prompt
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import BASE, Batch


class DecoupledScorer(CheckpointScorer):
    """A base and its deltas; a row's variant is the name that `load` was given, None is the base itself."""

    def __init__(self, runtime: Runtime, *, batch_size: int = 64) -> None:
        super().__init__(runtime.model.model, batch_size=batch_size)
        self._runtime = runtime

    @classmethod
    def open(
        cls, path: Path, *, device: str = "cpu", dtype: str = "float32", batch_size: int = 64, backend: str = "auto"
    ) -> DecoupledScorer:
        """Load the base in directory `path`; raises as Runtime.from_base."""
        runtime = Runtime.from_base(path, device=device, dtype=getattr(torch, dtype), backend=backend)
        return cls(runtime, batch_size=batch_size)

    def load(self, artifact: Path, name: str) -> None:
        """Add a variant; raises as Runtime.load."""
        self._runtime.load(artifact, name)

    def describe(self) -> str:
        """One line: device, dtype, backend and why, and how deltas are applied."""
        return self._runtime.describe()

    def generate(self, prompts: Sequence[Prompt], *, eos: int) -> list[tuple[int, ...]]:
        """As scorer.Scorer says; an answer also ends where the variant's own configuration ends one."""
        found: list[tuple[int, ...]] = [()] * len(prompts)
        for limit in sorted({prompt.max_new_tokens for prompt in prompts}):
            picked = [index for index, prompt in enumerate(prompts) if prompt.max_new_tokens == limit]
            requests = [(prompts[index].variant, prompts[index].context) for index in picked]
            done = self._runtime.complete(requests, limit, max_batch=self._batch_size)
            for index, completion in zip(picked, done, strict=True):
                ids = completion.tokens
                found[index] = ids[: ids.index(eos) + 1] if eos in ids else ids
        return found

    def _slot(self, variant: str | None) -> int:
        return BASE if variant is None else self._runtime.variants[variant].slot

    @contextmanager
    def _serving(self, variants: Variants) -> Iterator[None]:
        names = {name for name in variants if name is not None}
        self._runtime.residency.acquire(names)
        try:
            with self._runtime.model.serving(Batch([self._slot(name) for name in variants], self._runtime.device)):
                yield
        finally:
            self._runtime.residency.release(names)

    def _ordered(self, items: list[Any], variants: Variants) -> list[Any]:
        order = sorted(range(len(items)), key=lambda index: self._slot(variants[index]))
        return [items[index] for index in order]

    def _own_tokens(self, logits: Tensor, variants: Variants) -> Tensor:
        model = self._runtime.model
        sizes = [
            model.vocabulary if name is None else self._runtime.variants[name].variant.vocabulary(model.head_path)
            for name in variants
        ]
        if min(sizes) == logits.shape[-1]:
            return logits
        beyond = (
            torch.arange(logits.shape[-1], device=logits.device) >= torch.tensor(sizes, device=logits.device)[:, None]
        )
        return logits.masked_fill(beyond[:, None], float("-inf"))
