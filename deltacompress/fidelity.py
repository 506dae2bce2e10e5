"""A first look at fidelity, at the end of a calibrated compression, while both streams are still at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.calibrate.skeleton import Skeleton
from deltacompress.layerwise import Streams
from deltacompress.planning import Plan
from deltacompress.steps import Steps

_TOKENS = 4096


def calibration_kl(plan: Plan, skeleton: Skeleton, streams: Streams, steps: Steps) -> float | None:
    """KL(fine-tuned || compressed) in nats/token over the first calibration sequences (about 4096 tokens).

    In-sample: the codes were fitted on these tokens. None where the recipe ran no teacher.
    """
    if streams.teacher is None:
        return None
    skeleton.load(skeleton.outer_names(), plan.finetuned.read)
    wanted = [torch.log_softmax(skeleton.run_head(one).float(), -1) for one in _sequences(streams.teacher)]
    for step in ("outer", "head"):
        restored = steps.recall(step) or {}
        aliases = [(tensor.name, tensor.pair.alias_of) for tensor in plan.tensors.values() if tensor.fate == "alias"]
        restored |= {name: restored[twin] for name, twin in aliases if twin in restored}
        skeleton.load(restored, restored.__getitem__)
    total, tokens = 0.0, 0
    for target, one in zip(wanted, _sequences(streams.student), strict=True):
        found = torch.log_softmax(skeleton.run_head(one).float(), -1)
        total += float((target.exp() * (target - found)).sum(dtype=torch.float64))
        tokens += target.shape[0] * target.shape[1]
    return total / tokens


def _sequences(batches: list[Tensor]) -> list[Tensor]:
    """Single sequences [1, T, H], so that logits over a large vocabulary stay small."""
    every = [one for batch in batches for one in batch.split(1)]
    return every[: max(_TOKENS // every[0].shape[1], 1)]
