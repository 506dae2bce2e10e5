"""One decoder layer: find which linears share an input, collect, encode, put back, and move both streams past it.

A sequential recipe does this for each group of linears in turn, so that each group sees what the groups before it,
compressed, really produce. Each token passes the layer once: its forward waits while a group is solved
(calibration/forwards/turns.py), if there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest

from torch import Tensor

from deltacompress.calibration.forwards.recording import FEW, record_inputs
from deltacompress.calibration.forwards.turns import LayerTurns, taking_turns
from deltacompress.compression.layerwise.experts import ExpertSums, Portion, in_portions
from deltacompress.compression.layerwise.fisher import take_fisher
from deltacompress.compression.layerwise.needs import Needs, make_room
from deltacompress.compression.layerwise.solving import encode, encode_experts
from deltacompress.compression.layerwise.statistics import collect
from deltacompress.compression.layerwise.walk import Streams, Walk
from deltacompress.compression.steps import Unfinished
from deltacompress.models.experts.stages import ExpertStage
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import part


def compress_layer(walk: Walk, i: int, streams: Streams) -> float | None:
    """Compress decoder layer i and move the streams past it; returns its mean relative loss."""
    step = f"layer-{i:05d}"
    if walk.room.free() < walk.size_of(i):
        streams.forget_kept()
    _load(walk, i)
    restored = walk.steps.recall(step, walk.skeleton.layer_names(i))
    with part("groups"):
        groups = _groups(walk, i, streams) if restored is None else []
    take_fisher(walk, i, streams.fisher, groups)
    student = walk.turns(i, streams.student, streams)
    teacher = None if streams.teacher is None else walk.turns(i, streams.teacher, streams)
    both = [one for one in (student, teacher) if one is not None]
    outcomes = None
    with taking_turns(walk.skeleton, groups, both):
        # Of a recalled layer, too: the first forward in this block also decides how the layer's norms run (one_pass).
        _find_spent(groups, both)
        if restored is None:
            outcomes = _compress(walk, i, groups, student, teacher)
        else:
            _put_back(walk, step, restored, both)
        with _saving(walk, step, outcomes, both), part("student: to its end"):
            student.finish_all()
    if any(one.precision != walk.precision for one in both):
        walk.note(f"layer {i}: values beyond the range of {walk.precision.inputs}, so it multiplied in wider numbers")
    walk.skeleton.free_layer(i)
    finished = walk.steps.records(step) if outcomes is None else outcomes
    losses = [one.loss for one in finished if one.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _load(walk: Walk, i: int) -> None:
    """Load the layer's fine-tuned weights; those of the next are read meanwhile."""
    skeleton = walk.skeleton
    on_gpu = skeleton.device.type == "cuda"
    with part("read"):
        skeleton.load(skeleton.layer_names(i), partial(walk.plan.finetuned.read, pinned=on_gpu))
    if i + 1 < skeleton.num_layers:
        read_ahead(walk, i + 1)


def read_ahead(walk: Walk, i: int) -> None:
    """Let a thread read layer i; as Plan.read_ahead."""
    walk.plan.read_ahead(walk.skeleton.layer_names(i), walk.skeleton.device)


def _find_spent(groups: list[list[str]], both: Sequence[LayerTurns]) -> None:
    """Let both streams' forwards go without what they no longer need where they wait."""
    with part("groups"):
        spent = both[0].find_spent([group[0] for group in groups])
    for one in both:
        one.spent = spent


def _put_back(walk: Walk, step: str, restored: dict[str, Tensor], both: Sequence[LayerTurns]) -> None:
    """What an interrupted run left of a layer, in the model; the teacher's stream moves past the layer."""
    for one, k in zip(both, walk.steps.wide_from(step), strict=False):  # none where none was wide
        one.wide_from = k
    for teacher in both[1:]:
        teacher.finish_all()
    walk.skeleton.load(restored, restored.__getitem__)


