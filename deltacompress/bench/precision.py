"""How exact the statistics of asymmetric targets are in the precisions that a device multiplies in.

E = sum (x' - x) x^T is made of the difference of two forwards: the smaller a delta, the more of it the rounding of both
can hide. So one layer of a pair is run in each precision, with the delta as it is and smaller, and its sums are held
against those of a float64 forward. The student's layer is rounded to 4 bits: x and x' differ as they do in a walk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.bench.synthetic import SHAPES, write_base, write_finetuned
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.recording import record_inputs
from deltacompress.checkpoints.pairing import pair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.devices import device_name, named_device
from deltacompress.errors import InputError, option
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.grid import dequantize, fit_grid, quantize
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import SILENT, Reporter

SCALES = (1.0, 1 / 4, 1 / 16)
_BITS = 4


@dataclass(frozen=True, slots=True)
class PrecisionBench:
    """rows: of each scale of the delta, linear and precision, the error of E relative to E, in Frobenius' norm."""

    settings: dict[str, Any]
    device: str
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return self.settings | {"device": self.device, "rows": list(self.rows)}


def run(
    base: str | Path | None = None,
    finetuned: str | Path | None = None,
    *,
    shape: str | None = None,
    layer: int = 0,
    samples: int = 16,
    seq_len: int | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> PrecisionBench:
    """Measure one layer of a pair, or of a random one of a `shape` (llama-7b on a GPU by default, tiny on a CPU).

    Its input is what the base makes of random tokens, `samples` rows of `seq_len` (2048 by default, or as many as the
    model has positions for).

    Raises:
        InputError: half a pair, a pair that is none, a layer that is not there, more tokens than it has
            positions for. BackendError: no such device here.
    """
    where, reporter = named_device(device), reporter or SILENT
    if (base is None) != (finetuned is None):
        raise InputError("a pair has two models", way_out="give BASE and FINETUNED, or neither")
    with tempfile.TemporaryDirectory() as made:
        if base is None or finetuned is None:
            name = shape or ("llama-7b" if where.type == "cuda" else "tiny")
            base, finetuned = _random_pair(Path(made), name, layer + 1, where)
        opened = pair(Checkpoint.open(base), Checkpoint.open(finetuned))
        skeleton = Skeleton.from_config(opened.finetuned.path, opened.finetuned.tensors, device=where)
        if layer >= skeleton.num_layers:
            raise InputError(f"there are {skeleton.num_layers} layers", where=f"{option('layer')} {layer}")
        if skeleton.expert_stages(layer):
            told = f"layer {layer} holds experts, whose inputs depend on where a router sends tokens"
            raise InputError(told, where=opened.finetuned.path, way_out="give a model or a layer without")
        ids = _ids(skeleton, samples, seq_len)
        reporter.phase("layer by layer", len(SCALES))
        rows: list[dict[str, Any]] = []
        for scale in SCALES:
            rows += _rows(opened.base, opened.finetuned, skeleton, layer, ids, scale)
            reporter.step(f"delta times {scale:g}")
        if not rows:
            told = f"layer {layer} is the same in both models"
            raise InputError(told, where=opened.finetuned.path, way_out="give another layer, or a fine-tuned model")
        settings = {"pair": "random" if made in str(base) else str(opened.finetuned.path), "layer": layer}
    return PrecisionBench(settings | {"samples": samples, "seq_len": ids.shape[1]}, device_name(where), tuple(rows))


def _random_pair(root: Path, shape: str, layers: int, device: torch.device) -> tuple[Path, Path]:
    chosen, (base, finetuned) = SHAPES[shape].with_layers(layers), (root / "base", root / "finetuned")
    base.mkdir()
    finetuned.mkdir()
    write_base(base, chosen, device)
    write_finetuned(finetuned, chosen, device, base=base)
    return base, finetuned


def _ids(skeleton: Skeleton, samples: int, seq_len: int | None) -> Tensor:
    config = skeleton.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 2048
    if (seq_len or 0) > positions:
        told = f"the model has {positions} positions"
        raise InputError(told, where=f"{option('seq_len')} {seq_len}", way_out="give fewer tokens")
    length = seq_len or min(2048, positions)
    return torch.randint(config.vocab_size, (samples, length), generator=torch.Generator().manual_seed(0))


def _rows(
    base: Checkpoint, finetuned: Checkpoint, skeleton: Skeleton, layer: int, ids: Tensor, scale: float
) -> Iterator[dict[str, Any]]:
    skeleton.load(skeleton.outer_names(), base.read)
    hidden, calls = skeleton.capture(ids)
    for i in range(layer):
        skeleton.load(skeleton.layer_names(i), base.read)
        hidden = skeleton.run_layer(i, hidden, calls[i])
        skeleton.free_layer(i)
    teacher: dict[str, Tensor] = {}
    student: dict[str, Tensor] = {}
    for name in skeleton.layer_names(layer):
        teacher[name], student[name] = _weights(base, finetuned, skeleton, name, scale)
    forward = partial(_inputs, skeleton, layer, teacher, student)
    exact = {name: _sum(*both) for name, both in forward(hidden, calls[layer], torch.float64).items()}
    apart = [name for name, drift in exact.items() if drift.any()]  # the first linears of the layer see one stream
    for precision, products in _precisions(skeleton.device).items():
        with products():
            found = forward(hidden, calls[layer], torch.float32)
            for name in apart:
                x, target = found[name]
                sums = HessianAccumulator(x.shape[1], device=x.device, asymmetric=True)
                sums.add(x, target)
                drift = sums.finish()[1]
                assert drift is not None
                wanted = exact[name] * (2 / len(x))
                error = float((drift.double() - wanted).norm() / wanted.norm())
                yield {"delta_times": scale, "linear": name.split(".")[-2], "precision": precision, "error_of_E": error}
    skeleton.free_layer(layer)


def _weights(
    base: Checkpoint, finetuned: Checkpoint, skeleton: Skeleton, name: str, scale: float
) -> tuple[Tensor, Tensor]:
    """The teacher's and the student's: base + scale * delta, and the same with the delta rounded."""
    start = base.read(name).to(skeleton.device).float()
    delta = (finetuned.read(name).to(skeleton.device).float() - start) * scale
    rounded = delta
    if name in skeleton.linear_names(int(next(part for part in name.split(".") if part.isdigit()))):
        grid = fit_grid(delta, bits=_BITS, group=delta.shape[1], kind="minmax")
        rounded = dequantize(quantize(delta, grid), grid)
    return skeleton.prepare(name, start + delta), skeleton.prepare(name, start + rounded)


def _inputs(
    skeleton: Skeleton,
    layer: int,
    teacher: dict[str, Tensor],
    student: dict[str, Tensor],
    hidden: Tensor,
    call: LayerCall,
    dtype: torch.dtype,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(x, x') of the first linear of each group, [tokens, in] each, of a layer in this dtype."""
    found = []
    for weights in (student, teacher):
        skeleton.swap({name: torch.nn.Parameter(one.to(dtype), False) for name, one in weights.items()})
        seen: dict[str, Tensor] = {}
        with record_inputs(skeleton, layer) as recorder, _watching(skeleton, layer, seen):
            skeleton.run_layer(layer, hidden.to(dtype), _in_dtype(call, dtype))
        found.append({group.names[0]: seen[group.names[0]] for group in recorder.groups})
    return {name: (found[0][name], found[1][name]) for name in found[0]}


@contextmanager
def _watching(skeleton: Skeleton, layer: int, seen: dict[str, Tensor]) -> Iterator[None]:
    """Keep what each linear receives, as products take it: a copy in fp16 under such an autocast."""

    def watch(name: str) -> Callable[..., None]:
        def before(_module: object, args: tuple[Any, ...]) -> None:
            half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16
            seen[name] = (args[0].half() if half else args[0]).reshape(-1, args[0].shape[-1])

        return before

    handles = [skeleton.module_of(name).register_forward_pre_hook(watch(name)) for name in skeleton.linear_names(layer)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_dtype(call: LayerCall, dtype: torch.dtype) -> LayerCall:
    """The same call with tables and masks of this dtype."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return tuple(map(cast, value)) if isinstance(value, tuple) else value

    kwargs = {name: cast(value) for name, value in call.kwargs.items()}
    return LayerCall(call.shape, cast(call.args), kwargs, call.by_keyword)


def _sum(x: Tensor, target: Tensor) -> Tensor:
    return (target - x).T @ x


def _precisions(device: torch.device) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What forwards can multiply in here, by what it is called."""
    if device.type == "cuda":
        bf16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
        return {"tf32": Precision("tf32").products, "fp16": Precision("fp16").products, "bf16": bf16}
    return {"fp32": Precision("fp32").products, "bf16": Precision("bf16").products}
