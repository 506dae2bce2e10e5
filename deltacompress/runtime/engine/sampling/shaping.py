"""What a request's wishes do to its logits before a token is taken: first its penalties, then what may be drawn.

In this order: repetition penalty (Keskar et al., CTRL, 2019, section 4.1), presence and frequency penalty, biases, no
end token yet; then, for draws alone, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deltacompress.runtime.batch import upload
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.requests import Request

_NEVER = float("-inf")
_COLDEST = 1e-30
"""Temperatures below it, which fp32 may not have, are as good as it: one token is left."""


def adjusts(request: Request) -> bool:
    """Whether `adjusted` changes anything for this request."""
    sampling = request.sampling
    penalties = (sampling.repetition_penalty != 1, sampling.presence_penalty, sampling.frequency_penalty)
    return any(penalties) or bool(sampling.logit_bias) or len(request.tokens) < sampling.min_tokens


def adjusted(logits: Tensor, request: Request) -> Tensor:
    """f32 [vocabulary]: logits [vocabulary] with penalties, biases, and without an end token that may not come yet."""
    sampling, device = request.sampling, logits.device
    logits = logits.float().clone()
    if sampling.repetition_penalty != 1:
        known = range(logits.shape[-1])  # an embedding may have more tokens than the head
        seen = _index([one for one in {*request.ids, *request.tokens} if one in known], logits)
        found = logits[seen]
        logits[seen] = torch.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(request.tokens)
        times = upload(list(counts.values()), torch.float32, device)
        logits[_index(counts, logits)] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        logits[_index(tokens, logits)] += upload(biases, torch.float32, device)
    if len(request.tokens) < sampling.min_tokens and request.eos:
        logits.index_fill_(0, _index([one for one in request.eos if one < logits.shape[-1]], logits), _NEVER)
    return logits


def drawable(logits: Tensor, wishes: Sequence[Sampling]) -> Tensor:
    """f32 log-probabilities [rows, vocabulary] at each row's temperature, -inf for what it may not draw."""
    warm = _column([max(one.temperature, _COLDEST) for one in wishes], logits)
    logits = logits.float()
    scores = ((logits - logits.amax(-1, keepdim=True)) / warm).log_softmax(-1)
    if any(one.min_p for one in wishes):
        least = _column([one.min_p for one in wishes], logits).log()
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + least, _NEVER)
    narrow = [row for row, one in enumerate(wishes) if one.top_k or one.top_p < 1]
    if narrow:
        rows = upload(narrow, torch.int64, logits.device)
        scores[rows] = _narrowed(scores[rows], [wishes[row] for row in narrow])
    return scores


def _narrowed(scores: Tensor, wishes: Sequence[Sampling]) -> Tensor:
    """Of each row its top_k likeliest, and of these the likeliest that come to top_p of their probability."""
    width = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    limits = upload([one.top_k or width for one in wishes], torch.int64, scores.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(width, device=scores.device) >= limits, _NEVER)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    share = upload([one.top_p for one in wishes], torch.float64, scores.device)[:, None]
    ordered = ordered.masked_fill(before >= share, _NEVER)
    return torch.full_like(scores, _NEVER).scatter_(-1, order, ordered)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(values, torch.float32, like.device)[:, None]


def _index(tokens: Iterable[int], logits: Tensor) -> Tensor:
    return upload(list(tokens), torch.int64, logits.device)
