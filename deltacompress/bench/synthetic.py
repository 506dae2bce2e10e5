"""Checkpoints and artifacts of any Llama shape, full of random numbers: what speed is measured on.

They are read by the runtime like any others; only the hashes of restored linears and heads are made up, because nobody
restores these. The formats are those of recipe int2-24 (or, with 4 bits, int4-24), without a lossless stage, and
nothing is left out: linears 2:4 with 2 bits, head and embedding dense with 2 bits, every row, norms exact. Or linears
of other inputs have other formats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from deltacompress.artifact.parts import file_record
from deltacompress.artifact.records import Manifest, ModelRecord, PartRecord, TensorRecord
from deltacompress.bench.kernels import random_parts
from deltacompress.checkpoints.dtypes import DTYPE_NAMES
from deltacompress.checkpoints.reader import Checkpoint, tensor_bytes
from deltacompress.checkpoints.rows import InMemory
from deltacompress.checkpoints.writer import write_checkpoint, write_file, write_shards
from deltacompress.codecs.encoded import restore_tensor
from deltacompress.codecs.formats import exact
from deltacompress.codecs.formats.packed import PackedSpec, Parts, part_shapes
from deltacompress.files.places import CONFIG, MANIFEST
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.types import TensorInfo, TensorKind

MIXED = (("2:4", 2), ("dense", 2), ("2:4", 4), ("dense", 3), ("2:4", 1), ("dense", 4))
"""Patterns and bits of linears whose recipe differs from input to input: these in turn."""
_INPUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
"""Which of a layer's four inputs a linear has."""
_STD = 0.02


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama, or with `experts` a Qwen3 mixture of them, `chosen` for a token, each with an MLP of width `mlp`.

    kv_heads: as many as heads by default. head_width: hidden / heads by default.
    """

    hidden: int
    layers: int
    mlp: int
    heads: int
    vocabulary: int
    context: int = 4096
    kv_heads: int | None = None
    head_width: int | None = None
    experts: int = 0
    chosen: int = 0

    @property
    def q_width(self) -> int:
        """Outputs of the query projection, and inputs of the output projection."""
        return (self.head_width or self.hidden // self.heads) * self.heads

    @property
    def kv_width(self) -> int:
        """Outputs of the key and of the value projection."""
        return self.q_width // self.heads * (self.kv_heads or self.heads)

    @property
    def kv_width_of_all(self) -> int:
        """Numbers that the keys and values of a token are, of all layers."""
        return 2 * self.layers * self.kv_width

    def __str__(self) -> str:
        """Its sizes, for a reader."""
        sizes = f"hidden {self.hidden}, {self.layers} layers, MLP {self.mlp}, {self.heads} heads"
        if self.experts:
            sizes += f", {self.chosen} of {self.experts} experts"
        return f"{'Qwen3' if self.experts else 'Llama'}, {sizes}, vocabulary {self.vocabulary}"

    def config(self) -> dict[str, Any]:
        """Its config.json. No end token: requests run as long as they are told to."""
        mixture = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.mlp,
            "norm_topk_prob": True,
            "head_dim": self.q_width // self.heads,
        }
        kind = mixture if self.experts else {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return kind | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, tuple[TensorKind, tuple[int, ...]]]:
        """Name -> kind and shape."""
        hidden, mlp = self.hidden, self.mlp
        found: dict[str, tuple[TensorKind, tuple[int, ...]]] = {
            "model.embed_tokens.weight": ("embedding", (self.vocabulary, hidden)),
            "lm_head.weight": ("head", (self.vocabulary, hidden)),
            "model.norm.weight": ("norm", (hidden,)),
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, rows in zip("qkv", (self.q_width, self.kv_width, self.kv_width), strict=True):
                found[f"{at}.self_attn.{name}_proj.weight"] = ("linear", (rows, hidden))
            found[f"{at}.self_attn.o_proj.weight"] = ("linear", (hidden, self.q_width))
            for where in [f"experts.{expert}." for expert in range(self.experts)] or [""]:
                for name, shape in (("gate", (mlp, hidden)), ("up", (mlp, hidden)), ("down", (hidden, mlp))):
                    found[f"{at}.mlp.{where}{name}_proj.weight"] = ("linear", shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{at}.{name}.weight"] = ("norm", (hidden,))
            if self.experts:
                found[f"{at}.mlp.gate.weight"] = ("other", (self.experts, hidden))
                for name in ("q_norm", "k_norm"):
                    found[f"{at}.self_attn.{name}.weight"] = ("norm", (self.q_width // self.heads,))
        return found

    def with_layers(self, layers: int) -> ModelShape:
        """The same with another number of layers."""
        return replace(self, layers=layers)

    @property
    def product_weights(self) -> int:
        """Weights that every step reads: of all linears and the head."""
        return sum(shape[0] * shape[1] for kind, shape in self.tensors().values() if kind in ("linear", "head"))


SHAPE_7B = ModelShape(4096, 32, 11008, 32, 32000)
SHAPE_TINY = ModelShape(128, 2, 256, 4, 256, 512)
SHAPES = {
    "tiny": SHAPE_TINY,
    "llama-7b": SHAPE_7B,
    "llama-13b": ModelShape(5120, 40, 13824, 40, 32000),
    "llama-70b": ModelShape(8192, 80, 28672, 64, 32000, kv_heads=8),
    "qwen3-30b-a3b": ModelShape(2048, 48, 768, 32, 151936, kv_heads=4, head_width=128, experts=128, chosen=8),
}


def write_base(out: Path, shape: ModelShape, device: torch.device) -> None:
    """A bf16 checkpoint in the empty directory `out`."""

    def make(kind: TensorKind, size: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(size, dtype=torch.bfloat16, device=device) * _STD
        return (drawn + 1 if kind == "norm" else drawn).cpu()

    write_checkpoint(
        out,
        [
            (_info(name, torch.bfloat16, size), partial(make, kind, size))
            for name, (kind, size) in shape.tensors().items()
        ],
    )
    write_file(out / CONFIG, [json.dumps(shape.config()).encode()])


def write_finetuned(out: Path, shape: ModelShape, device: torch.device, *, base: Path) -> None:
    """A bf16 checkpoint in the empty directory `out`: `base` with a tenth of its spread in noise on every tensor."""
    source = Checkpoint.open(base)

    def make(name: str) -> Tensor:
        weight = source.read(name).to(device)
        return (weight.float() + torch.randn(weight.shape, device=device) * (0.1 * _STD)).to(weight.dtype).cpu()

    write_checkpoint(out, [(info, partial(make, name)) for name, info in source.tensors.items()])
    write_file(out / CONFIG, [json.dumps(shape.config()).encode()])


def packed_spec(
    kind: TensorKind, size: tuple[int, ...], bits: int, mixed: Sequence[tuple[str, int]] = (), name: str = ""
) -> PackedSpec:
    """How a linear, a head or an embedding is packed. mixed: patterns and bits that linears have in turn, by `name`."""
    rows, columns = size
    pattern = "2:4" if kind == "linear" else "dense"
    if kind == "linear" and mixed:
        _, _, layer, _, linear, _ = name.split(".")
        pattern, bits = mixed[(4 * int(layer) + _INPUTS[linear]) % len(mixed)]
    return PackedSpec(rows, columns, bits, Sparsity.parse(pattern), columns, "minmax")


def delta_bytes(shape: ModelShape, bits: int) -> int:
    """Of the parts that write_delta would write."""
    found = 0
    for kind, size in shape.tensors().values():
        if kind == "norm":
            found += 2 * size[0]
        else:
            parts = part_shapes(packed_spec(kind, size, bits), storage=False).values()
            found += sum(dtype.itemsize * prod(dims) for dtype, dims in parts)
    return found


def write_delta(
    out: Path,
    shape: ModelShape,
    base: Checkpoint,
    device: torch.device,
    *,
    bits: int = 2,
    mixed: Sequence[tuple[str, int]] = (),
) -> Manifest:
    """An artifact of `base` in the empty directory `out`. mixed: as packed_spec, of a Llama without experts."""
    records: list[TensorRecord] = []
    stored: Parts = {}
    for name, (kind, size) in sorted(shape.tensors().items()):
        spec = None if kind == "norm" else packed_spec(kind, size, bits, mixed, name)
        record, parts = _tensor(name, kind, size, base, device, spec)
        records.append(record)
        stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}

    def ready(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    made = [(_info(name, tensor.dtype, tuple(tensor.shape)), ready(tensor)) for name, tensor in stored.items()]
    shards = sorted(set(write_shards(out, made, stem="delta").values()))
    write_file(out / CONFIG, [json.dumps(shape.config()).encode()])
    side = ModelRecord(name="synthetic", content_hash=base.fingerprint(), bytes=base.nbytes, tensors=len(records))
    manifest = Manifest(
        base=side,
        finetuned=side.model_copy(update={"content_hash": hashlib.sha256(b"made up").hexdigest()}),
        recipe={"name": "synthetic"},
        scope="delta",
        calibration=None,
        lossless="none",
        tensors=tuple(records),
        shards=tuple(file_record(out / name) for name in shards),
        files=(file_record(out / CONFIG),),
        tools={},
    )
    write_file(out / MANIFEST, [manifest.to_bytes()])
    return manifest


def _tensor(
    name: str, kind: TensorKind, size: tuple[int, ...], base: Checkpoint, device: torch.device, spec: PackedSpec | None
) -> tuple[TensorRecord, Parts]:
    restored = hashlib.sha256(name.encode()).hexdigest()
    params: dict[str, Any]
    if spec is None:
        before = base.read(name)
        after = before + torch.randn(size, dtype=before.dtype) * _STD
        params, parts = exact.encode(InMemory(after), InMemory(before))
        restored = hashlib.sha256(tensor_bytes(after)).hexdigest()
    else:
        params, parts = spec.to_json(), {part: tensor.cpu() for part, tensor in random_parts(spec, device).items()}
        parts["scales"] = (parts["scales"].float() * 0.01).to(torch.bfloat16)
        if kind == "embedding":
            like = torch.empty(size, dtype=torch.bfloat16, device="meta")
            after = restore_tensor("packed", params, parts, base.read(name).float(), like, name)
            restored = hashlib.sha256(tensor_bytes(after)).hexdigest()
    record = TensorRecord(
        name=name,
        dtype="BF16",
        shape=size,
        kind=kind,
        status="exact" if kind == "norm" else "coded",
        codec="exact" if kind == "norm" else "obs",
        format="exact" if kind == "norm" else "packed",
        params=params,
        base_name=name,
        base_sha256=base.sha256(name),
        sha256=restored,
        parts=tuple(_part(part, tensor) for part, tensor in sorted(parts.items())),
    )
    return record, parts


def _part(name: str, tensor: Tensor) -> PartRecord:
    raw = tensor_bytes(tensor.contiguous())
    return PartRecord(
        name=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        bytes=tensor.nbytes,
        sha256=hashlib.sha256(raw).hexdigest(),
        blake3=blake3(raw).hexdigest(),
    )


def _info(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return TensorInfo(name, DTYPE_NAMES[dtype], shape, size)
