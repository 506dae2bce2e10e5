"""What a calibrated run needs, estimated before it: memory by a model of what layerwise holds, time from below.

Neither is a promise. Memory counts the large tensors that are there at the same moment; time counts the products that
nobody can leave out, at the speed of one large product on this device now.
"""

from __future__ import annotations

import re
import time
from collections import Counter

import torch

from deltacompress.calibration.forwards.memory import sums_bytes
from deltacompress.calibration.forwards.precision import calibration_precision
from deltacompress.calibration.forwards.streams import host_share
from deltacompress.calibration.gradients import rows_for_gradients, waiting_bytes
from deltacompress.codecs.settings import ObsSettings
from deltacompress.compression.before.prepare import Prepared
from deltacompress.compression.layerwise.fisher import asked_of_layer
from deltacompress.compression.layerwise.model import sequences_per_batch
from deltacompress.compression.layerwise.needs import of_outputs_bytes
from deltacompress.compression.layerwise.walk import layer_bytes, room_of
from deltacompress.compression.planning import TensorPlan
from deltacompress.compression.steps import RESTORING, Steps
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import SILENT

_F32 = 4
_PRODUCT = {"cuda": 8192, "cpu": 1024}
_ACTIVATIONS = 6
"""Results of the widest linear, about, that a forward of one batch holds at once."""


