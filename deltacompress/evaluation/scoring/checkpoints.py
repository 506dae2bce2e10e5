"""Plain Hugging Face checkpoints behind a scorer: the fine-tuned model, and what others restored or compressed.

Also those that the runtime cannot serve: norms of its own kind, or weights in a format that transformers' hooks unpack.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.evaluation.scoring.serving import Begun, Serving, batches, forward, padded
from deltacompress.models import load
from deltacompress.models.architectures.caches import cache_of, with_cache
from deltacompress.models.generation import token_ids
from deltacompress.models.support import failing_forward
from deltacompress.numerics.likelihood import check_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(path: Path | Checkpoint, *, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """Load the causal language model in directory `path`; raises as models.load.load_model and Checkpoint.open.

    path: or the opened checkpoint, whose files then are still the ones that were hashed.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    return load.load_model(checkpoint, device=torch.device(device), dtype=getattr(torch, dtype))


class PlainServing(Serving):
    """One loaded causal language model; rows' variants are not looked at. ends: see `Serving.ends`."""

    def __init__(self, model: PreTrainedModel, *, ends: frozenset[int] = frozenset()) -> None:
        self.model = model.eval()
        self._ends = ends

    @classmethod
    def open(cls, path: Path | Checkpoint, *, device: str = "cpu", dtype: str = "float32") -> PlainServing:
        """Load the checkpoint in directory `path`; as `load_model`."""
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        model = load_model(checkpoint, device=device, dtype=dtype)
        return cls(model, ends=frozenset(token_ids(checkpoint.path, model.config, "eos_token_id")))

    @override
    def ends(self, variant: str | None) -> frozenset[int]:
        return self._ends

    @override
    def vocabulary(self, variant: str | None) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @override
    def slot(self, variant: str | None) -> int:
        return 0

    @override
    def forward(self, variants: Sequence[str | None], **inputs: Any) -> tuple[Tensor, Any]:
        with failing_forward(Path(self.model.config.name_or_path)):
            out = self.model(**with_cache(self.model, inputs))
        return out.logits.float(), cache_of(out)

    @override
    def complete(self, answers: Sequence[Begun], *, batch_size: int) -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        order = range(len(answers))
        most = self.room(batch_size)
        for picked in batches(order, lambda index: answers[index].tokens, batch_size=batch_size, most=most):
            found |= zip(picked, self._greedy([answers[index] for index in picked]), strict=True)
        return [found[index] for index in order]

    def _greedy(self, answers: Sequence[Begun]) -> list[tuple[int, ...]]:
        """Greedy decoding of one batch; rows that have ended leave it."""
        ids, mask = padded([answer.ids for answer in answers], self.model.device)
        written: list[list[int]] = [[] for _ in answers]
        alive, cache = list(range(len(answers))), None
        while alive:
            variants = [answers[index].prompt.variant for index in alive]
            logits, cache = forward(self, variants, ids, mask, cache=cache, use_cache=True, logits_to_keep=1)
            check_logits([logits[:, -1]], [None])
            tokens = logits[:, -1].argmax(-1)
            for index, token in zip(alive, tokens.tolist(), strict=True):
                written[index].append(token)
            stay = [
                k
                for k, i in enumerate(alive)
                if written[i][-1] not in answers[i].ends and len(written[i]) < answers[i].left
            ]
            rows = torch.tensor(stay, dtype=torch.int64, device=ids.device)
            if stay and len(stay) < len(alive):
                cache.batch_select_indices(rows)
            alive = [alive[k] for k in stay]
            ids = tokens[rows, None]
            mask = torch.cat([mask[rows], mask.new_ones(len(stay), 1)], dim=1)
        return [tuple(row) for row in written]
