"""The decoupled runtime behind a scorer: one base in memory, the variants beside it, rows of all of them in one batch.

What is evaluated is what is served: forwards run the runtime's modules, and its own scheduler writes the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.evaluation.scoring.serving import Begun, Serving
from deltacompress.models.architectures.caches import cache_of, with_cache
from deltacompress.models.generation import token_ids
from deltacompress.models.support import failing_forward
from deltacompress.numerics.likelihood import mask_beyond
from deltacompress.runtime import Runtime


class DecoupledServing(Serving):
    """A base and its deltas; a row's variant is the name that `load` was given, None is the base itself."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.model = runtime.model.model

    @classmethod
    def open(
        cls, path: Path, *, device: str = "cpu", dtype: str = "float32", backend: str = "auto"
    ) -> DecoupledServing:
        """Load the base in directory `path`; raises as Runtime.from_base."""
        return cls(Runtime.from_base(path, device=device, dtype=getattr(torch, dtype), backend=backend))

    def load(self, artifact: Path, name: str, over: Path | None = None) -> list[str]:
        """Add a variant, and return what a user should know of it; over: the delta that an adapter goes over; raises
        as Runtime.load.
        """
        known = len(self.runtime.notes)
        self.runtime.load(artifact, name, over=over)
        return self.runtime.notes[known:]

    def describe(self) -> str:
        """One line: device, dtype, backend and why, and how deltas are applied."""
        return self.runtime.describe()

    @override
    def ends(self, variant: str | None) -> frozenset[int]:
        if variant is None:
            checkpoint = self.runtime.model.base.checkpoint
            return frozenset(token_ids(checkpoint.path, self.runtime.model.config, "eos_token_id"))
        opened = self.runtime.variants[variant].variant
        return frozenset(token_ids(opened.generation_folder, opened.layout.config, "eos_token_id"))

    @override
    def vocabulary(self, variant: str | None) -> int:
        model = self.runtime.model
        if variant is None:
            return model.vocabulary
        opened = self.runtime.variants[variant].variant
        return min(opened.vocabulary(path) for path in (model.embedding_path, model.head_path))

    @override
    def slot(self, variant: str | None) -> int:
        return 0 if variant is None else self.runtime.variants[variant].number

    @override
    def forward(self, variants: Sequence[str | None], **inputs: Any) -> tuple[Tensor, Any]:
        with self.runtime.serving(variants), failing_forward(Path(self.model.config.name_or_path)):
            out = self.model(**with_cache(self.model, inputs))
        return mask_beyond(out.logits.float(), [self._tokens_out(name) for name in variants]), cache_of(out)

    @override
    def complete(self, answers: Sequence[Begun], *, batch_size: int) -> list[tuple[int, ...]]:
        by_count: dict[int, list[int]] = {}
        for index, answer in enumerate(answers):
            by_count.setdefault(_count(answer), []).append(index)
        found: list[tuple[int, ...]] = [()] * len(answers)
        for count, picked in sorted(by_count.items()):
            requests = [(answers[index].prompt.variant, answers[index].ids) for index in picked]
            done = self.runtime.complete(requests, count, max_batch=batch_size)
            for index, completion in zip(picked, done, strict=True):
                ended = answers[index].ends.intersection(completion.tokens)
                if completion.error is not None and not ended and len(completion.tokens) < answers[index].left:
                    raise completion.error
                found[index] = tuple(completion.tokens)
        return found

    def _tokens_out(self, variant: str | None) -> int:
        """Tokens that a variant may write."""
        model = self.runtime.model
        if variant is None:
            return model.vocabulary
        return self.runtime.variants[variant].variant.vocabulary(model.head_path)


def _count(answer: Begun) -> int:
    """How many tokens to ask for: what is left, rounded up to a power of two, so that few batches hold many rows."""
    return min(answer.prompt.max_new_tokens, 1 << (answer.left - 1).bit_length())
