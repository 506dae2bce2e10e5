"""Linears of one input, from their statistics to finished tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from deltacompress.codecs.encoded import LinearToEncode, delta_of
from deltacompress.compression.encoding import with_added_rows
from deltacompress.compression.layerwise.experts import ExpertSums, by_expert
from deltacompress.compression.layerwise.walk import Walk
from deltacompress.compression.planning import TensorPlan
from deltacompress.compression.ranks.rows import RowShares
from deltacompress.compression.steps import Unfinished
from deltacompress.models.experts.stages import ExpertStage
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import part


def encode(
    walk: Walk,
    group: Sequence[str],
    weights: dict[str, Tensor],
    statistics: HessianAccumulator,
    *,
    tokens: int | None = None,
) -> Iterator[tuple[str, Unfinished, Tensor]]:
    """Encode the linears of one group; those with the same settings are solved together.

    weights: the fine-tuned ones, f32, on the device. tokens: of an expert, how many went to it. Yields (name, the
    outcome to come, restored).
    """
    by_settings: dict[str, list[TensorPlan]] = {}
    for name in group:
        tensor = walk.plan.tensors[name]
        by_settings.setdefault(tensor.settings.model_dump_json(), []).append(tensor)
    *others, last = by_settings.values()
    for tensors in others:
        yield from solve(walk, tensors, weights, statistics.copy(), tokens=tokens)
    yield from solve(walk, last, weights, statistics, tokens=tokens)


def encode_experts(
    walk: Walk, group: Sequence[str], weights: dict[str, Tensor], sums: ExpertSums, stage: ExpertStage, experts: range
) -> Iterator[tuple[str, Unfinished, Tensor]]:
    """As `encode`, of some experts, one after the other."""
    for expert, names in by_expert(group, stage, experts):
        statistics, tokens = sums.take(expert)
        if stage.a_row_a_token:  # of its two products the first: once
            walk.agreement.count(tokens)
        yield from encode(walk, names, weights, statistics, tokens=tokens)


def solve(
    walk: Walk,
    tensors: list[TensorPlan],
    weights: dict[str, Tensor],
    statistics: HessianAccumulator,
    *,
    tokens: int | None = None,
) -> Iterator[tuple[str, Unfinished, Tensor]]:
    """As `encode`, linears with the same settings."""
    plan = walk.plan
    encode_group, settings = tensors[0].codec.encode_group, tensors[0].settings
    assert encode_group is not None
    with part("read"):
        references = {tensor.name: plan.base_of(tensor, walk.skeleton.device) for tensor in tensors}
    moved = statistics.moved()
    linears = [
        to_encode(plan.tensors[name], weights[name], reference, walk.fisher.pop(name, None), moved)
        for name, reference in references.items()
    ]
    shares = RowShares(walk.ranks, tensors, linears)
    encoded = shares.losses(encode_group([shares.own(one) for one in linears], statistics, settings))
    del linears, moved
    for tensor in tensors:
        reference = references.pop(tensor.name)
        joined, restored = shares.joined(tensor, encoded.pop(tensor.name), reference)
        whole = replace(with_added_rows(plan, tensor, joined), tokens=tokens)
        yield tensor.name, *walk.steps.finish(tensor, whole, reference, restored)


def to_encode(
    tensor: TensorPlan,
    weight: Tensor,
    reference: Tensor | None,
    fisher: Tensor | None = None,
    moved: Tensor | None = None,
) -> LinearToEncode:
    """A linear as codecs see it. weight: the fine-tuned one, f32; reference: what it is coded against; moved: W_ft D,
    of one that takes it.
    """
    delta = delta_of(weight, reference, tensor.name)
    if tensor.transposed:
        assert moved is None, "a turned linear is not summed up by its outputs"
        return LinearToEncode(tensor.name, delta.t().contiguous(), weight.t().contiguous(), fisher)
    rows = delta.shape[0]  # the base's, which added tokens come after
    fisher = None if fisher is None else fisher[:rows, :rows]
    return LinearToEncode(tensor.name, delta, weight[:rows], fisher, moved=moved)
