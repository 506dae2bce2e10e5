"""Speed of compression itself: what `compress` takes for each decoder layer of a random pair, and what it has to take.

The pair is written to disk and goes the whole way, from checkpoint files to a published artifact. The floor of a layer
is the arithmetic that nobody can leave out (each stream through the layer once, and the sums of the Hessians, half of a
symmetric one), at the speed of a large product of 16-bit inputs, measured in the same run.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench.clock import cpu_time, gpu_clock
from deltacompress.bench.figures import layer_times, product_rate, stage_table
from deltacompress.bench.stages import IdleMeter, StageClock, idle_in
from deltacompress.bench.synthetic import SHAPES, ModelShape, write_base, write_finetuned
from deltacompress.calibration.forwards.precision import calibration_precision
from deltacompress.checkpoints.writer import write_file
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import ObsSettings
from deltacompress.compression.driver import compress
from deltacompress.compression.job import CompressResult
from deltacompress.devices import chosen_devices, current, device_numbers, map_in_pages
from deltacompress.errors import InputError, Interrupted, option, switch
from deltacompress.reporter import SILENT, Reporter, timed_by

_LAYERS = 3
_PRODUCT = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class LayersBench:
    """laps: seconds of each step, in order; total_seconds: with publication and the look at fidelity after the last."""

    settings: dict[str, Any]
    backend: str
    total_seconds: float
    laps: tuple[dict[str, Any], ...]
    tflop_per_layer: float
    product_tflop_s: float
    peak_memory_bytes: int
    peak_device_bytes: int | None
    stages: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        layers = [lap["seconds"] for lap in self.laps if lap["step"].removeprefix("layer ").isdecimal()]
        gradients = [lap["seconds"] for lap in self.laps if lap["step"].endswith((", forward", ", back"))]
        return self.settings | {
            "backend": self.backend,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "total_seconds": self.total_seconds,
            **layer_times(layers, self.tflop_per_layer, self.product_tflop_s),
            **({"gradient_seconds_per_layer": sum(gradients) / len(layers)} if gradients else {}),
            "tflop_per_layer": self.tflop_per_layer,
            "product_tflop_s": self.product_tflop_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "rows": list(self.laps),
            **self.stages,
        }


class Laps:
    """A reporter that times the steps."""

    def __init__(self, outer: Reporter) -> None:
        self._outer, self._last = outer, time.perf_counter()
        self.laps: list[dict[str, Any]] = []

    def phase(self, name: str, total: int | None = None) -> None:
        """Pass it on."""
        self._outer.phase(name, total)

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Note the time since the last step, and pass it on."""
        now = time.perf_counter()
        self.laps.append({"step": label, "seconds": now - self._last, "loss": loss})
        self._last = now
        self._outer.step(label, loss=loss, memory_bytes=memory_bytes)

    def note(self, message: str) -> None:
        """Pass it on, unless it advises to --resume: the directory goes with the run."""
        if switch("resume") not in message:
            self._outer.note(message)


