"""What one change of a model does to its answers: its hidden states with it, layer by layer, then the logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.held_back import HeldBack
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.likelihood import kl_divergence

_LOGITS_AT_A_TIME = 1 << 26
_MOST_GIVEN = 256
"""Tokens that are not to be written, at most, at which answers are compared all the same."""


@dataclass(eq=False)
class Probe:
    """Hidden states of each batch with some weights changed. head: what is in the place of the head, if that is.

    kl: KL(fine-tuned || this), sums over the tokens that are to be written, and over the others. records: the first of
    these of each record, f64 [records].
    """

    hidden: list[Tensor]
    head: Tensor | None = None
    kl: list[float] = field(default_factory=lambda: [0.0, 0.0])
    records: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


class HeldStreams:
    """Held-back records on their way through a model, changed and unchanged."""

    def __init__(self, skeleton: Skeleton, batches: Sequence[HeldBack]) -> None:
        """The skeleton must have the embedding."""
        self._skeleton, self._batches = skeleton, batches
        self._calls: list[list[LayerCall]] = []
        every = sum(int(one.given.sum()) for one in batches) // _MOST_GIVEN + 1
        self._at = [(_places(skeleton, one.written), _places(skeleton, one.given)[::every]) for one in batches]
        # What is measured is small: products are as exact as they come at a forward's speed.
        self._precision = Precision("tf32" if skeleton.device.type == "cuda" else "fp32")
        self.clean = self.captured()

    @property
    def tokens(self) -> tuple[int, int]:
        """How many tokens are to be written, and how many others are looked at."""
        written, given = (sum(len(one[kind]) for one in self._at) for kind in (0, 1))
        return written, given

    def captured(self) -> list[Tensor]:
        """Hidden states before the first layer, with the outer weights that the skeleton has."""
        hidden = []
        with self._precision.products():
            for batch in self._batches:
                states, calls = self._skeleton.capture(batch.ids)
                hidden.append(states)
                if len(self._calls) < len(self._batches):
                    self._calls.append(calls)
        return hidden

    def through(self, i: int, hidden: Sequence[Tensor], weights: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """The same after layer i, with these weights in it for this once."""
        before = self._skeleton.weights(weights or ())
        self._skeleton.swap(weights or {})
        with self._precision.products():
            out = [self._skeleton.run_layer(i, one, calls[i]) for one, calls in zip(hidden, self._calls, strict=True)]
        self._skeleton.swap(before)
        return out

    def measure(self, head: str, probes: Iterable[Probe]) -> None:
        """Add up the divergences of probes; the skeleton must be as its fine-tuned head finds it."""
        probes, own = list(probes), self._skeleton.weights([head])
        piece, before = max(_LOGITS_AT_A_TIME // own[head].shape[0], 1), 0
        for probe in probes:
            probe.records = torch.zeros(sum(len(one.ids) for one in self._batches), dtype=torch.float64)
        for k, (places, batch) in enumerate(zip(self._at, self._batches, strict=True)):
            for kind, at in enumerate(places):
                for some in at.split(piece) if len(at) else ():
                    target, record = self._log_probabilities(self.clean[k], some), some.cpu() // batch.ids.shape[1]
                    for probe in probes:
                        if probe.head is not None:
                            self._skeleton.swap({head: probe.head})
                        found = self._log_probabilities(probe.hidden[k], some)
                        self._skeleton.swap(own)
                        per = kl_divergence(target, found).double().cpu()
                        probe.kl[kind] += float(per.sum())
                        if kind == 0:
                            probe.records.index_add_(0, before + record, per)
            before += len(batch.ids)

    def answers(self) -> list[Tensor]:
        """Log-probabilities where something is to be written, f32 [tokens, vocabulary] of each batch."""
        return [self._log_probabilities(hidden, at) for hidden, (at, _) in zip(self.clean, self._at, strict=True)]

    def _log_probabilities(self, hidden: Tensor, at: Tensor) -> Tensor:
        with self._precision.products():
            chosen = hidden.flatten(0, 1)[at].unsqueeze(1)  # of one token each: some models count positions here
            return torch.log_softmax(self._skeleton.run_head(chosen)[:, 0].float(), -1)


def _places(skeleton: Skeleton, mask: Tensor) -> Tensor:
    return mask.to(skeleton.device).flatten().nonzero().squeeze(1)
