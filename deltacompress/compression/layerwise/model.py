"""The calibrated walk through a model, with one decoder layer in memory (DeltaZip algorithm 1).

Two streams of hidden states run side by side: the *student*, whose layers before this one are compressed, gives the
inputs that the layer will really see; the *teacher*, the fine-tuned model, gives the targets (only when a rule is
asymmetric). For each layer: collect the Hessians, encode, **put base + decoded delta back into the layer**, run the
student through it, hand both streams to the next layer (`layer`).

On the device are: one layer in fp32 (of what is encoded already, until the layer's last pass, the teacher's weights
too), the statistics of one stage, one batch of activations, and, where there is room, the streams
(calibration/forwards/streams.py) and what forwards that wait hold.
The embedding is there only for the captures, the head only while it is encoded or judged. Fine-tuned linears are read
once: the layer's own parameters are what the solver starts from.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from deltacompress.calibration.fisher_sum import FisherSum
from deltacompress.calibration.forwards.recording import capture_calls
from deltacompress.calibration.forwards.streams import host_share
from deltacompress.compression.layerwise.fisher import fisher_of
from deltacompress.compression.layerwise.layer import compress_layer, read_ahead
from deltacompress.compression.layerwise.solving import solve
from deltacompress.compression.layerwise.walk import Streams, Walk, layer_bytes
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.ranks.ranks import ALONE, Ranks
from deltacompress.compression.ranks.steps import WalkSteps
from deltacompress.compression.steps import Steps
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.numerics.triton.repeated import forgotten
from deltacompress.processes.collector import heap_spared
from deltacompress.reporter import Reporter

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}
"""A GPU waits for launches, and casts a layer's weights to fp16, for each batch: larger ones make up for it."""
_FEW_EXPERTS, _MOST_AT_ONCE = 32, 4
"""A GPU takes so many times as many where many experts run one by one, each launched for its share of a batch."""


def compress_layers(
    plan: Plan, skeleton: Skeleton, ids: Tensor, steps: WalkSteps, reporter: Reporter, ranks: Ranks = ALONE
) -> Streams:
    """Encode every tensor of the model; returns the streams after the last layer (for a look at fidelity).

    The skeleton keeps the compressed model's outer weights, without embedding and head.

    ids: int64 [samples, seq_len], of which each rank calibrates on its share.
    """
    with forgotten(), heap_spared() if skeleton.device.type == "cuda" else nullcontext():
        return _compress_layers(plan, skeleton, ids, steps, reporter, ranks)


def _compress_layers(
    plan: Plan, skeleton: Skeleton, ids: Tensor, steps: WalkSteps, reporter: Reporter, ranks: Ranks
) -> Streams:
    ids = ids[ranks.share(len(ids))]
    batch = sequences_per_batch(skeleton, ids.shape[1])
    walk = Walk.of(plan, skeleton, steps, ranks, reporter, tokens_per_batch=batch * ids.shape[1])
    outer = [plan.tensors[name] for name in skeleton.outer_names()]
    late = [tensor for tensor in outer if tensor.name == skeleton.head_name and tensor.calibrated]
    body = [tensor.name for tensor in outer if tensor.name != skeleton.head_name]
    stream_bytes = ids.numel() * skeleton.hidden_size * torch.float32.itemsize * (2 if plan.asymmetric else 1)
    share = host_share(walk.room, stream_bytes, layer_bytes(plan, skeleton), processes=ranks.size)
    teacher = None
    fisher: dict[str, FisherSum] = {}
    if plan.asymmetric:
        skeleton.load(body, plan.finetuned.read)
        teacher, _ = capture_calls(skeleton, ids, batch, host_share=share)
        if plan.fisher:
            own_head = [skeleton.head_name] if skeleton.head_name else []  # else the embedding, which is there
            skeleton.load(own_head, plan.finetuned.read)
            fisher = fisher_of(walk, ids, teacher, reporter)
            skeleton.free(own_head)
        skeleton.free([skeleton.embedding_name])
    reporter.phase("compressing", skeleton.num_layers + 2)
    read_ahead(walk, 0)
    restored = _simple(walk, "outer", [one for one in outer if one not in late and one.treatment != "alias"])
    skeleton.load(body, restored.__getitem__)
    del restored
    student, calls = capture_calls(skeleton, ids, batch, host_share=share)
    skeleton.free([skeleton.embedding_name])
    streams = Streams(student, teacher, calls, fisher=fisher)
    reporter.step("embeddings and norms", memory_bytes=Steps.peak_memory())
    for i in range(skeleton.num_layers):
        loss = compress_layer(walk, i, streams)
        reporter.step(f"layer {i}", loss=loss, memory_bytes=Steps.peak_memory())
    streams.forget_kept()
    if walk.ranks.first:  # all of them know it
        walk.agreement.tell(reporter.note)
    if late:
        _head(walk, late[0], streams)
    reporter.step("head", memory_bytes=Steps.peak_memory())
    return streams


def sequences_per_batch(skeleton: Skeleton, seq_len: int) -> int:
    """How many calibration sequences run at once."""
    tokens = TOKENS_PER_BATCH[skeleton.device.type]
    if skeleton.device.type == "cuda":
        stages = [stage for i in range(skeleton.num_layers) for stage in skeleton.expert_stages(i)]
        experts = max((len(set(stage.expert_of.values())) for stage in stages), default=0)
        tokens *= min(max(experts // _FEW_EXPERTS, 1), _MOST_AT_ONCE)
    return max(tokens // seq_len, 1)


def _simple(walk: Walk, step: str, tensors: list[TensorPlan]) -> dict[str, Tensor]:
    """Encode tensors that need no activations, as one step; returns what each is restored to."""
    done = walk.steps.recall(step, [tensor.name for tensor in tensors])
    if done is not None:
        return done
    outcomes, restored = [], {}
    for tensor in tensors:
        outcome, restored[tensor.name] = walk.steps.encode(tensor, walk.skeleton.device)
        outcomes.append(outcome)
    walk.steps.save(step, outcomes)
    return restored


def _head(walk: Walk, tensor: TensorPlan, streams: Streams) -> None:
    """Compress the output projection against the final norm's output."""
    step, skeleton = "head", walk.skeleton
    if (recalled := walk.steps.recall(step, [tensor.name])) is not None:
        streams.head = recalled[tensor.name]
        return
    features = tensor.pair.info.shape[1]
    asymmetric = tensor.needs_teacher
    sums = HessianAccumulator(features, device=skeleton.device, asymmetric=asymmetric)
    for k in range(len(streams.student)):
        inputs = skeleton.run_final_norm(streams.student[k]).reshape(-1, features)
        targets = None
        if asymmetric and streams.teacher is not None:
            targets = skeleton.run_final_norm(streams.teacher[k]).reshape(-1, features)
        with walk.precision.products():
            sums.add(inputs, targets)
    sums.reduce_(walk.ranks.sum_, walk.ranks.total)
    weights = {tensor.name: skeleton.prepare(tensor.name, walk.plan.finetuned.read(tensor.name))}
    [(_, outcome, streams.head)] = solve(walk, [tensor], weights, sums)
    walk.steps.save(step, [outcome])