class _Watched(Laps):
    """Laps that look closer at the last of `layers` layers."""

    def __init__(self, outer: Reporter, layers: int, device: torch.device) -> None:
        super().__init__(outer)
        self._labels = f"layer {layers - 2}" if layers > 1 else "embeddings and norms", f"layer {layers - 1}"
        self._meter = IdleMeter() if device.type == "cuda" else None
        self.clock = StageClock(device)
        self.stages: dict[str, Any] = {}

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Begin to watch, or end; then as any other step."""
        before, last = self._labels
        if label == last:
            parts = self.clock.lap()
            seconds = time.perf_counter() - self._last
            idle = self._meter.end() if self._meter else None
            spans = parts.pop("spans")
            within = None if idle is None else idle_in(idle, spans)
            whole = None if idle is None else sum(end - start for start, end in idle)
            self.stages = {"seconds": seconds, "idle_seconds": whole, "idle_in": within, **parts}
            self._last = time.perf_counter() - seconds  # reading the trace took a while
        super().step(label, loss=loss, memory_bytes=memory_bytes)
        if label == before:
            self.clock.lap()
            if self._meter:
                self._meter.begin(self.clock)
            self._last = time.perf_counter()


def run(
    *,
    device: str = "auto",
    devices: str | Sequence[int] | None = None,
    recipe: str = "int4-24",
    samples: int = 256,
    seq_len: int | None = None,
    layers: int = _LAYERS,
    shape: str | None = None,
    stages: bool = False,
    device_memory: str | int | None = None,
    scratch: Path | None = None,
    reporter: Reporter | None = None,
) -> LayersBench:
    """Compress a few layers of a random pair.

    shape: a name of synthetic.SHAPES; llama-7b on a GPU by default, tiny on a CPU.
    seq_len: 2048 by default, or what the shape has positions for. stages: look where the time of the last layer goes,
    which costs it a little. devices, device_memory: as `compress`; the product's rate is that of all devices together,
    stages are the first one's. scratch: directory for the files (6 GB for three layers of the 7B shape), a temporary
    one by default.

    Raises:
        InputError: a recipe that does not calibrate every linear, or a longer sequence.
        BackendError: no such device here.
    """
    map_in_pages()
    cards = chosen_devices(device_numbers(devices), device)
    where = cards[0]
    chosen = Recipe.load(recipe)
    reporter = reporter or SILENT
    chosen_shape = SHAPES[shape or ("llama-7b" if where.type == "cuda" else "tiny")].with_layers(layers)
    length = _length(chosen_shape, seq_len)
    forwards, sums = _flop_per_token(chosen_shape, chosen, length)
    with current(where):
        rate = _product_rate(where) * len(cards)
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        reporter.phase("writing a random pair", 3)
        write_pair(Path(made), chosen_shape, samples * length, where, reporter)
        laps = _Watched(reporter, layers, where) if stages else Laps(reporter)  # its clock starts now
        with timed_by(laps.clock) if isinstance(laps, _Watched) else nullcontext():
            split = {"device": where.type, "devices": devices, "device_memory": device_memory}
            done = _compress_pair(Path(made), chosen, samples, length, split, laps)
    settings: dict[str, Any] = {"device_memory": device_memory} if device_memory else {}
    settings |= {"devices": len(cards)} if devices else {}
    settings |= {"shape": str(chosen_shape), "recipe": recipe, "samples": samples, "seq_len": length, "layers": layers}
    tflop = [flop * samples * length / 1e12 for flop in (forwards, sums)]
    return LayersBench(
        settings,
        done.backend,
        done.seconds,
        tuple(laps.laps),
        sum(tflop),
        rate / 1e12,
        done.peak_memory_bytes,
        done.peak_device_bytes,
        stage_table(laps.stages, tflop[0], tflop[1], rate / 1e12) if isinstance(laps, _Watched) else {},
    )


def _length(shape: ModelShape, seq_len: int | None) -> int:
    length = seq_len or min(2048, shape.context)
    if length > shape.context:
        raise InputError(
            f"{shape} has {shape.context} positions",
            where=f"{option('seq_len')} {length}",
            way_out="use that or less",
        )
    return length


def _compress_pair(
    root: Path,
    recipe: Recipe,
    samples: int,
    seq_len: int,
    where: Mapping[str, Any],
    reporter: Reporter,
) -> CompressResult:
    try:
        return compress(
            root / "base",
            root / "finetuned",
            recipe=recipe,
            out=root / "out",
            calibration=root / "calibration.txt",
            samples=samples,
            seq_len=seq_len,
            reporter=reporter,
            **where,
        )
    except Interrupted as stop:
        raise KeyboardInterrupt from stop  # nothing waits for --resume: the files go


def write_pair(root: Path, shape: ModelShape, tokens: int, device: torch.device, reporter: Reporter) -> None:
    """root/base, root/finetuned and root/calibration.txt, enough of it for `tokens` tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}).encode()
    for name, write in (("base", write_base), ("finetuned", partial(write_finetuned, base=root / "base"))):
        (root / name).mkdir()
        write(root / name, shape, device)
        write_file(root / name / "tokenizer.json", [words.to_str().encode()])
        write_file(root / name / "tokenizer_config.json", [config])
        reporter.step(name)
    drawn = torch.randint(shape.vocabulary, (tokens // 128 + 1, 160), generator=torch.Generator().manual_seed(0))
    lines = (" ".join(f"w{token}" for token in row) + "\n" for row in drawn.tolist())
    write_file(root / "calibration.txt", (line.encode() for line in lines))
    reporter.step("calibration data")


def _flop_per_token(shape: ModelShape, recipe: Recipe, seq_len: int) -> tuple[float, float]:
    """Operations for each token: each stream's one pass through a layer (attention causal); the Hessians' sums.

    Of experts those that a token goes to; their sums, and those of all that their products receive.
    """
    tensors = shape.with_layers(1).tensors()
    rules = [recipe.rule_for(name, kind) for name, (kind, _) in tensors.items() if kind == "linear"]
    obs = [rule for rule in rules if isinstance(rule, ObsSettings)]
    if len(obs) < len(rules):
        raise InputError(
            f"recipe {recipe.name} does not calibrate every linear", way_out="give one that does (codec obs)"
        )
    asymmetric = any(rule.asymmetric > 0 for rule in obs)
    mlps = shape.chosen or 1
    weights = shape.hidden * (2 * shape.q_width + 2 * shape.kv_width + 3 * mlps * shape.mlp + shape.experts)
    forward = 2 * weights + 2 * seq_len * shape.q_width
    inputs = 2 * shape.hidden**2 + shape.q_width**2 + shape.mlp**2  # q/k/v, gate/up, o and down
    if shape.experts:
        inputs += mlps * shape.hidden**2 + (2 * mlps - 1) * shape.mlp**2
    if not asymmetric:
        return float(forward), float(inputs)
    wide = [shape.q_width] if shape.experts else [shape.q_width, shape.mlp]  # o's and down's, by their outputs
    return 2.0 * forward, 3.0 * inputs - sum(max(2 * size**2 - 4 * shape.hidden * size, 0) for size in wide)


def _product_rate(device: torch.device) -> float:
    """Operations a second of a large product as the walk's, of random numbers."""
    size = _PRODUCT[device.type]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = gpu_clock(device) if device.type == "cuda" else cpu_time
    with calibration_precision(device, bf16_weights=True).products():
        return product_rate(size, clock(lambda: left @ right, 10))
