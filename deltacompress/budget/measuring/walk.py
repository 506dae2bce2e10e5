"""One walk of the fine-tuned model: what each group can be coded as, and what its error alone does to the answers.

Calibration tokens give each group its Hessian, from which its rungs are measured (a layer's experts share one, of all
that goes to any of them). Records that were held back pass every layer once more for each group that came before, with
that group as its reference restores it, and all else as fine-tuned. One decoder layer is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltacompress.budget.measuring.ladder import Ladder, embedding_steps, rounded_group
from deltacompress.budget.measuring.measured import Measured, Walk, Walked
from deltacompress.budget.measuring.probes import HeldStreams, Probe
from deltacompress.budget.measuring.progress import Progress, go_on, keep
from deltacompress.budget.rungs import (
    COARSE,
    COUNTED_REFERENCE,
    COUNTED_WIDEST,
    DRAWN,
    REFERENCE,
    ROUNDED_REFERENCE,
    WIDEST,
    Rung,
)
from deltacompress.calibration.forwards.memory import Room
from deltacompress.calibration.forwards.precision import calibration_precision
from deltacompress.calibration.forwards.recording import capture_calls, record_inputs
from deltacompress.calibration.forwards.turns import LayerTurns, taking_turns
from deltacompress.calibration.held_back import HeldBack
from deltacompress.codecs.encoded import Encoded, as_matrix, delta_of
from deltacompress.compression.encoding import encode_uncalibrated, restored_of, with_added_rows
from deltacompress.compression.layerwise.model import sequences_per_batch
from deltacompress.compression.layerwise.solving import to_encode
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.errors import NumericsError
from deltacompress.lossless import Coder
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import Reporter


def walk(
    plan: Plan,
    skeleton: Skeleton,
    ids: Tensor,
    batches: Sequence[HeldBack],
    rungs: Sequence[Rung],
    coder: Coder,
    reporter: Reporter,
    progress: Progress | None = None,
) -> Walked:
    """Measure a plan of `rungs.template`. ids: int64 [samples, seq_len], calibration tokens; batches: what probes run
    on; rungs: of linears; progress: where it goes on, and keeps how far it has come.
    """
    device, size = skeleton.device, sequences_per_batch(skeleton, ids.shape[1])
    widest = max((one.inputs for one in plan.tensors.values() if one.calibrated), default=1)
    reached = None if progress is None else progress.read()
    first = 0 if reached is None else reached.layers
    reporter.phase("measuring", skeleton.num_layers - first + 2)
    skeleton.load([name for name in skeleton.outer_names() if name != skeleton.head_name], plan.finetuned.read)
    held = HeldStreams(skeleton, batches)
    stream, calls = capture_calls(skeleton, ids, size)
    precision = calibration_precision(device, bf16_weights=plan.bf16_linears)
    room = Room(device, features=widest, hidden=skeleton.hidden_size, tokens=size * ids.shape[1], note=reporter.note)
    whole = {rung.name: Probe(held.clean) for rung in (REFERENCE, COARSE, WIDEST, DRAWN)}
    walk = Walk(plan, skeleton, coder, reporter, held, precision, room, stream, calls, rungs, whole)
    if first < skeleton.num_layers:
        plan.read_ahead(skeleton.layer_names(first), device)
    _embedding(walk)
    skeleton.free([skeleton.embedding_name])
    reporter.step("embedding")
    if progress is not None and reached is not None:
        reporter.note(f"{progress.path}: {first} layers were measured by an earlier run, used again")
        go_on(walk, reached)
    for i in range(first, skeleton.num_layers):
        _layer(walk, i)
        progress = keep(walk, i + 1, progress)
        reporter.step(f"layer {i}")
    _head(walk)
    head = skeleton.head_name or skeleton.embedding_name
    skeleton.load(
        [head, *(one for one in skeleton.outer_names() if one != skeleton.embedding_name)], plan.finetuned.read
    )
    held.measure(head, [*whole.values(), *(probe for one in walk.found for probe in one.probes)])
    reporter.step("head")
    return Walked(walk.found, whole, held.tokens, math.sqrt(walk.norms[0] / max(walk.norms[1], 1e-300)))


def _embedding(walk: Walk) -> None:
    plan, skeleton = walk.plan, walk.skeleton
    tensor = plan.tensors[skeleton.embedding_name]
    if tensor.treatment != "code":
        return
    one = _counted(walk, tensor)
    for rung, probe in zip((COUNTED_WIDEST, COUNTED_REFERENCE), reversed(one.probes), strict=True):
        own = replace(tensor, settings=rung.settings())
        restored = restored_of(own, encode_uncalibrated(plan, own), plan.base_of(tensor))
        skeleton.load([tensor.name], {tensor.name: restored}.__getitem__)
        probe.hidden = walk.held.captured()
        if skeleton.head_name is None:
            probe.head = skeleton.weights([tensor.name])[tensor.name]
    for whole in walk.whole.values():
        whole.hidden, whole.head = one.probe.hidden, one.probe.head
    walk.found.append(one)


def _counted(walk: Walk, tensor: TensorPlan) -> Measured:
    """The embedding."""
    finetuned, base = walk.plan.finetuned.read(tensor.name), walk.plan.base_of(tensor)
    delta = delta_of(finetuned, base, tensor.name)
    steps = embedding_steps(tensor, delta.view(as_matrix(tuple(delta.shape))), walk.coder)
    widest = COUNTED_WIDEST.name, Probe([])
    return Measured((tensor.name,), tensor.kind, steps, COUNTED_REFERENCE.name, Probe([]), widest)


def _layer(walk: Walk, i: int) -> None:
    """Measure the groups of layer i, and move all streams past it."""
    skeleton, held = walk.skeleton, walk.held
    names = skeleton.layer_names(i)
    skeleton.load(names, walk.plan.finetuned.read)
    if i + 1 < skeleton.num_layers:
        walk.plan.read_ahead(skeleton.layer_names(i + 1), skeleton.device)
    with record_inputs(skeleton, i) as recorder:
        after = held.through(i, held.clean)
    groups = [[name for name in group.names if walk.plan.tensors[name].calibrated] for group in recorder.groups]
    groups = [group for group in groups if group]
    sums = _sums(walk, i, groups)
    of_experts = {name for stage in skeleton.expert_stages(i) for name in stage.expert_of}
    weights = skeleton.weights(names)
    before = [probe for one in walk.found for probe in one.probes]
    coded = []
    for group in groups:
        one, of_group = _group(walk, group, weights, sums.pop(group[0]))
        one = replace(one, experts=group[0] in of_experts)
        one.probe.hidden = held.through(i, held.clean, of_group.restored(one.reference))
        coded.append(of_group)
        walk.found.append(one)
    for probe in before:
        probe.hidden = held.through(i, probe.hidden)
    for name, whole in walk.whole.items():
        whole.hidden = held.through(i, whole.hidden, _restored(coded, name))
    held.clean = after
    skeleton.free_layer(i)


def _sums(walk: Walk, i: int, groups: Sequence[Sequence[str]]) -> dict[str, HessianAccumulator]:
    """The statistics of each group, by its first name; the calibration stream moves past the layer."""
    leaders, device = [group[0] for group in groups], walk.skeleton.device
    inputs = {name: walk.plan.tensors[name].inputs for name in leaders}
    sums = {name: HessianAccumulator(size, device=device, asymmetric=False) for name, size in inputs.items()}
    turns = LayerTurns(walk.skeleton, i, walk.stream, walk.calls, precision=walk.precision, room=walk.room)
    with taking_turns(walk.skeleton, groups, [turns]):
        for k in range(len(turns)):
            found = turns.inputs(k, leaders) if leaders else {}
            with walk.precision.products():
                for name, one in sums.items():
                    one.add(found[name])
            turns.finish(k)
        turns.settle()
    return sums


@dataclass(frozen=True)
class _Coded:
    """A group, encoded as the rungs do it whose errors are put into the model: by a rung's name and a tensor's.

    references: what its tensors are coded against.
    """

    skeleton: Skeleton
    tensors: Sequence[TensorPlan]
    references: Mapping[str, Tensor | None]
    encoded: Mapping[str, Mapping[str, Encoded]]

    def restored(self, rung: str) -> dict[str, Tensor]:
        """Its weights, made anew each time: of all rungs at once they would take as much as several layers."""
        found = self.encoded[rung]
        return {
            one.name: self.skeleton.prepare(one.name, restored_of(one, found[one.name], self.references[one.name]))
            for one in self.tensors
        }


def _restored(coded: Iterable[_Coded], rung: str) -> dict[str, Tensor]:
    """The weights of several groups."""
    return {name: value for one in coded for name, value in one.restored(rung).items()}


def _group(
    walk: Walk, group: Sequence[str], weights: Mapping[str, Tensor], statistics: HessianAccumulator
) -> tuple[Measured, _Coded]:
    """A group's ladder, and what it was encoded as."""
    plan, skeleton = walk.plan, walk.skeleton
    tensors = [plan.tensors[name] for name in group]
    references = {one.name: plan.base_of(one, skeleton.device) for one in tensors}
    linears = [to_encode(one, weights[one.name], references[one.name]) for one in tensors]
    try:
        steps, encoded = Ladder(tensors, linears, statistics, walk.coder).climb(walk.rungs)
        reference = REFERENCE
    except NumericsError as error:
        walk.reporter.note(f"{group[0]}: {error.what}: for its group only rounding is left")
        steps, rounded = rounded_group(tensors, linears, walk.coder)
        encoded, reference = dict.fromkeys((ROUNDED_REFERENCE.name, *walk.whole), rounded), ROUNDED_REFERENCE
    for linear in linears:
        walk.norms[0] += float(linear.delta.square().sum(dtype=torch.float64))
        walk.norms[1] += float(linear.finetuned.square().sum(dtype=torch.float64))
    whole = {
        rung: {one.name: with_added_rows(plan, one, found[one.name]) for one in tensors}
        for rung, found in encoded.items()
    }
    measured = Measured(tuple(group), tensors[0].kind, steps, reference.name, Probe([]))
    return measured, _Coded(skeleton, tensors, references, whole)


def _head(walk: Walk) -> None:
    skeleton, name = walk.skeleton, walk.skeleton.head_name
    if name is None or not walk.plan.tensors[name].calibrated:
        return
    skeleton.load([name], walk.plan.finetuned.read)
    features = walk.plan.tensors[name].inputs
    sums = HessianAccumulator(features, device=skeleton.device, asymmetric=False)
    for hidden in walk.stream:
        inputs = skeleton.run_final_norm(hidden).reshape(-1, features)
        with walk.precision.products():
            sums.add(inputs)
    one, coded = _group(walk, [name], skeleton.weights([name]), sums)
    one.probe.hidden, one.probe.head = walk.held.clean, coded.restored(one.reference)[name]
    for rung, whole in walk.whole.items():
        whole.head = coded.restored(rung)[name]
    walk.found.append(one)
