"""The statistics of one stage: both streams run to its linears, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.compression.layerwise.walk import Walk
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import part


def collect(
    walk: Walk,
    stage: list[list[str]],
    student: LayerTurns,
    teacher: LayerTurns | None,
    weights: dict[str, Tensor],
    finetuned: dict[str, Tensor],
    *,
    last: bool,
) -> dict[str, HessianAccumulator]:
    """Statistics of each group of the stage, by its first name; leaves the student's weights in the model.

    weights, finetuned: the layer's, as far as it is encoded, and the teacher's. In the last stage the teacher runs
    to the end of the layer, and its stream moves on.
    """
    leaders = [group[0] for group in stage]
    where = leaders[-1].split(".")[-2]
    sums = {
        group[0]: HessianAccumulator(
            walk.plan.tensors[group[0]].inputs,
            device=walk.skeleton.device,
            asymmetric=any(walk.plan.tensors[name].needs_teacher for name in group),
        )
        for group in stage
    }
    changed = {name: weight for name, weight in finetuned.items() if weights[name] is not weight}
    walk.skeleton.swap(weights)
    with_finetuned = partial(_with, walk, changed, {name: weights[name] for name in changed})
    for k in range(len(student)):
        targets: dict[str, Tensor] = {}
        if teacher is not None:
            with with_finetuned():
                with part(f"teacher: to {where}"):
                    targets = teacher.inputs(k, leaders)
                if last:
                    with part("teacher: to its end"):
                        teacher.finish(k)
        with part(f"student: to {where}"):
            inputs = student.inputs(k, leaders)
        with part("sums"), walk.precision.products():
            for name in leaders:
                sums[name].add(inputs[name], targets.get(name))
        for stream in (student, teacher):
            if stream is not None:
                stream.rest(k)
    if last and teacher is not None:
        with with_finetuned():
            teacher.settle()
    for one in sums.values():
        one.reduce_(walk.ranks.sum_, walk.ranks.total)
    return sums


@contextmanager
def _with(walk: Walk, weights: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> Iterator[None]:
    """These weights in the model in this block, and those after it."""
    walk.skeleton.swap(weights)
    yield
    walk.skeleton.swap(then)
