"""A first look at fidelity, at the end of a calibrated compression, while both streams are still at hand.

Large vocabularies decide what it costs: a head and its log-probabilities outweigh a decoder layer. So one head is
loaded at a time, and the tokens are as many as fit `_LOGITS`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.compression.layerwise.walk import Streams
from deltacompress.compression.planning import Plan
from deltacompress.compression.steps import Steps
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.likelihood import kl_divergence

_TOKENS = 4096
_LOGITS = 2**28  # log-probabilities that are kept, in all: 1 GiB
_LOGITS_AT_A_TIME = 2**26


def calibration_kl(plan: Plan, skeleton: Skeleton, streams: Streams, steps: Steps) -> float | None:
    """KL(fine-tuned || compressed) in nats/token over the first 4096 calibration tokens (2**28 / V if less).

    In-sample: the codes were fitted on these tokens. None where the recipe ran no teacher. The skeleton must be as
    `compress_layers` leaves it.
    """
    if streams.teacher is None:
        return None
    head = skeleton.head_name or skeleton.embedding_name
    restored = _restored_head(plan, head, steps) if streams.head is None else streams.head
    skeleton.swap({head: skeleton.prepare(head, restored)})
    streams.head = None
    del restored
    vocabulary = plan.tensors[head].pair.info.shape[0]
    found = list(_log_probabilities(skeleton, streams.student, vocabulary))
    skeleton.free([head])
    used = [name for name in skeleton.outer_names() if name == head or name != skeleton.embedding_name]
    skeleton.load(used, plan.finetuned.read)
    total, tokens = torch.zeros((), dtype=torch.float64, device=skeleton.device), 0
    for k, target in enumerate(_log_probabilities(skeleton, streams.teacher, vocabulary)):
        total += kl_divergence(target, found[k]).sum()
        tokens += len(target)
    return float(total) / tokens


def _restored_head(plan: Plan, head: str, steps: Steps) -> Tensor:
    """As its step has it, a tied one that of the embedding."""
    twin = plan.tensors[head].pair.alias_of or head
    step = steps.stored()[twin]
    return (steps.recall(step, [record.name for record in steps.records(step)]) or {})[twin]


def _log_probabilities(skeleton: Skeleton, stream: HiddenStates, vocabulary: int) -> Iterator[Tensor]:
    """f32 [T, V], piece by piece, T no longer than a calibration sequence."""
    left = max(min(_TOKENS, _LOGITS // vocabulary), 1)
    for batch in stream:
        for sequence in batch.split(1):
            for piece in sequence[:, :left].split(max(_LOGITS_AT_A_TIME // vocabulary, 1), dim=1):
                yield torch.log_softmax(skeleton.run_head(piece)[0].float(), -1)
            left -= sequence.shape[1]
            if left <= 0:
                return
