"""The Fisher information of a model's outputs, for recipes that weigh errors by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from deltacompress.calibration.fisher_sum import FisherSum
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.calibration.gradients import fisher_information, rows_for_gradients
from deltacompress.compression.layerwise.walk import Walk
from deltacompress.compression.planning import Plan
from deltacompress.errors import first_line
from deltacompress.models.skeleton import Skeleton
from deltacompress.models.support import of_the_machine
from deltacompress.reporter import Reporter, part


def fisher_of(walk: Walk, ids: Tensor, teacher: HiddenStates, reporter: Reporter) -> dict[str, FisherSum]:
    """Of all linears whose settings ask for it, by name; of none where the model cannot be differentiated.

    ids: of this rank. Ranks that differ in it do without, all of them. The skeleton holds the fine-tuned model's outer
    weights. teacher: what its first layer receives.
    """
    precision = walk.precision.wider or walk.precision
    asked = [asked_of_layer(walk.plan, walk.skeleton, i) for i in range(walk.skeleton.num_layers)]
    without = {name for name, tensor in walk.plan.tensors.items() if tensor.needs_fisher}.difference(*asked)
    if without:
        told = "has no gradients of its own" if len(without) == 1 else f"and {len(without) - 1} more have no gradients"
        walk.note(f"{min(without)} {told}, so its rows are solved apart, as with fisher: false")
    widest = max((walk.plan.tensors[name].outputs for names in asked for name in names), default=0)
    if not widest:
        return {}
    some = rows_for_gradients(ids, -(-widest // walk.ranks.size))
    found, finetuned = None, walk.plan.finetuned
    on_gpu = walk.skeleton.device.type == "cuda"
    read, ahead = partial(finetuned.read, pinned=on_gpu), finetuned.read_ahead if on_gpu else None
    try:
        found = fisher_information(walk.skeleton, some, asked, teacher, read, precision, reporter, ahead)
    except RuntimeError as error:
        finetuned.forget_ahead()
        if of_the_machine(error) and not isinstance(error, NotImplementedError):
            raise
        told = "no gradients of this model, so rows are solved apart, as with fisher: false"
        walk.note(f"{told} ({first_line(error)})")
    everywhere = min(int(row[0]) for row in walk.ranks.numbers([float(found is not None)]))
    return found if everywhere and found is not None else {}


def take_fisher(walk: Walk, i: int, known: dict[str, FisherSum], groups: Sequence[Sequence[str]]) -> None:
    """Put the means of layer i's linears that are to be solved into walk.fisher; all of the layer leave `known`."""
    walk.fisher.clear()
    taken = {name: known.pop(name) for name in walk.skeleton.linear_names(i) if name in known}
    with part("fisher"):
        for name in sorted({name for group in groups for name in group} & taken.keys()):
            own = taken.pop(name)
            total = own.whole(walk.skeleton.device)
            walk.ranks.sum_(total)
            tokens = walk.ranks.total(own.tokens)
            if bool(total.diagonal().any()):  # else nothing depends on these outputs
                walk.fisher[name] = total.div_(tokens)


def asked_of_layer(plan: Plan, skeleton: Skeleton, i: int) -> list[str]:
    """Linears of a layer whose settings ask for it; experts have none."""
    experts = {name for stage in skeleton.expert_stages(i) for name in stage.expert_of}
    names = set(skeleton.linear_names(i)) - experts
    return sorted(name for name in names if plan.tensors[name].needs_fisher)
