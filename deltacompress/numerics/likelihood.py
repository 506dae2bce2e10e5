"""What logits say of given tokens, and how far one model's next-token distributions are from another's.

The one place for both: the runtime, the evaluation, the demo and a compression's own look at fidelity use these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltacompress.devices import sent
from deltacompress.errors import NumericsError

_AT_A_TIME = 1 << 23
"""Log-probabilities that are held in fp64 at once, 64 MiB."""


NOT_FINITE = "take a dtype with more range (float32 has most); where it is not finite in that either, train it again"
"""The way out, where a model's logits are not finite."""


class LogLikelihood(NamedTuple):
    """log_likelihood: sum over a continuation, in nats; greedy: each of its tokens is the most likely one."""

    log_likelihood: float
    greedy: bool


def score_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """f64 [2, tokens]: the log-probability of each target token, in nats, and whether it is the most likely one.

    logits: [tokens, vocabulary], each row those before its token; targets: int64 [tokens].
    """
    scores = logits.log_softmax(-1, dtype=torch.float32).gather(-1, targets[:, None])[:, 0]
    return torch.stack([scores.double(), (logits.argmax(-1) == targets).double()])


def log_likelihoods(scores: Tensor, lengths: Sequence[int]) -> list[LogLikelihood]:
    """Of continuations of these lengths, whose tokens' scores stand one after another, as `score_tokens` gives them.

    Waits for the device once.
    """
    pieces = scores.cpu().split(list(lengths), dim=1)
    return [LogLikelihood(float(piece[0].sum()), bool(piece[1].all())) for piece in pieces]


def not_finite(who: str, told: str = "") -> NumericsError:
    """The error of whoever gives such logits."""
    return NumericsError(f"{who} gives logits that are not finite{told}", way_out=NOT_FINITE)


def check_logits(pieces: Sequence[Tensor], variants: Sequence[str | None]) -> None:
    """Make sure that something can be scored by them: [tokens, vocabulary] of each variant (None: the model itself).

    Waits for the device once; raises NumericsError.
    """
    fine = torch.stack([say_something(one) for one in pieces]).tolist()
    for variant, is_fine in zip(variants, fine, strict=True):
        if not is_fine:
            raise not_finite("the model" if variant is None else f"variant {variant}")


def say_something(logits: Tensor) -> Tensor:
    """Whether no logits [..., vocabulary] are NaN or an infinity, but for tokens that are ruled out: bool, a scalar."""
    return logits.amax(-1).isfinite().all()


def mask_beyond(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits [rows, ..., vocabulary], -inf for the tokens beyond a row's own vocabulary; sizes: of these."""
    width = logits.shape[-1]
    if min(sizes) >= width:
        return logits
    own = sent(torch.tensor(sizes), logits.device).view(-1, *[1] * (logits.dim() - 1))
    return logits.masked_fill(torch.arange(width, device=logits.device) >= own, float("-inf"))


def kl_divergence(target: Tensor, found: Tensor) -> Tensor:
    """KL(target || found) of each row in nats, f64 [rows], computed in fp64.

    target, found: log-probabilities [rows, vocabulary] on one device. A token to which the target gives no probability
    costs nothing. Of unequal vocabularies, the tokens that only one has are left out.
    """
    width = min(target.shape[-1], found.shape[-1])
    pieces = (one[:, :width].split(max(_AT_A_TIME // width, 1)) for one in (target, found))
    return torch.cat([_divergence(p, q) for p, q in zip(*pieces, strict=True)])


def _divergence(target: Tensor, found: Tensor) -> Tensor:
    target, found = target.double(), found.double()
    return torch.where(target > float("-inf"), target.exp() * (target - found), 0.0).sum(-1)
