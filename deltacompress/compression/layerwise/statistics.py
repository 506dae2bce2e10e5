"""The statistics of one stage: both streams run to its linears, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.compression.layerwise.experts import ExpertSums, Portion
from deltacompress.compression.layerwise.needs import is_by_outputs
from deltacompress.compression.layerwise.walk import Walk
from deltacompress.models.experts.routing import Routing
from deltacompress.models.experts.stages import ExpertStage
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import part


def collect(
    walk: Walk,
    portion: Portion,
    experts: Mapping[str, ExpertStage],
    student: LayerTurns,
    teacher: LayerTurns | None,
    weights: dict[str, Tensor],
    finetuned: dict[str, Tensor],
    *,
    last: bool,
) -> dict[str, HessianAccumulator | ExpertSums]:
    """Statistics of each group, by its first name; leaves the student's weights in the model.

    weights, finetuned: the layer's, as far as it is encoded, and the teacher's. In the last stage the teacher runs
    to the end of the layer, and its stream moves on.
    """
    leaders = [group[0] for group in portion.groups]
    where = leaders[-1].split(".")[-2]
    sums = {group[0]: _sums(walk, group, experts.get(group[0]), portion.experts, finetuned) for group in portion.groups}
    changed = {name: weight for name, weight in finetuned.items() if weights[name] is not weight}
    walk.skeleton.swap(weights)
    with_finetuned = partial(_with, walk, changed, {name: weights[name] for name in changed})
    for k in range(len(student)):
        targets: dict[str, Tensor] = {}
        target_routings: Mapping[str, Routing] = {}
        if teacher is not None:
            with with_finetuned():
                with part(f"teacher: to {where}"):
                    targets, target_routings = teacher.inputs(k, leaders), teacher.routings
                if last:
                    with part("teacher: to its end"):
                        teacher.finish(k)
        with part(f"student: to {where}"):
            inputs = student.inputs(k, leaders)
        with part("sums"), walk.precision.products():
            for name, one in sums.items():
                if isinstance(one, ExpertSums):
                    routing = student.routings[name]
                    one.add(inputs[name], routing, targets.get(name), target_routings.get(name))
                else:
                    one.add(inputs[name], targets.get(name))
        del inputs, targets  # before the next forward makes as much again
        for stream in (student, teacher):
            if stream is not None:
                stream.rest(k)
    if last and teacher is not None:
        with with_finetuned():
            teacher.settle()
    for one in sums.values():
        one.reduce_(walk.ranks.sum_, walk.ranks.total)
    return sums


def _sums(
    walk: Walk, group: Sequence[str], stage: ExpertStage | None, experts: range, finetuned: Mapping[str, Tensor]
) -> HessianAccumulator | ExpertSums:
    """None of any tokens yet. stage, experts: of a group of experts, what it is and which of them."""
    features, device = walk.plan.tensors[group[0]].inputs, walk.skeleton.device
    asymmetric = any(walk.plan.tensors[name].needs_teacher for name in group)
    if stage is None:
        own = finetuned[group[0]] if is_by_outputs(group, walk.plan.tensors, ()) else None
        return HessianAccumulator(features, device=device, asymmetric=asymmetric, finetuned=own)
    chosen = {stage.expert_of[name] for name in group} & set(experts)
    by_token = stage.a_row_a_token
    return ExpertSums(features, chosen, a_row_a_token=by_token, device=device, asymmetric=asymmetric)


@contextmanager
def _with(walk: Walk, weights: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> Iterator[None]:
    """These weights in the model in this block, and those after it."""
    walk.skeleton.swap(weights)
    yield
    walk.skeleton.swap(then)
