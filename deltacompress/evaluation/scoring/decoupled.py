"""The decoupled runtime as a scorer: one base in memory, the variants beside it, rows of all of them in one batch.

Answers are written by the runtime's own scheduler: what is evaluated is what is served. Scoring runs the same modules,
through the batches of checkpoints.py, which share the prompt of a question among its choices. Variants of one base
mostly write the same, so an answer of another one is a draft: one forward tells how far this variant writes the same
too, and the scheduler goes on from there. Greedy answers stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.evaluation.scoring.checkpoints import CheckpointScorer, Variants
from deltacompress.evaluation.scoring.scorer import Prompt, Row
from deltacompress.models.generation import token_ids
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import BASE, Batch


class DecoupledScorer(CheckpointScorer):
    """A base and its deltas; a row's variant is the name that `load` was given, None is the base itself."""

    def __init__(self, runtime: Runtime, *, batch_size: int = 64) -> None:
        super().__init__(runtime.model.model, batch_size=batch_size)
        self._runtime = runtime

    @classmethod
    def open(
        cls,
        path: Path | Checkpoint,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 64,
        backend: str = "auto",
    ) -> DecoupledScorer:
        """Load the base in directory `path`; raises as Runtime.from_base."""
        where = path.path if isinstance(path, Checkpoint) else path
        runtime = Runtime.from_base(where, device=device, dtype=getattr(torch, dtype), backend=backend)
        return cls(runtime, batch_size=batch_size)

    def load(self, artifact: Path, name: str) -> None:
        """Add a variant; raises as Runtime.load."""
        self._runtime.load(artifact, name)

    def describe(self) -> str:
        """One line: device, dtype, backend and why, and how deltas are applied."""
        return self._runtime.describe()

    def generate(self, prompts: Sequence[Prompt], *, eos: int) -> list[tuple[int, ...]]:
        """As scorer.Scorer says."""
        ends = {name: self.ends(name) | {eos} for name in {prompt.variant for prompt in prompts}}
        found = self._checked_drafts(prompts)
        waiting: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            found[index] = _until(found[index], ends[prompt.variant])
            if len(found[index]) < prompt.max_new_tokens and not ends[prompt.variant].intersection(found[index][-1:]):
                waiting.setdefault(_asked(prompt.max_new_tokens, len(found[index])), []).append(index)
        for count, picked in sorted(waiting.items()):
            requests = [(prompts[index].variant, (*prompts[index].context, *found[index])) for index in picked]
            done = self._runtime.complete(requests, count, max_batch=self._batch_size)
            for index, completion in zip(picked, done, strict=True):
                ids = (*found[index], *completion.tokens)[: prompts[index].max_new_tokens]
                found[index] = _until(ids, ends[prompts[index].variant])
        return found

    @torch.inference_mode()
    def _checked_drafts(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """For each prompt the beginning of its answer that its draft could tell: as far as the variant agrees.

        The token at which it disagrees is its own, so it belongs to that beginning. In less than fp32 a batch's shape
        can turn a near tie, so drafts are left alone there.
        """
        found: list[tuple[int, ...]] = [()] * len(prompts)
        drafted = [index for index, prompt in enumerate(prompts) if prompt.draft and self.dtype == "float32"]
        for picked in self._batches([len(prompts[i].context) + len(prompts[i].draft) for i in drafted]):
            indices = self._ordered([drafted[k] for k in picked], [prompts[drafted[k]].variant for k in picked])
            rows = [Row(prompts[i].variant, prompts[i].context, prompts[i].draft) for i in indices]
            for index, logits in zip(indices, self._continuations(rows), strict=True):
                own, draft = logits.argmax(-1).tolist(), prompts[index].draft
                same = next((k for k, (one, other) in enumerate(zip(own, draft, strict=True)) if one != other), None)
                found[index] = draft if same is None else (*draft[:same], own[same])
        return found

    def ends(self, variant: str | None) -> frozenset[int]:
        """As scorer.Scorer says."""
        if variant is None:
            checkpoint = self._runtime.model.base.checkpoint
            return frozenset(token_ids(checkpoint.path, self._runtime.model.config, "eos_token_id"))
        opened = self._runtime.variants[variant].variant
        return frozenset(token_ids(opened.folder, opened.layout.config, "eos_token_id"))

    def vocabulary(self, variant: str | None) -> int:
        """As scorer.Scorer says."""
        model = self._runtime.model
        if variant is None:
            return model.vocabulary
        opened = self._runtime.variants[variant].variant
        return min(opened.vocabulary(path) for path in (model.embedding_path, model.head_path))

    def _slot(self, variant: str | None) -> int:
        return BASE if variant is None else self._runtime.variants[variant].slot

    @contextmanager
    def _serving(self, variants: Variants) -> Iterator[None]:
        names = {name for name in variants if name is not None}
        self._runtime.cache.acquire(names)
        try:
            with self._runtime.model.serving(Batch([self._slot(name) for name in variants], self._runtime.device)):
                yield
        finally:
            self._runtime.cache.release(names)

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


def _asked(limit: int, written: int) -> int:
    """How many tokens to ask for: what is left, rounded up to a power of two, so that few batches hold many rows."""
    return min(limit, 1 << (limit - written - 1).bit_length())


def _until(ids: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    """Up to the first token that ends a text, which is included."""
    return ids[: next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids))]
