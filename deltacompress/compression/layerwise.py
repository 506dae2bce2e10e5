"""The calibrated part of a compression: layer by layer, one decoder layer in memory (DeltaZip algorithm 1).

Two streams of hidden states run side by side: the *student*, whose layers before this one are compressed, gives the
inputs that the layer will really see; the *teacher*, the fine-tuned model, gives the targets (only when a rule is
asymmetric). For each layer: collect the Hessians, encode, **put base + decoded delta back into the layer**, run the
student through it, hand both streams to the next layer. A sequential recipe does this for each group of linears in
turn, so that each group sees what the groups before it, compressed, really produce.

Each token passes a layer once: its forward waits while a group is solved (calibration/turns.py), if there is room.

On the device are: one layer in fp32 (of what is encoded already, until the layer's last pass, the teacher's weights
too), the statistics of one stage, one batch of activations, and, where there is room, the streams
(calibration/streams.py) and what forwards that wait hold.
The embedding is there only for the captures, the head only while it is encoded or judged. Fine-tuned linears are read
once: the layer's own parameters are what the solver starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltacompress.calibration.memory import Room
from deltacompress.calibration.precision import calibration_precision
from deltacompress.calibration.streams import HiddenStates, should_wait_on_host
from deltacompress.calibration.turns import LayerTurns, taking_turns
from deltacompress.calibration.walk import capture_calls, record_inputs
from deltacompress.codecs.encoded import LinearToEncode, delta_of
from deltacompress.compression.encoding import encode_uncalibrated, with_added_rows
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.steps import Steps, Unfinished
from deltacompress.models.skeleton import LayerCall, Skeleton
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import Reporter, part

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}
"""A GPU waits for launches, and casts a layer's weights to fp16, for each batch: larger ones make up for it."""


@dataclass(eq=False)
class Streams:
    """Hidden states of all calibration batches, [B, T, H] each, before the layer that comes next."""

    student: HiddenStates
    teacher: HiddenStates | None
    calls: dict[int, list[LayerCall]]


