"""The next token of every row of a step, and what was asked to be told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltacompress.devices import fetching
from deltacompress.numerics.likelihood import mask_beyond
from deltacompress.runtime.batch import to_device
from deltacompress.runtime.engine.requests import NO_TOKEN, Picked, Request
from deltacompress.runtime.engine.sampling.draws import gumbel, key
from deltacompress.runtime.engine.sampling.shaping import adjusted, adjusts, drawable


class Wanted(NamedTuple):
    """A token whose log-probability is to be told, with so many of the likeliest ones."""

    token: int
    top: int


class Choice:
    """A token for each request, on its way to the host, with what was asked to be told of it.

    tokens: int64 [requests], where the device has them.
    """

    @torch.inference_mode()
    def __init__(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """logits: [requests, vocabulary]; what is launched after this may write over them."""
        logits = mask_beyond(logits, [request.vocabulary for request in requests])
        most, self.tokens = _shaped(logits, requests).max(-1)  # NaN counts as more than any number
        self._here = fetching(self.tokens.where(most.isfinite(), NO_TOKEN))
        self._told = {row: top for row, one in enumerate(requests) if (top := one.sampling.logprobs) is not None}
        if self._told:
            rows = to_device([*self._told], logits.device)
            self._scores = _scoring(logits[rows], self.tokens[rows], [*self._told.values()])

    def wait(self) -> list[Picked]:
        """Them, once the device has come to them; NO_TOKEN, where logits are not finite. Log-probabilities are of the
        logits as the model gives them, before any wish.
        """
        picked = [Picked(token, None, ()) for token in self._here().tolist()]
        if self._told:
            for row, one in zip(self._told, self._scores(), strict=True):
                picked[row] = one._replace(token=picked[row].token)
        return picked


def choose(logits: Tensor, requests: Sequence[Request]) -> list[Picked]:
    """A token for each request, from logits [requests, vocabulary]; see Choice."""
    return Choice(logits, requests).wait()


@torch.inference_mode()
def score(logits: Tensor, wanted: Sequence[Wanted]) -> list[Picked]:
    """Log-probabilities of given tokens and of the likeliest in their place; logits: [tokens, vocabulary]."""
    return _scoring(logits, to_device([one.token for one in wanted], logits.device), [one.top for one in wanted])()


def _scoring(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Callable[[], list[Picked]]:
    """As `score`, begun; what is returned waits for it. tokens: int64 [tokens]."""
    scores = logits.log_softmax(-1, dtype=torch.float32)
    chosen = scores.gather(-1, tokens[:, None])
    most = min(max(tops), logits.shape[-1])
    values, indices = scores.topk(most, dim=-1)
    # tokens are whole numbers below 2^53: one copy brings all
    here = fetching(torch.cat([tokens[:, None].double(), chosen.double(), values.double(), indices.double()], -1))

    def wait() -> list[Picked]:
        return [
            Picked(
                int(token),
                logprob,
                tuple((int(row[most + at]), row[at]) for at in range(min(top, most))),
            )
            for (token, logprob, *row), top in zip(here().tolist(), tops, strict=True)
        ]

    return wait


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
