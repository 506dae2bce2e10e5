"""Fidelity: how near the compressed model's next-token distributions are to the fine-tuned model's.

A score moves in whole answers, and can stay while the model has drifted; the divergence cannot. On the held-out right
answers of a task (after the same prompts), per token: KL(fine-tuned || compressed) in nats, whether both find the same
token most likely, and the loss of each. Both models run side by side, batch by batch; per sample only five numbers are
kept, so logits never pile up, however large the vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltacompress.evaluation.scoring.panel import Ids, Panel
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Row
from deltacompress.evaluation.scoring.statistics import ratio_interval
from deltacompress.evaluation.scoring.store import key_of
from deltacompress.numerics.likelihood import kl_divergence
from deltacompress.reporter import Reporter

ROWS, POSITIONS = 32, 8192
LOGITS_AT_A_TIME = 1 << 27
"""Log-probabilities of one model that are held at once: half a GiB in fp32 (one sample may have more)."""


@dataclass(frozen=True, slots=True)
class FidelityResult:
    """Over all answer tokens of a task. kl: mean, in nats/token, with its bootstrap interval over samples (infinite
    if they are fewer than statistics.FEWEST).

    top1: share of tokens where both models agree. perplexity_ratio: exp(loss - reference_loss). loss,
    reference_loss: mean negative log-likelihood in nats/token. answers, reference_answers: for each sample the
    log-probability of its whole right answer, in nats.
    """

    tokens: int
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    loss: float
    reference_loss: float
    answers: tuple[float, ...] = ()
    reference_answers: tuple[float, ...] = ()

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the compressed model / that of the fine-tuned one; 1 where nothing was lost."""
        return math.exp(self.loss - self.reference_loss)


def measure(
    panel: Panel,
    reference: Scorer,
    reference_identity: str,
    pairs: Sequence[tuple[Ids, Ids]],
    *,
    confidence: float,
    seed: int,
    reporter: Reporter,
) -> dict[str, FidelityResult]:
    """Every subject of a panel against the reference, on (context, right answer) pairs.

    confidence: of the intervals. What a store already holds (of an interrupted run) is not computed again.
    """
    keys = [key_of("fidelity", reference_identity, pair) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]) - len(pairs[index][1]))
    missing = [i for i in order if any(keys[i] not in store for store in panel.stores.values())]
    if missing:
        reporter.phase(f"fidelity: {', '.join(panel.variants)}", len(missing))
    done, vocabulary = 0, reference.vocabulary(None)
    while done < len(missing):
        left = [pairs[i] for i in missing[done : done + ROWS]]
        size = _batch(left, vocabulary)
        began = time.monotonic()
        _compare(panel, reference, left[:size], [keys[i] for i in missing[done : done + size]])
        panel.seconds += time.monotonic() - began
        done += size
        for _ in range(size):
            reporter.step("")
    return {label: _result([store[key] for key in keys], confidence, seed) for label, store in panel.stores.items()}


def _batch(pairs: Sequence[tuple[Ids, Ids]], vocabulary: int) -> int:
    """How many of these pairs, the longest first, make a batch with a bounded number of positions and logits."""
    size = min(len(pairs), max(1, POSITIONS // (len(pairs[0][0]) + len(pairs[0][1]))))
    while size > 1 and size * max(len(answer) for _, answer in pairs[:size]) * vocabulary > LOGITS_AT_A_TIME:
        size -= 1
    return size


def _compare(panel: Panel, reference: Scorer, pairs: list[tuple[Ids, Ids]], keys: list[str]) -> None:
    targets = list(reference.log_probs([Row(None, *pair) for pair in pairs]))
    labels, together = list(panel.variants), panel.scorer.room // POSITIONS
    for begin in range(0, len(labels), together):
        some = labels[begin : begin + together]
        found = panel.scorer.log_probs([Row(panel.variants[label], *pair) for label in some for pair in pairs])
        for label in some:
            samples = [_sample(target, next(found), answer) for target, (_, answer) in zip(targets, pairs, strict=True)]
            panel.stores[label].add(zip(keys, samples, strict=True))


def _sample(target: Tensor, found: Tensor, answer: Ids) -> list[Any]:
    """[tokens, sum of KL, agreements, loss sum, reference loss sum] from log-probabilities [answer, vocabulary]."""
    width = min(target.shape[-1], found.shape[-1])  # rows that one of the two does not have hold no probability there
    target, found = target[:, :width], found[:, :width].to(target.device)
    ids = torch.tensor(answer, device=target.device)[:, None]
    sums = [
        kl_divergence(target, found).sum(),
        (target.argmax(-1) == found.argmax(-1)).sum(),
        -found.gather(-1, ids).sum(dtype=torch.float64),
        -target.gather(-1, ids).sum(dtype=torch.float64),
    ]
    kl, same, *losses = torch.stack([one.double() for one in sums]).tolist()  # one wait for the device
    return [len(answer), kl, int(same), *losses]


def _result(samples: list[list[Any]], confidence: float, seed: int) -> FidelityResult:
    table = np.array(samples, dtype=np.float64)
    tokens, kl, agree, loss, reference_loss = table.T
    total = tokens.sum()
    low, high = ratio_interval(kl, tokens, confidence=confidence, seed=seed)
    return FidelityResult(
        int(total),
        float(kl.sum() / total),
        low,
        high,
        float(agree.sum() / total),
        float(loss.sum() / total),
        float(reference_loss.sum() / total),
        tuple((-loss).tolist()),
        tuple((-reference_loss).tolist()),
    )
