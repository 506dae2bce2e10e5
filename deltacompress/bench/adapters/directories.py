"""PEFT directories for a random base, full of random numbers: what `bench adapters` loads, like anybody's adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.adapters.tensors import PREFIX
from deltacompress.bench.synthetic import ModelShape
from deltacompress.checkpoints.dtypes import DTYPE_NAMES
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from deltacompress.checkpoints.writer import write_file, write_shards
from deltacompress.types import TensorInfo

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_STD, _SMALL = 0.02, 0.005


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of adapter. rank: of LoRA, 0: BOFT of two factors of blocks of `block`; dora: with magnitudes."""

    name: str
    modules: tuple[str, ...]
    rank: int = 0
    dora: bool = False
    block: int = 32

    def config(self) -> dict[str, Any]:
        """Its adapter_config.json."""
        targets = {"target_modules": list(self.modules)}
        if not self.rank:
            factors = {"boft_block_size": self.block, "boft_block_num": 0, "boft_n_butterfly_factor": 2}
            return {"peft_type": "BOFT", **factors, **targets}
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": 2 * self.rank, "use_dora": self.dora, **targets}

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], float, float]]:
        """What it has for a linear columns -> rows: name -> (shape, mean, spread)."""
        if not self.rank:
            blocks = (2, columns // self.block, self.block, self.block)
            return {"boft_R": (blocks, 0.0, _STD), "boft_s": ((rows, 1), 1.0, _STD)}
        found = {
            "lora_A.weight": ((self.rank, columns), 0.0, _STD),
            "lora_B.weight": ((rows, self.rank), 0.0, _SMALL),
        }
        norm = _STD * columns**0.5  # of a row of the base's weights
        return found | ({"lora_magnitude_vector": ((rows,), norm, 0.1 * norm)} if self.dora else {})

    def parameters(self, shape: ModelShape) -> int:
        """That it trains of a base of this shape; of BOFT, those of whole blocks."""
        found = 0
        for name, (_, (rows, *columns)) in shape.tensors().items():
            if name.split(".")[-2] in self.modules:
                found += sum(prod(size) for size, *_ in self.tensors(rows, columns[0]).values())
        return found


KINDS = {
    one.name: one
    for one in (
        Kind("lora16", ALL, rank=16),
        Kind("lora32", ATTENTION, rank=32),
        Kind("lora64", ATTENTION, rank=64),
        Kind("boft", ATTENTION),
        Kind("boft64", ATTENTION, block=64),
        Kind("dora16", ("q_proj", "v_proj"), rank=16, dora=True),
    )
}


def write_adapter(out: Path, kind: Kind, shape: ModelShape, device: torch.device) -> int:
    """An adapter of a base of this shape, in bf16, in the empty directory `out`; returns the bytes of its tensors."""
    found = [*_tensors(kind, shape, device)]
    write_shards(out, found, stem="adapter_model", single=ADAPTER_WEIGHTS)
    write_file(out / ADAPTER_CONFIG, [json.dumps(kind.config()).encode()])
    return sum(info.nbytes for info, _ in found)


def _tensors(kind: Kind, shape: ModelShape, device: torch.device) -> Iterator[tuple[TensorInfo, Callable[[], Tensor]]]:
    def make(size: tuple[int, ...], mean: float, spread: float) -> Tensor:
        return (torch.randn(size, device=device) * spread + mean).bfloat16().cpu()

    for name, (_, (rows, *columns)) in shape.tensors().items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in kind.modules:
            continue
        for part, (size, mean, spread) in kind.tensors(rows, columns[0]).items():
            info = TensorInfo(f"{PREFIX}{module}.{part}", DTYPE_NAMES[torch.bfloat16], size, 2 * prod(size))
            yield info, partial(make, size, mean, spread)