def compress_layers(plan: Plan, skeleton: Skeleton, ids: Tensor, steps: Steps, reporter: Reporter) -> Streams:
    """Encode every tensor of the model; returns the streams after the last layer (for a look at fidelity).

    The skeleton keeps the compressed model's outer weights, without embedding and head.

    ids: int64 [samples, seq_len].
    """
    batch = max(TOKENS_PER_BATCH[skeleton.device.type] // ids.shape[1], 1)
    walk = _Walk(plan, skeleton, steps, reporter, tokens_per_batch=batch * ids.shape[1])
    outer = [plan.tensors[name] for name in skeleton.outer_names()]
    late = [tensor for tensor in outer if tensor.name == skeleton.head_name and tensor.calibrated]
    body = [tensor.name for tensor in outer if tensor.name != skeleton.head_name]
    reporter.phase("compressing", skeleton.num_layers + 2)
    stream_bytes = ids.numel() * skeleton.hidden_size * torch.float32.itemsize
    on_host = should_wait_on_host(skeleton.device, stream_bytes * (2 if plan.asymmetric else 1))
    teacher = None
    if plan.asymmetric:
        skeleton.load(body, plan.finetuned.read)
        teacher, _ = capture_calls(skeleton, ids, batch, on_host=on_host)
        skeleton.free([skeleton.embedding_name])
    restored = walk.simple("outer", [tensor for tensor in outer if tensor not in late and tensor.treatment != "alias"])
    skeleton.load(body, restored.__getitem__)
    del restored
    student, calls = capture_calls(skeleton, ids, batch, on_host=on_host)
    skeleton.free([skeleton.embedding_name])
    streams = Streams(student, teacher, calls)
    reporter.step("embeddings and norms", memory_bytes=steps.peak_memory())
    for i in range(skeleton.num_layers):
        loss = walk.layer(i, streams)
        reporter.step(f"layer {i}", loss=loss, memory_bytes=steps.peak_memory())
    if late:
        walk.head(late[0], streams)
    reporter.step("head", memory_bytes=steps.peak_memory())
    return streams


class _Walk:
    def __init__(
        self, plan: Plan, skeleton: Skeleton, steps: Steps, reporter: Reporter, *, tokens_per_batch: int
    ) -> None:
        self.plan, self.skeleton, self.steps, self.note = plan, skeleton, steps, reporter.note
        self.precision = calibration_precision(skeleton.device, bf16_weights=plan.bf16_linears)
        widest = max((one.inputs for one in plan.tensors.values() if one.calibrated), default=1)
        self.room = Room(skeleton.device, features=widest, tokens=tokens_per_batch, note=reporter.note)

    def simple(self, step: str, tensors: list[TensorPlan]) -> dict[str, Tensor]:
        """Encode tensors that need no activations, as one step; returns what each is restored to."""
        done = self.steps.recall(step, [tensor.name for tensor in tensors])
        if done is not None:
            return done
        outcomes, restored = [], {}
        for tensor in tensors:
            encoded = encode_uncalibrated(self.plan, tensor)
            outcome, restored[tensor.name] = self.steps.finish(tensor, encoded, self.plan.base_of(tensor))
            outcomes.append(outcome)
        self.steps.save(step, outcomes)
        return restored

    def layer(self, i: int, streams: Streams) -> float | None:
        """Compress decoder layer i and move the streams past it; returns its mean relative loss."""
        step = f"layer-{i:05d}"
        on_gpu = self.skeleton.device.type == "cuda"
        with part("read"):
            self.skeleton.load(self.skeleton.layer_names(i), partial(self.plan.finetuned.read, pinned=on_gpu))
        if on_gpu and i + 1 < self.skeleton.num_layers:
            self.plan.read_ahead(self.skeleton.layer_names(i + 1))
        restored = self.steps.recall(step, self.skeleton.layer_names(i))
        with part("groups"):
            groups = self._groups(i, streams) if restored is None else []
        student = self._turns(i, streams.student, streams)
        teacher = None if streams.teacher is None else self._turns(i, streams.teacher, streams)
        both = [one for one in (student, teacher) if one is not None]
        outcomes = None
        with taking_turns(self.skeleton, groups, both):
            if restored is None:
                outcomes = self._compress(i, groups, student, teacher)
            else:
                for one, k in zip(both, self.steps.wide_from(step), strict=False):  # none where none was wide
                    one.wide_from = k
                if teacher is not None:
                    teacher.finish_all()
                self.skeleton.load(restored, restored.__getitem__)
            try:
                with part("student: to its end"):
                    student.finish_all()  # a GPU has only begun it when this returns: it runs while we save
            except BaseException:
                if outcomes is not None:
                    with suppress(Exception):  # what stopped the forward is what to tell
                        self.steps.save(
                            step, outcomes, wide_from=(student.wide_from, teacher.wide_from if teacher else -1)
                        )
                raise
        if outcomes is not None:
            self.steps.save(step, outcomes, wide_from=[one.wide_from for one in both])
        if any(one.precision != self.precision for one in both):
            self.note(
                f"layer {i}: values beyond the range of {self.precision.inputs}, so it multiplied in wider numbers"
            )
        self.skeleton.free_layer(i)
        losses = [record.loss for record in self.steps.records(step) if record.loss is not None]
        return sum(losses) / len(losses) if losses else None

    def _turns(self, i: int, stream: HiddenStates, streams: Streams) -> LayerTurns:
        return LayerTurns(self.skeleton, i, stream, streams.calls, precision=self.precision, room=self.room)

    def _groups(self, i: int, streams: Streams) -> list[list[str]]:
        """Calibrated linears that share an input, in execution order, found by running one batch."""
        hidden = streams.student[len(streams.student) - 1]
        with record_inputs(self.skeleton, i) as recorder, self.precision.products():
            self.skeleton.run_layer(i, hidden, streams.calls[len(hidden)][i])
        groups = [[name for name in group.names if self.plan.tensors[name].calibrated] for group in recorder.groups]
        return [group for group in groups if group]

    def _compress(
        self, i: int, groups: list[list[str]], student: LayerTurns, teacher: LayerTurns | None
    ) -> list[Unfinished]:
        """Encode layer i, and leave what it is restored to in the model; the teacher's stream moves past the layer."""
        names = self.skeleton.layer_names(i)
        outcomes: list[Unfinished] = []
        weights = self.skeleton.weights(names)
        finetuned = dict(weights) if teacher is not None else {}
        for tensor in (self.plan.tensors[name] for name in names):
            if not tensor.calibrated:
                encoded = encode_uncalibrated(self.plan, tensor)
                outcome, restored = self.steps.finish(tensor, encoded, self.plan.base_of(tensor))
                outcomes.append(outcome)
                if tensor.treatment == "code":  # all others are restored to the teacher's own values
                    weights[tensor.name] = self.skeleton.prepare(tensor.name, restored)
        if not groups and teacher is not None:
            teacher.finish_all()
        stages = [[group] for group in groups] if self.plan.recipe.sequential else [groups] if groups else []
        for stage in stages:
            last = stage is stages[-1]
            statistics = self._collect(stage, student, teacher, weights, finetuned, last=last)
            if last:
                finetuned.clear()
            if len(stage) > 1:
                student.begin_all_anew()  # they have run linears that are coded only now
            for group in stage:
                for name, outcome, restored in self._encode(group, weights, statistics.pop(group[0])):
                    outcomes.append(outcome)
                    weights[name] = self.skeleton.prepare(name, restored)
        self.skeleton.swap(weights)
        return outcomes

    def _collect(
        self,
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
                self.plan.tensors[group[0]].inputs,
                device=self.skeleton.device,
                asymmetric=any(self.plan.tensors[name].needs_teacher for name in group),
            )
            for group in stage
        }
        changed = [name for name, weight in finetuned.items() if weights[name] is not weight]
        self.skeleton.swap(weights)
        for k in range(len(student)):
            targets: dict[str, Tensor] = {}
            if teacher is not None:
                self.skeleton.swap({name: finetuned[name] for name in changed})
                with part(f"teacher: to {where}"):
                    targets = teacher.inputs(k, leaders)
                if last:
                    with part("teacher: to its end"):
                        teacher.finish(k)
                self.skeleton.swap({name: weights[name] for name in changed})
            with part(f"student: to {where}"):
                inputs = student.inputs(k, leaders)
            with part("sums"), self.precision.products():
                for name in leaders:
                    sums[name].add(inputs[name], targets.get(name))
            for stream in (student, teacher):
                if stream is not None:
                    stream.rest(k)
        return sums

    def _encode(
        self, group: list[str], weights: dict[str, Tensor], statistics: HessianAccumulator
    ) -> Iterator[tuple[str, Unfinished, Tensor]]:
        """Encode the linears of one group; those with the same settings are solved together."""
        by_settings: dict[str, list[TensorPlan]] = {}
        for name in group:
            tensor = self.plan.tensors[name]
            by_settings.setdefault(tensor.settings.model_dump_json(), []).append(tensor)
        *others, last = by_settings.values()
        for tensors in others:
            yield from self._solve(tensors, weights, statistics.copy())
        yield from self._solve(last, weights, statistics)

    def _solve(
        self, tensors: list[TensorPlan], weights: dict[str, Tensor], statistics: HessianAccumulator
    ) -> Iterator[tuple[str, Unfinished, Tensor]]:
        """Encode linears with the same settings and input; weights: the fine-tuned ones, f32, on the device."""
        encode_group, settings = tensors[0].codec.encode_group, tensors[0].settings
        assert encode_group is not None
        with part("read"):
            references = {tensor.name: self.plan.base_of(tensor, self.skeleton.device) for tensor in tensors}
        encoded = encode_group(
            [_to_encode(self.plan.tensors[name], weights[name], reference) for name, reference in references.items()],
            statistics,
            settings,
        )
        for tensor in tensors:
            reference = references.pop(tensor.name)
            whole = with_added_rows(self.plan, tensor, encoded.pop(tensor.name))
            yield tensor.name, *self.steps.finish(tensor, whole, reference)

    def head(self, tensor: TensorPlan, streams: Streams) -> None:
        """Compress the output projection against the final norm's output."""
        step = "head"
        if self.steps.recall(step, [tensor.name]) is not None:
            return
        features = tensor.pair.info.shape[1]
        asymmetric = tensor.needs_teacher
        sums = HessianAccumulator(features, device=self.skeleton.device, asymmetric=asymmetric)
        for k in range(len(streams.student)):
            inputs = self.skeleton.run_final_norm(streams.student[k]).reshape(-1, features)
            targets = None
            if asymmetric and streams.teacher is not None:
                targets = self.skeleton.run_final_norm(streams.teacher[k]).reshape(-1, features)
            with self.precision.products():
                sums.add(inputs, targets)
        weights = {tensor.name: self.skeleton.prepare(tensor.name, self.plan.finetuned.read(tensor.name))}
        self.steps.save(step, [outcome for _, outcome, _ in self._solve([tensor], weights, sums)])


def _to_encode(tensor: TensorPlan, weight: Tensor, reference: Tensor | None) -> LinearToEncode:
    delta = delta_of(weight, reference, tensor.name)
    if tensor.transposed:
        return LinearToEncode(tensor.name, delta.t().contiguous(), weight.t().contiguous())
    return LinearToEncode(tensor.name, delta, weight[: delta.shape[0]])
