"""KL(fine-tuned || restored) on held-back records, of an artifact, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.side_by_side import side_by_side
from deltacompress.budget.measuring.probes import HeldStreams
from deltacompress.calibration.held_back import HeldBack
from deltacompress.checkpoints.pairing import Pairing
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.steps import RESTORING
from deltacompress.devices import current, free_bytes
from deltacompress.errors import NumericsError
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.finite import all_finite
from deltacompress.numerics.likelihood import kl_divergence

_THREADS = 4
"""That read tensors, or restore them: as many, and one more, are in memory beside the model."""


@dataclass(frozen=True, slots=True)
class Judged:
    """kl: in nats/token over the tokens that are to be written. tokens: how many.

    error: its standard error, of records drawn at random: tokens of one answer are no more than that together.
    """

    kl: float
    error: float
    tokens: int

    @property
    def bound(self) -> float:
        """What the KL of all such tokens is at most: the one-sided 95 % bound."""
        return self.kl + 1.645 * self.error


@dataclass(frozen=True, slots=True)
class Against:
    """Of the base: KL(fine-tuned || base), and the loss of each on what is to be written, in nats/token."""

    kl: float
    loss: float
    finetuned_loss: float


class Judge:
    """What answers are compared with: the fine-tuned model's log-probabilities, computed once."""

    def __init__(self, skeleton: Skeleton, finetuned: Checkpoint, batches: Sequence[HeldBack]) -> None:
        self._skeleton, self._batches = skeleton, batches
        self._record = _records(batches)
        self._targets = self._answers(finetuned.read, batches)

    def judge(self, artifact: str, base: Checkpoint) -> Judged:
        """Of an artifact on its base; raises as Delta.restored."""
        delta = load_delta(artifact)

        def restored(name: str) -> Tensor:
            record = delta.record(name)
            where = self._place(math.prod(record.shape)) if record.status == "coded" else None
            return delta.restored(name, delta.read_base(name, base, where), where)

        # what nvCOMP takes of a GPU, nobody counts
        threads = _THREADS if delta.manifest.lossless in ("none", "zstd") else 1
        found = self._answers(restored, self._batches, threads)
        per = self._divergences(found, self._targets)
        if not all_finite(per):
            raise NumericsError("what it restores does not give finite answers", where=artifact)
        return Judged(float(per.mean()), error_by_record(per, self._record), len(per))

    def against_base(self, pairing: Pairing, *, one_in: int = 1) -> Against:
        """The base itself on the same records: what it has no tensor for is the fine-tuned model's.

        one_in: of so many batches one; all, where there are fewer than twice as many: a GPU's are few and large.
        """
        pairs = {one.info.name: one for one in pairing.pairs}

        def read(name: str) -> Tensor:
            one = pairs[name]
            same = one.base_name is not None and pairing.base.tensors[one.base_name].shape == one.info.shape
            return pairing.base.read(str(one.base_name)) if same else pairing.finetuned.read(name)

        batches, targets = self._batches, self._targets
        if len(batches) >= 2 * one_in:
            few = slice(one_in // 2, None, one_in)  # of every length: they are in its order
            batches, targets = batches[few], targets[few]
        found = self._answers(read, batches)
        per = self._divergences(found, targets)
        wanted = [batch.ids.roll(-1, 1)[batch.written] for batch in batches]
        losses = [
            -sum(float(p.gather(1, ids.to(p.device)[:, None]).sum()) for p, ids in zip(some, wanted, strict=True))
            / len(per)
            for some in (found, targets)
        ]
        return Against(float(per.mean()), *losses)

    def _divergences(self, found: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """KL of each token that is to be written, f64 [tokens], on the CPU; computed where the model runs."""
        where = self._skeleton.device
        pairs = zip(targets, found, strict=True)
        return torch.cat([kl_divergence(target.to(where), one.to(where)).cpu() for target, one in pairs])

    def _place(self, numel: int) -> torch.device | None:
        """Where a tensor of so many elements is restored, with others beside it: the CPU where a GPU has no room."""
        where = self._skeleton.device
        roomy = where.type == "cuda" and _THREADS * RESTORING * numel <= free_bytes(where)
        return where if roomy else None

    def _answers(
        self, read: Callable[[str], Tensor], batches: Sequence[HeldBack], threads: int = _THREADS
    ) -> list[Tensor]:
        skeleton = self._skeleton
        self._load([name for name in skeleton.outer_names() if name != skeleton.head_name], read, threads)
        held = HeldStreams(skeleton, batches)
        skeleton.free([skeleton.embedding_name])
        for i in range(skeleton.num_layers):
            self._load(skeleton.layer_names(i), read, threads)
            held.clean = held.through(i, held.clean)
            skeleton.free_layer(i)
        self._load([skeleton.head_name or skeleton.embedding_name], read, threads)
        answers = [one.cpu() for one in held.answers()]
        skeleton.free(skeleton.outer_names())
        return answers

    def _load(self, names: Sequence[str], read: Callable[[str], Tensor], threads: int) -> None:
        """A few at a time: most of what is done to restore a tensor, a CPU does, in one thread."""
        skeleton = self._skeleton

        def named(name: str) -> tuple[str, Tensor]:
            with current(skeleton.device):
                return name, read(name)

        with closing(side_by_side(named, filter(skeleton.uses, names), threads, at_once=threads + 1)) as tensors:
            for name, tensor in tensors:
                skeleton.swap({name: skeleton.prepare(name, tensor)})


def error_by_record(per: Tensor, record: Tensor) -> float:
    """Standard error of the mean over tokens, of which whole records are drawn: a mean is a ratio of two sums over
    records, of values and of tokens (Cochran, Sampling Techniques, 6.4, to the first order).

    Args:
        per: a value of each token, [tokens]. record: int64 [tokens], which record it is of; two of them at least.
    """
    values = per.double()
    off = torch.zeros(int(record.max()) + 1, dtype=torch.float64).index_add_(0, record, values - values.mean())
    return math.sqrt(len(off) / (len(off) - 1) * float(off.square().sum())) / len(per)


def _records(batches: Sequence[HeldBack]) -> Tensor:
    """Of each token that is to be written, in the order of answers, its record: int64 [tokens]."""
    found, count = list[Tensor](), 0
    for batch in batches:
        found.append(batch.written.cpu().nonzero()[:, 0] + count)
        count += len(batch.written)
    return torch.cat(found)
