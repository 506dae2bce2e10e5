"""The fine-tuned model of a task, which everything is measured against: its answers, and what it gives each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench.figures import accuracy, flips
from deltacompress.demo.score import completions, score_model
from deltacompress.errors import NumericsError
from deltacompress.evaluation.scoring.checkpoints import PlainServing, load_model
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import batches
from deltacompress.evaluation.scoring.statistics import mcnemar, ratio_interval
from deltacompress.evaluation.tasks.records import Sample
from deltacompress.models.tokenizers import load_tokenizer
from deltacompress.numerics.likelihood import kl_divergence


class Reference:
    """In memory: f32 log-probabilities of every token of every right completion, over the vocabulary."""

    def __init__(self, finetuned: Path, samples: Sequence[Sample], device: str, *, scores: bool) -> None:
        """scores: whether answers are scored, too, and not only the divergence taken."""
        self._finetuned, self._samples, self._device = finetuned, samples, device
        self._tokenizer = load_tokenizer(finetuned)
        model = load_model(finetuned, device=device)
        rows = completions(self._tokenizer, samples)
        self._batches = list(batches(rows, lambda row: row.tokens))
        scorer = Scorer(PlainServing(model))
        self._targets = [[one.cpu() for one in scorer.log_probs(batch)] for batch in self._batches]
        self._right = score_model(model, self._tokenizer, samples).right if scores else None

    def figures(self, path: Path) -> dict[str, Any]:
        """kl in nats a token, with its 95 % interval where samples are enough; the answers against the fine-tuned's."""
        model = load_model(path, device=self._device)
        scorer = Scorer(PlainServing(model))
        sums, tokens = [], []
        for batch, targets in zip(self._batches, self._targets, strict=True):
            for target, found in zip(targets, scorer.log_probs(batch), strict=True):
                sums.append(float(kl_divergence(target, found.cpu()).sum()))
                tokens.append(len(target))
        low, high = ratio_interval(torch.tensor(sums, dtype=torch.float64).numpy(), torch.tensor(tokens).numpy())
        row: dict[str, Any] = {"kl": sum(sums) / sum(tokens)}
        if not math.isfinite(row["kl"]):
            raise NumericsError("what was made of it does not give finite answers", where=self._finetuned)
        if math.isfinite(low):
            row |= {"kl_low": low, "kl_high": high}
        return row | (self._answers(model) if self._right is not None else {})

    def _answers(self, model: Any) -> dict[str, Any]:
        assert self._right is not None
        right = score_model(model, self._tokenizer, self._samples).right
        own, before = accuracy(sum(right), len(right)), accuracy(sum(self._right), len(self._right))
        difference = own["accuracy"] - before["accuracy"]
        return {"accuracy": own["accuracy"], "difference": difference, "mcnemar_p": mcnemar(*flips(right, self._right))}
