"""The Fisher information of a layer's outputs, for recipes that weigh errors by it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.calibration.gradients import (
    OutputGradients,
    fisher_information,
    output_gradients,
    rows_for_gradients,
)
from deltacompress.compression.layerwise.walk import Streams, Walk
from deltacompress.errors import first_line
from deltacompress.models.support import of_the_machine
from deltacompress.reporter import Reporter, part


def gradients_of(walk: Walk, ids: Tensor, teacher: HiddenStates, reporter: Reporter) -> OutputGradients | None:
    """Of the fine-tuned model, whose outer weights the skeleton holds; None where it cannot be differentiated.

    ids: of this rank. Ranks that differ in it do without, all of them.
    """
    precision = walk.precision.wider or walk.precision
    widest = max((walk.plan.tensors[name].outputs for name in _asked(walk)), default=0)
    if not widest:
        return None
    some = rows_for_gradients(ids, -(-widest // walk.ranks.size))
    gradients = None
    try:
        gradients = output_gradients(walk.skeleton, some, teacher, walk.plan.finetuned.read, precision, reporter)
    except RuntimeError as error:
        if of_the_machine(error):
            raise
        told = "no gradients of this model, so rows are solved apart, as with fisher: false"
        walk.note(f"{told} ({first_line(error)})")
    found = min(int(row[0]) for row in walk.ranks.numbers([float(gradients is not None)]))
    return gradients if found else None


def take_fisher(walk: Walk, i: int, streams: Streams, groups: Sequence[Sequence[str]]) -> None:
    """Put the Fisher information of layer i's linears, those whose settings ask for it, into walk.fisher."""
    walk.fisher.clear()
    if streams.gradients is None or streams.teacher is None:
        return
    names = _asked_of_layer(walk, i, {name for group in groups for name in group})
    pieces, precision = streams.gradients.layers[i], walk.precision.wider or walk.precision
    if names:
        with part("fisher"):
            sums = fisher_information(walk.skeleton, i, names, streams.teacher, streams.gradients, precision)
            tokens = walk.ranks.total(sum(one.shape[0] * one.shape[1] for one in pieces))
            for name in sorted(sums):
                walk.ranks.sum_(sums[name])
                if bool(sums[name].diagonal().any()):  # else nothing depends on these outputs
                    walk.fisher[name] = sums[name].div_(tokens)
    streams.gradients.layers[i] = ()


def _asked(walk: Walk) -> list[str]:
    """Linears of all layers whose settings ask for it; experts have none."""
    skeleton = walk.skeleton
    return [
        name for i in range(skeleton.num_layers) for name in _asked_of_layer(walk, i, set(skeleton.linear_names(i)))
    ]


def _asked_of_layer(walk: Walk, i: int, among: set[str]) -> list[str]:
    experts = {name for stage in walk.skeleton.expert_stages(i) for name in stage.expert_of}
    return sorted(name for name in among - experts if walk.plan.tensors[name].needs_fisher)