@contextmanager
def _saving(walk: Walk, step: str, outcomes: list[Unfinished] | None, both: Sequence[LayerTurns]) -> Iterator[None]:
    """Save a layer's outcomes, if there are new ones, after this block, or though it fails."""
    try:
        yield
    except BaseException:
        if outcomes is not None and walk.ranks.size == 1:  # several would have to agree on it
            with suppress(Exception):  # what stopped the forward is what to tell
                walk.steps.save(step, outcomes, wide_from=[one.wide_from for one in both])
        raise
    if outcomes is not None:
        walk.steps.save(step, outcomes, wide_from=[one.wide_from for one in both])


def _groups(walk: Walk, i: int, streams: Streams) -> list[list[str]]:
    """Calibrated linears that share an input, in execution order, found by running a few samples."""
    hidden = streams.student.some(FEW)
    with record_inputs(walk.skeleton, i) as recorder, walk.precision.products():
        walk.skeleton.run_layer(i, hidden, streams.calls[len(hidden)][i])
    groups = [[name for name in group.names if walk.plan.tensors[name].calibrated] for group in recorder.groups]
    return [group for group in groups if group]


def _compress(
    walk: Walk, i: int, groups: list[list[str]], student: LayerTurns, teacher: LayerTurns | None
) -> list[Unfinished]:
    """Encode layer i, and leave what it is restored to in the model; the teacher's stream moves past the layer."""
    names = walk.skeleton.layer_names(i)
    outcomes: list[Unfinished] = []
    weights = walk.skeleton.weights(names)
    finetuned = dict(weights) if teacher is not None else {}
    for tensor in (walk.plan.tensors[name] for name in names):
        if not tensor.calibrated:
            outcome, restored = walk.steps.encode(tensor, walk.skeleton.device)
            outcomes.append(outcome)
            if tensor.treatment == "code":  # all others are restored to the teacher's own values
                weights[tensor.name] = walk.skeleton.prepare(tensor.name, restored)
    if not groups and teacher is not None:
        teacher.finish_all()
    streams = [one for one in (student, teacher) if one is not None]
    experts = {name: stage for stage in walk.skeleton.expert_stages(student.i) for name in stage.expert_of}
    features = {name: walk.plan.tensors[name].inputs for group in groups for name in group}
    stages = [[group] for group in groups] if walk.plan.recipe.sequential else [groups] if groups else []
    needs = Needs(walk.plan.tensors, experts, walk.room.tokens, walk.skeleton.hidden_size, walk.room.device)
    for stage, following in zip_longest(stages, stages[1:], fillvalue=()):
        with walk.room.keeping(needs.beside(stage, following)):
            portions = in_portions(stage, experts, features, walk.room_for, streams)
            uncoded = dict(weights) if len(portions) > 1 else weights  # as all portions of the stage meet it
            for portion in portions:
                last = not following and portion is portions[-1]
                make_room(
                    streams,
                    walk.room,
                    needs.of_sums(portion.groups, len(portion.experts)) + needs.of_forwards(portion.groups),
                )
                statistics = collect(walk, portion, experts, student, teacher, uncoded, finetuned, last=last)
                if last:
                    finetuned.clear()
                if len(stage) > 1 or len(portions) > 1:
                    for stream in streams if len(portions) > 1 else [student]:
                        stream.begin_all_anew()  # they have run linears that are coded only now, or come here once more
                make_room(streams, walk.room, needs.of_solver(portion.groups))
                for name, outcome, restored in _encoded(walk, i, portion, experts, weights, statistics):
                    outcomes.append(outcome)
                    weights[name] = walk.skeleton.prepare(name, restored)
                walk.room.tidy()  # what the solver let go lies in other places than what forwards take
    walk.skeleton.swap(weights)
    return outcomes


def _encoded(
    walk: Walk,
    i: int,
    portion: Portion,
    experts: Mapping[str, ExpertStage],
    weights: dict[str, Tensor],
    statistics: dict[str, HessianAccumulator | ExpertSums],
) -> Iterator[tuple[str, Unfinished, Tensor]]:
    """Encode what is solved at once of layer i, as `encode`; uses up its statistics."""
    for group in portion.groups:
        sums = statistics.pop(group[0])
        if isinstance(sums, ExpertSums):
            walk.agreement.add(i, sums.same, sums.pairs)
            yield from encode_experts(walk, group, weights, sums, experts[group[0]], portion.experts)
        else:
            yield from encode(walk, group, weights, sums)
