"""The next token of every row of a step, and what was asked to be told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltacompress.devices import fetched
from deltacompress.numerics.likelihood import mask_beyond
from deltacompress.runtime.batch import to_device
from deltacompress.runtime.engine.requests import Picked, Request
from deltacompress.runtime.engine.sampling.draws import gumbel, key
from deltacompress.runtime.engine.sampling.shaping import adjusted, adjusts, drawable


class Wanted(NamedTuple):
    """A token whose log-probability is to be told, with so many of the likeliest ones."""

    token: int
    top: int


@torch.inference_mode()
def choose(logits: Tensor, requests: Sequence[Request]) -> list[Picked]:
    """A token for each request, from logits [requests, vocabulary].

    Waits for the device at its end, and once more where log-probabilities are asked for: these are of the logits as the
    model gives them, before any wish.
    """
    logits = mask_beyond(logits, [request.vocabulary for request in requests])
    tokens: list[int] = fetched(_shaped(logits, requests).argmax(-1)).tolist()
    told = [row for row, one in enumerate(requests) if one.sampling.logprobs is not None]
    wanted = [Wanted(tokens[row], requests[row].sampling.logprobs or 0) for row in told]
    picked = [Picked(token, None, ()) for token in tokens]
    for row, one in zip(told, score(logits[to_device(told, logits.device)], wanted) if told else (), strict=True):
        picked[row] = one
    return picked


@torch.inference_mode()
def score(logits: Tensor, wanted: Sequence[Wanted]) -> list[Picked]:
    """Log-probabilities of given tokens and of the likeliest in their place; logits: [tokens, vocabulary]."""
    scores = logits.log_softmax(-1, dtype=torch.float32)
    chosen = scores.gather(-1, to_device([one.token for one in wanted], logits.device)[:, None])
    most = min(max(one.top for one in wanted), logits.shape[-1])
    values, indices = scores.topk(most, dim=-1)
    # tokens are whole numbers below 2^53: one copy brings all
    numbers: list[list[float]] = fetched(torch.cat([chosen.double(), values.double(), indices.double()], -1)).tolist()
    return [
        Picked(
            one.token,
            row[0],
            tuple((int(row[1 + most + at]), row[1 + at]) for at in range(min(one.top, most))),
        )
        for one, row in zip(wanted, numbers, strict=True)
    ]


def _shaped(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Whose largest value in each row is the token to take; logits themselves, where nobody wishes anything."""
    changed = [row for row, one in enumerate(requests) if adjusts(one)]
    drawn = [row for row, one in enumerate(requests) if one.sampling.temperature > 0]
    if not changed and not drawn:
        return logits
    logits = logits.float().clone()
    for row in changed:
        logits[row] = adjusted(logits[row], requests[row])
    if drawn:
        rows = to_device(drawn, logits.device)
        keys = [key(requests[row].sampling.seed, len(requests[row].tokens)) for row in drawn]
        noise = gumbel(keys, logits.shape[-1], logits.device)
        logits[rows] = drawable(logits[rows], [requests[row].sampling for row in drawn]) + noise
    return logits
