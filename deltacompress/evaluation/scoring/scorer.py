"""The one scorer: rows of any variants to log-likelihoods and log-probabilities, prompts to greedy answers.

Two things make it quick on a CPU. Rows of like length share a batch, padded on the left, so that what is scored stands
at the end and the head sees only that. And choices of one question share its prompt: the prompt runs once, and each
choice goes on from its key-value cache. A row's answer does not depend on the rows beside it.

Variants of one base mostly write the same, so an answer of another one is a draft: one forward tells how far this
variant writes the same too, and it goes on from there. Greedy answers stay what they are.

`Runtime.loglikelihood` takes the same numbers from its logits (numerics/likelihood.py), but makes batches of its own:
it puts rows of one variant together, so that few are resident at once under a budget, and keeps no cache, so that it
serves models whose cache cannot be cut back. Batches here mix variants as they come, and questions share prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from deltacompress.evaluation.scoring.serving import (
    BATCH_ROWS,
    Begun,
    Prompt,
    Row,
    Serving,
    batches,
    forward,
    padded,
)
from deltacompress.numerics.likelihood import LogLikelihood, check_logits, log_likelihoods, score_tokens


class Scorer:
    """Scores rows, and writes answers, with what `serving` runs. batch_size, room: the most rows and tokens of one
    forward.
    """

    def __init__(self, serving: Serving, *, batch_size: int = BATCH_ROWS) -> None:
        self.serving = serving
        self.batch_size, self.room = batch_size, serving.room(batch_size)
        self._most = {"batch_size": self.batch_size, "most": self.room}
        self._shares_prompts = _keeps_everything(serving)

    def ends(self, variant: str | None) -> frozenset[int]:
        """Tokens that end a text by a model's own configuration, as generation uses it."""
        return self.serving.ends(variant)

    def vocabulary(self, variant: str | None) -> int:
        """Tokens that a model has; ids from there on must not be asked of it."""
        return self.serving.vocabulary(variant)

    @torch.inference_mode()
    def loglikelihood(self, rows: Sequence[Row]) -> list[LogLikelihood]:
        """One answer per row, in order."""
        questions: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        for index, row in enumerate(rows):
            questions.setdefault((row.variant, row.context), []).append(index)
        shared = [group for group in questions.values() if len(group) > 1 and self._shares_prompts]
        taken = {index for group in shared for index in group}
        alone = [index for index in range(len(rows)) if index not in taken]
        found: dict[int, LogLikelihood] = {}
        for batch in batches(alone, lambda index: rows[index].tokens, **self._most):
            indices = sorted(batch, key=lambda index: self.serving.slot(rows[index].variant))
            picked = [rows[index] for index in indices]
            found |= zip(indices, _scored(picked, self._continuations(picked)), strict=True)
        for groups in batches(shared, lambda group: len(rows[group[0]].context), **self._most):
            found |= self._choices(rows, sorted(groups, key=lambda group: self.serving.slot(rows[group[0]].variant)))
        return [found[index] for index in range(len(rows))]

    @torch.inference_mode()
    def log_probs(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """For each row, in order: f32 [len(continuation), vocabulary] log-probabilities of every continuation token.

        The logits of one batch are held at a time.
        """
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            order = sorted(range(len(batch)), key=lambda index: self.serving.slot(batch[index].variant))
            pieces = dict(zip(order, self._continuations([batch[i] for i in order]), strict=True))
            for index in range(len(batch)):
                yield pieces.pop(index).log_softmax(-1)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], *, eos: int) -> list[tuple[int, ...]]:
        """Greedy answers, in order, each up to `eos` or one of the model's own `ends`, which is included."""
        ends = {name: self.ends(name) | {eos} for name in {prompt.variant for prompt in prompts}}
        found = [
            _until(written, ends[prompt.variant])
            for prompt, written in zip(prompts, self._checked_drafts(prompts), strict=True)
        ]
        left: dict[int, Begun] = {}
        for index, prompt in enumerate(prompts):
            begun = Begun(prompt, found[index], ends[prompt.variant])
            if begun.left > 0 and not begun.ends.intersection(begun.written[-1:]):
                left[index] = begun
        done = self.serving.complete(list(left.values()), batch_size=self.batch_size)
        for (index, begun), more in zip(left.items(), done, strict=True):
            found[index] = (*begun.written, *_until(more[: begun.left], begun.ends))
        return found

    def _checked_drafts(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """For each prompt the beginning of its answer that its draft could tell: as far as the variant agrees.

        The token at which it disagrees is its own, so it belongs to that beginning. In less than fp32 a batch's shape
        can turn a near tie, so drafts are left alone there.
        """
        found: list[tuple[int, ...]] = [()] * len(prompts)
        plain = self.serving.model.dtype == torch.float32
        drafts = {
            index: Row(prompt.variant, prompt.context, prompt.draft)
            for index, prompt in enumerate(prompts)
            if prompt.draft and plain
        }
        for batch in batches(list(drafts), lambda index: drafts[index].tokens, **self._most):
            indices = sorted(batch, key=lambda index: self.serving.slot(drafts[index].variant))
            for index, logits in zip(indices, self._continuations([drafts[i] for i in indices]), strict=True):
                own, draft = logits.argmax(-1).tolist(), drafts[index].continuation
                same = next((k for k, (one, other) in enumerate(zip(own, draft, strict=True)) if one != other), None)
                found[index] = draft if same is None else (*draft[:same], own[same])
        return found

    def _continuations(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """f32 [len(continuation), vocabulary] logits for each row of one batch."""
        ids, mask = padded([(*row.context, *row.continuation[:-1]) for row in rows], self.serving.model.device)
        keep = max(len(row.continuation) for row in rows)
        variants = [row.variant for row in rows]
        logits, _ = forward(self.serving, variants, ids, mask, use_cache=False, logits_to_keep=keep)
        pieces = [logits[index, logits.shape[1] - len(row.continuation) :] for index, row in enumerate(rows)]
        check_logits(pieces, variants)
        yield from pieces

    def _choices(self, rows: Sequence[Row], groups: list[list[int]]) -> dict[int, LogLikelihood]:
        """Score the choices of several questions: each prompt once, then every choice from its cache."""
        found: dict[int, LogLikelihood] = {}
        variants = [rows[group[0]].variant for group in groups]
        ids, mask = padded([rows[group[0]].context for group in groups], self.serving.model.device)
        first, cache = forward(self.serving, variants, ids, mask, use_cache=True, logits_to_keep=1)
        for nth in range(max(map(len, groups))):
            # Questions with fewer choices answer their last one again: rows of a cache cannot be left out.
            chosen = [group[min(nth, len(group) - 1)] for group in groups]
            tails = [rows[index].continuation for index in chosen]
            logits = first
            if (longest := max(map(len, tails)) - 1) > 0:
                # Right of a short tail stands padding, which nothing that counts attends to.
                widened = [[*tail[:-1], *tail[:1] * (longest - len(tail) + 1)] for tail in tails]
                more = torch.tensor(widened, device=ids.device)
                seen = torch.cat([mask, mask.new_ones(len(tails), longest)], dim=1)
                further, _ = forward(self.serving, variants, more, seen, cache=cache, use_cache=True)
                logits = torch.cat([first, further], dim=1)
                cache.crop(-longest)
            picked = [rows[index] for index in chosen]
            pieces = [logits[row, : len(tail)] for row, tail in enumerate(tails)]
            check_logits(pieces, variants)
            found |= zip(chosen, _scored(picked, pieces), strict=True)
        return found


def _keeps_everything(serving: Serving) -> bool:
    """Whether its cache can be cut back to the end of a prompt; one that forgets (a sliding window, say) cannot."""
    config = serving.model.config.get_text_config(decoder=True)
    if kinds := getattr(config, "layer_types", None):
        return all(kind == "full_attention" for kind in kinds)
    return all(getattr(config, name, None) is None for name in ("sliding_window", "attention_chunk_size"))


def _scored(rows: Sequence[Row], logits: Iterable[Tensor]) -> list[LogLikelihood]:
    """logits: for each row f32 [len(continuation), vocabulary]."""
    scores = [
        score_tokens(piece, torch.tensor(row.continuation, device=piece.device))
        for row, piece in zip(rows, logits, strict=True)
    ]
    return log_likelihoods(torch.cat(scores, dim=1), [len(row.continuation) for row in rows])


def _until(ids: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    """Up to the first token that ends a text, which is included."""
    return ids[: next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids))]