def memory(prepared: Prepared, processes: int = 1) -> dict[str, int]:
    """Bytes by what they are for, and `total_bytes`, on the device that computes; `process_bytes`: host memory now.

    waiting_at_most_bytes: what forwards that wait in the middle of a layer take besides, where there is room
    (calibration/forwards/memory.py); without room each stage runs them anew.

    fisher_bytes: host memory for what outputs are worth, where a rule asks for it; a GPU with room takes some of it.

    processes: that share the samples; these are the figures of one, the first.

    Of a recipe that does not calibrate: the largest tensor, some ten times over while its codes are made.
    """
    plan, skeleton, tokens = prepared.plan, prepared.skeleton, prepared.tokens
    process = Steps.peak_memory()
    if tokens is None or skeleton is None or not plan.calibrated:
        largest = max((tensor.pair.info.nbytes for tensor in plan.tensors.values()), default=0)
        return {"process_bytes": process, "largest_tensor_bytes": largest, "total_bytes": process + largest}
    samples, seq_len = -(-tokens.ids.shape[0] // processes), tokens.ids.shape[1]
    both = 2 if plan.asymmetric else 1
    layers = [[plan.tensors[name] for name in skeleton.layer_names(i)] for i in range(skeleton.num_layers)]
    layer = layer_bytes(plan, skeleton)
    linears = [tensor for one in layers for tensor in one if tensor.calibrated]
    statistics = _statistics(skeleton, layers, both)
    solver = max((_solver(tensor) for tensor in linears), default=0)
    batch = sequences_per_batch(skeleton, seq_len) * seq_len
    widest = max((max(tensor.pair.info.shape) for tensor in linears), default=0)
    streams = samples * seq_len * skeleton.hidden_size * _F32 * both
    share = host_share(room_of(plan, skeleton, batch, SILENT.note), streams, layer, processes=processes)
    away = int(share * streams)
    found = {
        "layer_bytes": layer,
        "statistics_bytes": statistics,
        "solver_bytes": solver,
        "activations_bytes": min(batch, samples * seq_len) * widest * _F32 * _ACTIVATIONS,
        "streams_bytes": streams - away,
    }
    size = 2 if skeleton.device.type == "cuda" else _F32
    waiting = samples * seq_len * (widest * size + 2 * skeleton.hidden_size * _F32) * both
    on_device = sum(found.values()) - min(found["solver_bytes"], found["activations_bytes"])  # one after the other
    on_device = max(on_device, _outer(skeleton, prepared) + found["streams_bytes"])
    fisher = _fisher(prepared, skeleton, tokens.ids[:samples], processes)
    on_host = process + away + fisher
    if fisher:
        found["fisher_bytes"] = fisher
    if skeleton.device.type == "cpu":
        found |= {"process_bytes": process, "total_bytes": process + on_device + fisher}
    else:
        found |= {"process_bytes": process, "total_bytes": on_device, "host_bytes": on_host}
    return found | {"waiting_at_most_bytes": waiting if plan.recipe.sequential else 0}


def _fisher(prepared: Prepared, skeleton: Skeleton, ids: torch.Tensor, processes: int) -> int:
    """What outputs are worth, and what gives it, in host memory."""
    plan = prepared.plan
    layers = [asked_of_layer(plan, skeleton, i) for i in range(skeleton.num_layers)]
    outputs = [[plan.tensors[name].outputs for name in one] for one in layers]
    widest = max((size for one in outputs for size in one), default=0)
    tokens = rows_for_gradients(ids, -(-widest // processes)).numel()
    return waiting_bytes(tokens, skeleton.hidden_size, outputs) if widest else 0


def _outer(skeleton: Skeleton, prepared: Prepared) -> int:
    """The embedding (or the head) in fp32, and what is made of it when it is coded and restored."""
    outer = [prepared.plan.tensors[name].pair.info.numel for name in skeleton.outer_names()]
    return RESTORING * max(outer, default=0)


def _statistics(skeleton: Skeleton, layers: list[list[TensorPlan]], streams: int) -> int:
    """Bytes of sums of so many streams at once; of experts all of a stage, though with less memory it is some."""
    found: list[int] = []
    for i, layer in enumerate(layers):
        linears = {tensor.name: tensor for tensor in layer if tensor.calibrated}
        whole = {name: sums_bytes(_columns(one), _columns(one) * (streams - 1)) for name, one in linears.items()}
        widths = Counter(_columns(tensor) for tensor in linears.values())  # more of one may share an input
        experts = [stage.expert_of for stage in skeleton.expert_stages(i)]
        for name, tensor in linears.items():
            alone = widths[_columns(tensor)] == 1 and not any(name in one for one in experts)
            by_outputs = alone and tensor.by_outputs
            found.append(of_outputs_bytes(tensor, skeleton.device) if by_outputs else whole[name])
        for expert_of in experts:
            own = {expert_of[name]: whole[name] for name in expert_of if name in whole}
            found.append(sum(own.values()) + max(own.values(), default=0))
    return max(found, default=0)


def _columns(tensor: TensorPlan) -> int:
    shape = tensor.pair.info.shape
    return shape[0] if tensor.transposed else int(tensor.pair.info.numel // shape[0])


def _solver(tensor: TensorPlan) -> int:
    """The factor and its twin; targets, base and result of one linear; of a drawn pattern each weight's scale."""
    drawn = isinstance(tensor.settings, ObsSettings) and tensor.settings.pattern.kind == "drawn"
    return (2 * _columns(tensor) ** 2 + (7 if drawn else 3) * tensor.pair.info.numel) * _F32


def least_seconds(prepared: Prepared, processes: int = 1) -> dict[str, float] | None:
    """The products of calibration at this device's speed: each stream once through each layer, the sums of Hessians.

    No run is faster; real ones also solve, read, pack, hash and write. Experts are not counted, for how many tokens
    each gets is not known before. None where nothing is calibrated.
    """
    plan, skeleton, tokens = prepared.plan, prepared.skeleton, prepared.tokens
    if tokens is None or skeleton is None or not plan.calibrated:
        return None
    both = 2 if plan.asymmetric else 1
    merged = skeleton.odd_linears.merged
    linears = [tensor for tensor in plan.tensors.values() if tensor.kind == "linear" and tensor.name not in merged]
    forward = 2 * sum(tensor.pair.info.numel for tensor in linears) * both
    sums: dict[tuple[str, int], int] = {}  # by layer and inputs: linears with equally many may share them
    for tensor in linears:
        if tensor.calibrated:
            size = _columns(tensor)
            drift = 4 * size * tensor.outputs if tensor.by_outputs else 2 * size**2
            at = ".".join(re.findall(r"\d+", tensor.name)[:1]), size
            sums[at] = max(sums.get(at, 0), size**2 + (drift if tensor.needs_teacher else 0))
    work = float((forward + sum(sums.values())) * tokens.ids.numel())
    rate = _product_rate(skeleton.device, bf16=plan.bf16_linears) * processes
    return {"tflop": work / 1e12, "product_tflop_s": rate / 1e12, "at_least_seconds": work / rate}


def _product_rate(device: torch.device, *, bf16: bool) -> float:
    """Operations a second of a large product in the precision of calibration, the best of a few."""
    size, best = _PRODUCT[device.type], float("inf")
    precision = calibration_precision(device, bf16_weights=bf16)
    left, right = (precision.rounded(torch.randn(size, size, device=device)) for _ in range(2))
    with precision.products():
        for _ in range(4):
            begun = time.perf_counter()
            float((left @ right)[0, 0])  # waits for a GPU
            best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best
