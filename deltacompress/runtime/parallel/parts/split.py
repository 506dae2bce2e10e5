"""Which part of each tensor of a model is whose: heads and the MLP's width in equal parts, the vocabulary too.

The model of a rank is the plain one of transformers with fewer heads, a narrower MLP and fewer tokens: its attention
runs as it is. Linears that make heads or the MLP's width have some of their rows here (also where a checkpoint has
several of them in one matrix), those that read these have the columns, and their results are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deltacompress.devices import has_gpu
from deltacompress.errors import BackendError, InputError, UnsupportedModelError, option
from deltacompress.runtime.parallel.parts.cut import Cut
from deltacompress.runtime.variants.layout import Layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Joint = Literal["sum", "lookup", "side by side"]
"""How the ranks' results of a module become one: added; each token's row from who has it; one behind the other."""
_MODELS = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model types whose parts are known."""
_MOST = 8
"""Devices that a way out names."""


@dataclass(frozen=True)
class Split:
    """One rank's part of a model. heads, kv_heads, width, vocabulary: of the whole; hidden: of the residual stream."""

    rank: int
    size: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    hidden: int

    @classmethod
    def of(cls, layout: Layout, rank: int, size: int, where: Path) -> Split:
        """Of a model in folder `where`.

        Raises:
            UnsupportedModelError: a model type, or a tensor, whose part is not known.
            InputError: heads or MLP do not divide by `size`.
        """
        config: Any = layout.config
        if config.model_type not in _MODELS:
            raise UnsupportedModelError(
                f"how to split model type {config.model_type!r} is not known (known: {', '.join(_MODELS)})",
                where=where,
                way_out=f"leave out {option('tp')}",
            )
        heads = config.num_attention_heads
        made = cls(
            rank,
            size,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.intermediate_size,
            config.vocab_size,
            config.hidden_size,
        )
        if not made.divides(size):
            fit = [str(one) for one in range(1, _MOST + 1) if made.divides(one)]
            raise InputError(
                f"{heads} heads, {made.kv_heads} key-value heads and an MLP of {made.width} do not divide by it",
                where=f"{option('tp')} {size}",
                way_out=f"give one of {', '.join(fit)}",
            )
        for path, place in layout.places.items():
            if place.kind != "norm":
                made.cut(path)
        return made

    def divides(self, size: int) -> bool:
        """Whether so many ranks get equal parts."""
        if self.heads % size or self.width % size or size > self.vocabulary:
            return False
        return not (self.kv_heads % size and size % self.kv_heads)

    def shrink(self, config: PretrainedConfig) -> None:
        """Make a whole model's config that of this rank's."""
        config.head_dim = self.head_dim
        config.num_attention_heads = self.heads // self.size
        config.num_key_value_heads = max(1, self.kv_heads // self.size)
        config.intermediate_size = self.width // self.size
        config.vocab_size = self.tokens
        config.pad_token_id = None  # it may be another rank's, and only training asks for it

    @property
    def tokens(self) -> int:
        """Rows of embedding and head here; the last rank's may be fewer, and have zeros behind them."""
        return -(-self.vocabulary // self.size)

    @property
    def first_token(self) -> int:
        return self.rank * self.tokens

    def joint(self, module_path: str) -> Joint | None:
        """How the results of a module become one; None: each rank goes on with its own."""
        match module_path.rpartition(".")[2]:
            case "o_proj" | "down_proj":
                return "sum"
            case "embed_tokens":
                return "lookup"
            case "lm_head":
                return "side by side"
        return None

    def cut(self, path: str) -> Cut | None:
        """What of the tensor at this path of the model is this rank's; None: all of it.

        Raises:
            UnsupportedModelError: that is not known.
        """
        *_, module, name = path.split(".")
        if "norm" in module:
            return None
        queries, keys, width = self._part(self.heads), self._part_of_keys(), _part(self.width, self.rank, self.size)
        all_queries, all_keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        match module:
            case "q_proj":
                return _rows(queries)
            case "k_proj" | "v_proj":
                return _rows(keys)
            case "qkv_proj":
                return _rows(queries, _moved(keys, all_queries), _moved(keys, all_queries + all_keys))
            case "gate_proj" | "up_proj":
                return _rows(width)
            case "gate_up_proj":
                return _rows(width, _moved(width, self.width))
            case "o_proj" | "down_proj" if name == "bias":  # it is added once
                return Cut(0, ((0, self.hidden),) if self.rank == 0 else (), self.hidden)
            case "o_proj":
                return _columns(queries)
            case "down_proj":
                return _columns(width)
            case "embed_tokens" | "lm_head":
                last = min(self.first_token + self.tokens, self.vocabulary)
                return Cut(0, ((min(self.first_token, last), last),), self.tokens)
        raise UnsupportedModelError(
            f"how to split {path} is not known", where="a model on several devices", way_out=f"leave out {option('tp')}"
        )

    def _part(self, heads: int) -> tuple[int, int]:
        begin, end = _part(heads, self.rank, self.size)
        return begin * self.head_dim, end * self.head_dim

    def _part_of_keys(self) -> tuple[int, int]:
        """Where there are fewer key-value heads than ranks, several ranks have the same one."""
        if self.kv_heads >= self.size:
            return self._part(self.kv_heads)
        head = self.rank * self.kv_heads // self.size
        return head * self.head_dim, (head + 1) * self.head_dim


def devices_of(device: torch.device, size: int) -> tuple[torch.device, ...]:
    """A device for each rank: GPUs from the first on, or a CPU's cores for all.

    Raises:
        InputError: no number of devices, or a device that is one by its name.
        BackendError: fewer GPUs are here.
    """
    asked = f"{option('tp')} {size}"
    if size < 1:
        raise InputError("at least 1", where=asked)
    if device.type != "cuda" or size == 1:
        return (device,) * size
    named: int | None = device.index
    if named is not None:
        raise InputError(f"device {device} names one GPU", where=asked, way_out="give cuda")
    there = torch.cuda.device_count() if has_gpu() else 0
    if size > there:
        raise BackendError(f"torch sees {there} GPUs here", where=asked, way_out=f"give {there} or fewer")
    return tuple(torch.device("cuda", number) for number in range(size))


def _part(count: int, rank: int, size: int) -> tuple[int, int]:
    return count * rank // size, count * (rank + 1) // size


def _moved(span: tuple[int, int], by: int) -> tuple[int, int]:
    return span[0] + by, span[1] + by


def _rows(*spans: tuple[int, int]) -> Cut:
    return Cut(0, spans, sum(end - begin for begin, end in spans))


def _columns(span: tuple[int, int]) -> Cut:
    return Cut(1, (span,), span[1] - span[0])
