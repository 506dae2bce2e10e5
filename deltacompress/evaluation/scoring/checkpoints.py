"""Plain Hugging Face checkpoints as scorers: the fine-tuned model, the base, and restored direct compressions.

Two things make it quick on a CPU. Rows of like length share a batch, padded on the left, so that what is scored stands
at the end and the head sees only that. And choices of one question share its prompt: the prompt runs once, and each
choice goes on from its key-value cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.evaluation.scoring.scorer import Likelihood, Prompt, Row
from deltacompress.models import load
from deltacompress.models.generation import token_ids
from deltacompress.models.support import failing_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH_TOKENS = 8192
Variants = Sequence[str | None]


def load_model(path: Path | Checkpoint, *, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """Load the causal language model in directory `path`; raises as models.load.load_model and Checkpoint.open.

    path: or the opened checkpoint, whose files then are still the ones that were hashed.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    return load.load_model(checkpoint, device=torch.device(device), dtype=getattr(torch, dtype))


class CheckpointScorer:
    """One loaded causal language model; rows' variants are not looked at.

    batch_size: the most rows of one forward. ends: see `ends`.
    """

    def __init__(self, model: PreTrainedModel, *, batch_size: int = 64, ends: frozenset[int] = frozenset()) -> None:
        self._model = model.eval()
        self._batch_size = batch_size
        self._configured_ends = ends
        self._shares_prompts = _keeps_everything(model)

    @classmethod
    def open(
        cls, path: Path | Checkpoint, *, device: str = "cpu", dtype: str = "float32", batch_size: int = 64
    ) -> CheckpointScorer:
        """Load the checkpoint in directory `path`; as `load_model`."""
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        model = load_model(checkpoint, device=device, dtype=dtype)
        ends = token_ids(checkpoint.path, model.config, "eos_token_id")
        return cls(model, batch_size=batch_size, ends=frozenset(ends))

    @property
    def device(self) -> str:
        """Where the weights are."""
        return str(self._model.device)

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self._model.dtype).removeprefix("torch.")

    def ends(self, variant: str | None) -> frozenset[int]:
        """As scorer.Scorer says."""
        return self._configured_ends

    def vocabulary(self, variant: str | None) -> int:
        """As scorer.Scorer says."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    @torch.inference_mode()
    def loglikelihood(self, rows: Sequence[Row]) -> list[Likelihood]:
        """As scorer.Scorer says."""
        by_context: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        for index, row in enumerate(rows):
            by_context.setdefault((row.variant, row.context), []).append(index)
        shared = [group for group in by_context.values() if len(group) > 1 and self._shares_prompts]
        taken = {index for group in shared for index in group}
        alone = [index for index in range(len(rows)) if index not in taken]
        found: dict[int, Likelihood] = {}
        for picked in self._batches([len(rows[i].context) + len(rows[i].continuation) for i in alone]):
            indices = self._ordered([alone[k] for k in picked], [rows[alone[k]].variant for k in picked])
            for index, logits in zip(indices, self._continuations([rows[i] for i in indices]), strict=True):
                found[index] = _likelihood(logits, rows[index].continuation)
        for picked in self._batches([len(rows[group[0]].context) for group in shared]):
            groups = self._ordered([shared[k] for k in picked], [rows[shared[k][0]].variant for k in picked])
            found |= self._choices(rows, groups)
        return [found[index] for index in range(len(rows))]

    @torch.inference_mode()
    def log_probs(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """As scorer.Scorer says; the logits of one batch are held at a time."""
        for start in range(0, len(rows), self._batch_size):
            batch = rows[start : start + self._batch_size]
            order = self._ordered(list(range(len(batch))), [row.variant for row in batch])
            pieces = dict(zip(order, self._continuations([batch[i] for i in order]), strict=True))
            for index in range(len(batch)):
                yield pieces.pop(index).log_softmax(-1)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], *, eos: int) -> list[tuple[int, ...]]:
        """As scorer.Scorer says."""
        found: dict[int, tuple[int, ...]] = {}
        for picked in self._batches([len(prompt.context) + prompt.max_new_tokens for prompt in prompts]):
            found |= dict(zip(picked, self._greedy([prompts[i] for i in picked], self.ends(None) | {eos}), strict=True))
        return [found[index] for index in range(len(prompts))]

    # --- what the decoupled runtime does otherwise -------------------------------------------------------------------

    def _serving(self, variants: Variants) -> AbstractContextManager[None]:
        """In this block, forwards are of rows of these variants."""
        return nullcontext()

    def _ordered(self, items: list[Any], variants: Variants) -> list[Any]:
        """The items of a batch in the order that `_serving` wants."""
        return items

    def _own_tokens(self, logits: Tensor, variants: Variants) -> Tensor:
        """Logits [rows, positions, vocabulary] without tokens that a variant does not have."""
        return logits

    # -----------------------------------------------------------------------------------------------------------------

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices of rows of like length, the longest first, so that running out of memory happens at once."""
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        while order:
            size = max(1, min(self._batch_size, BATCH_TOKENS // max(lengths[order[-1]], 1)))
            picked, order = order[-size:], order[:-size]
            yield picked

    def _forward(self, ids: Tensor, mask: Tensor, variants: Variants, **more: Any) -> tuple[Tensor, Any]:
        """(f32 logits, cache) of left-padded rows; the positions of what is real count from 0."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with self._serving(variants), failing_forward(Path(self._model.config.name_or_path)):
            out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, **more)
        return self._own_tokens(out.logits.float(), variants), out.past_key_values

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Left-padded ids and attention mask, int64 [rows, longest]; what pads is masked, so any id will do."""
        longest = max(map(len, rows))
        ids = torch.tensor([[row[0]] * (longest - len(row)) + list(row) for row in rows], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self._model.device)
        return ids, mask

    def _continuations(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """f32 [len(continuation), vocabulary] logits for each row of one batch."""
        ids, mask = self._padded([(*row.context, *row.continuation[:-1]) for row in rows])
        keep = max(len(row.continuation) for row in rows)
        logits, _ = self._forward(ids, mask, [row.variant for row in rows], use_cache=False, logits_to_keep=keep)
        for index, row in enumerate(rows):
            yield logits[index, logits.shape[1] - len(row.continuation) :]

    def _choices(self, rows: Sequence[Row], groups: list[list[int]]) -> dict[int, Likelihood]:
        """Score the choices of several questions: each prompt once, then every choice from its cache."""
        found: dict[int, Likelihood] = {}
        variants = [rows[group[0]].variant for group in groups]
        ids, mask = self._padded([rows[group[0]].context for group in groups])
        first, cache = self._forward(ids, mask, variants, use_cache=True, logits_to_keep=1)
        for nth in range(max(map(len, groups))):
            # Questions with fewer choices answer their last one again: rows of a cache cannot be left out.
            chosen = [group[min(nth, len(group) - 1)] for group in groups]
            tails = [rows[index].continuation for index in chosen]
            logits = first
            if (longest := max(map(len, tails)) - 1) > 0:
                # Right of a short tail stands padding, which nothing that counts attends to.
                padded = [[*tail[:-1], *tail[:1] * (longest - len(tail) + 1)] for tail in tails]
                more = torch.tensor(padded, device=ids.device)
                seen = torch.cat([mask, mask.new_ones(len(tails), longest)], dim=1)
                further, _ = self._forward(more, seen, variants, past_key_values=cache, use_cache=True)
                logits = torch.cat([first, further], dim=1)
                cache.crop(-longest)
            for row, index in enumerate(chosen):
                found[index] = _likelihood(logits[row, : len(tails[row])], tails[row])
        return found

    def _greedy(self, prompts: Sequence[Prompt], ends: frozenset[int]) -> list[tuple[int, ...]]:
        """Greedy decoding of one batch; rows that have ended leave it."""
        ids, mask = self._padded([prompt.context for prompt in prompts])
        written: list[list[int]] = [[] for _ in prompts]
        alive, cache = list(range(len(prompts))), None
        while alive:
            kept = [prompts[index].variant for index in alive]
            logits, cache = self._forward(ids, mask, kept, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = logits[:, -1].argmax(-1)
            for index, token in zip(alive, tokens.tolist(), strict=True):
                written[index].append(token)
            stay = [
                k
                for k, i in enumerate(alive)
                if written[i][-1] not in ends and len(written[i]) < prompts[i].max_new_tokens
            ]
            rows = torch.tensor(stay, dtype=torch.int64, device=ids.device)
            if stay and len(stay) < len(alive):
                cache.batch_select_indices(rows)
            alive = [alive[k] for k in stay]
            ids = tokens[rows, None]
            mask = torch.cat([mask[rows], mask.new_ones(len(stay), 1)], dim=1)
        return [tuple(row) for row in written]


def _keeps_everything(model: PreTrainedModel) -> bool:
    """Whether its cache can be cut back to the end of a prompt; one that forgets (a sliding window, say) cannot."""
    config = model.config.get_text_config(decoder=True)
    if kinds := getattr(config, "layer_types", None):
        return all(kind == "full_attention" for kind in kinds)
    return all(getattr(config, name, None) is None for name in ("sliding_window", "attention_chunk_size"))


def _likelihood(logits: Tensor, continuation: tuple[int, ...]) -> Likelihood:
    """logits: f32 [len(continuation), vocabulary]."""
    target = torch.tensor(continuation, device=logits.device)
    scores = logits.log_softmax(-1).gather(-1, target[:, None])
    return Likelihood(float(scores.sum(dtype=torch.float64)), bool((logits.argmax(-1) == target).all()))
