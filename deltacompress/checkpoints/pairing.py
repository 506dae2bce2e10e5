"""Pair the tensors of a fine-tuned checkpoint with those of its base: every one exactly once, none dropped.

A delta is only worth its bytes if `restore` can rebuild the fine-tuned checkpoint tensor by tensor, so each tensor
there gets one of three fates, and each base tensor without a counterpart is explained or refused:

 1. Same name and shape: *paired*. F16, BF16, F32 and F64 mix freely (deltas are taken in fp32); any other dtype must be
    the same on both sides and is meant for an exact codec.
 2. Input embeddings and output heads may differ in dim 0 (the vocabulary was extended or padded, either side): paired
    over the shared leading rows, `base_rows`. Embeddings are *.embed_tokens / embed_in / wte / word_embeddings .weight;
    heads are lm_head.weight, lm_head.bias, embed_out.weight (under any prefix) and output.weight.
 3. Head in the fine-tuned model only, base tied: paired against the base's input embedding. Base not tied: *added*,
    for then its embedding says nothing about the head.
 4. Head in the base only, fine-tuned model tied: nothing to store; noted.
    In 3 and 4, tied means that the config says so or, where it is silent, that transformers would tie that family.
 5. Head stored beside the embedding and equal to it bit for bit (same dtype and shape): *alias*, stored once.
 6. Any other tensor of the fine-tuned model only: *added*, noted.
 7. Buffers that older versions of transformers saved (rotary_emb.inv_freq, attention.bias, attention.masked_bias):
    noted where only the base has them; added where the base has none, or one of another shape or dtype.
 8. Any other tensor of the base only, or another shape: PairError. Different architectures: PairError before all else.
 9. No name in common, but all of the base match once a leading "model.", "transformer." or "gpt_neox." is added or
    removed (a base saved from the bare AutoModel): paired under that mapping, noted.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from deltacompress.checkpoints.configs import already_quantized, check_configs, check_fields, is_tied
from deltacompress.checkpoints.header import FLOATS
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import PairError
from deltacompress.types import TensorInfo

if TYPE_CHECKING:
    import torch

_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embed_in|wte|word_embeddings)\.weight")
_HEAD = re.compile(r"(.*\.)?(lm_head\.weight|embed_out\.weight|lm_head\.bias)|output\.weight")
_BUFFER = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|(attention|attn|self_attn)\.(bias|masked_bias))")
_PREFIXES = ("model.", "transformer.", "gpt_neox.")


@dataclass(frozen=True, slots=True)
class TensorPair:
    """What one fine-tuned tensor is stored against.

    info: the fine-tuned tensor; base_name: the base tensor, None for added and alias; base_rows: leading rows (dim 0)
    shared with the base where the row counts differ, else None; alias_of: for an alias, the fine-tuned tensor that it
    equals bit for bit.
    """

    info: TensorInfo
    base_name: str | None
    status: Literal["paired", "added", "alias"]
    base_rows: int | None = None
    alias_of: str | None = None


@dataclass(frozen=True)
class Pairing:
    """The pairs of two checkpoints, one per fine-tuned tensor, sorted by name; notes are for the user, a line each."""

    base: Checkpoint
    finetuned: Checkpoint
    pairs: tuple[TensorPair, ...]
    notes: tuple[str, ...]

    def read(self, pair: TensorPair) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(base, fine-tuned) tensors of `pair`, on the CPU.

        base: as read_base; fine-tuned: whole, own dtype.

        Raises:
            CheckpointError: a file changed or cannot be read.
        """
        return self.read_base(pair), self.finetuned.read(pair.info.name)

    def read_base(
        self, pair: TensorPair, *, bits: bool = False, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """The base tensor of `pair`: `base_rows` rows of it where that is set; None for added and alias.

        On `device` (the CPU by default); fp32, unless `bits` asks for its own dtype. Dtypes that need an exact codec
        (integers, booleans, 8-bit floats, complex) stay as they are, since fp32 cannot hold them all. Raises as `read`.
        """
        if pair.base_name is None:
            return None
        base = self.base.read(pair.base_name, pinned=device is not None and device.type == "cuda")
        if pair.base_rows is not None:
            base = base[: pair.base_rows]
        base = base.to(device, non_blocking=True)  # before the cast, which widens it
        return base if bits or self.base.tensors[pair.base_name].dtype not in FLOATS else base.float()


def is_embedding(name: str) -> bool:
    """Whether checkpoint tensor `name` is an input embedding: rows are tokens."""
    return _EMBEDDING.fullmatch(name) is not None


def is_head(name: str) -> bool:
    """Whether checkpoint tensor `name` is the weight or bias of the output head: rows are tokens."""
    return _HEAD.fullmatch(name) is not None


def _is_buffer(info: TensorInfo) -> bool:
    """Whether `info` is a non-persistent buffer of older versions; a 1-D attention.bias would be a trained bias."""
    return _BUFFER.fullmatch(info.name) is not None and (len(info.shape) != 1 or not info.name.endswith("bias"))


def pair(base: Checkpoint, finetuned: Checkpoint) -> Pairing:
    """Pair every tensor of `finetuned` with its counterpart in `base`, by the rules of this module.

    Headers and configs decide; data is read only to find a head equal to its embedding.

    Raises:
        PairError: the two do not belong together; names the config field or the tensor.
        CheckpointError: weights cannot be read, or a field of a config.json is not what such a field is.
    """
    check_fields(base)
    check_fields(finetuned)
    check_configs(base, finetuned)
    notes: list[str] = []
    counterpart = _match_names(base, finetuned, notes)
    pairs = [_pair_one(info, base, counterpart, finetuned, notes) for info in finetuned.tensors.values()]
    _explain_leftovers(base, finetuned, counterpart, notes)
    if not any(p.base_name for p in pairs):
        raise PairError(
            f"no tensor in common with the base {base.path}",
            where=finetuned.path,
            way_out="give the base it was tuned from",
        )
    mixed = Counter(
        (base.tensors[p.base_name].dtype, p.info.dtype)
        for p in pairs
        if p.base_name and base.tensors[p.base_name].dtype != p.info.dtype
    )
    notes += [f"{n} tensors are {a} in the base, {b} fine-tuned: deltas in fp32" for (a, b), n in sorted(mixed.items())]
    return Pairing(base, finetuned, tuple(pairs), tuple(notes))


def _match_names(base: Checkpoint, finetuned: Checkpoint, notes: list[str]) -> dict[str, str]:
    """Fine-tuned name -> base name, for every base tensor; identity but for rule 9."""
    core = [name for name, info in base.tensors.items() if not is_head(name) and not _is_buffer(info)]
    if core and not any(name in finetuned.tensors for name in core):
        for prefix in _PREFIXES:
            if all(prefix + name in finetuned.tensors for name in core):
                notes.append(f"base names lack the prefix {prefix!r}: matched with it added")
                return {name if is_head(name) else prefix + name: name for name in base.tensors}
            if all(name.startswith(prefix) and name.removeprefix(prefix) in finetuned.tensors for name in core):
                notes.append(f"base names carry the prefix {prefix!r}: matched with it removed")
                return {name.removeprefix(prefix): name for name in base.tensors}
    return {name: name for name in base.tensors}


def _pair_one(
    info: TensorInfo, base: Checkpoint, counterpart: dict[str, str], finetuned: Checkpoint, notes: list[str]
) -> TensorPair:
    name = info.name
    if (twin := _twin(info, finetuned)) is not None:
        notes.append(f"{name} equals {twin} bit for bit: stored once")
        return TensorPair(info, None, "alias", alias_of=twin)
    if name in counterpart:
        other = base.tensors[counterpart[name]]
        compatible = other.dtype == info.dtype or {other.dtype, info.dtype} <= FLOATS
        if other.shape == info.shape and compatible:
            return TensorPair(info, other.name, "paired")
        if _is_buffer(info):
            notes.append(f"{name} is a buffer that differs in shape or dtype: stored whole")
            return TensorPair(info, None, "added")
        if not compatible:
            told = f"{name}: {info.dtype} fine-tuned but {other.dtype} in the base {base.path}"
            raise PairError(told, where=finetuned.path, way_out="convert one of them")
        if (is_embedding(name) or is_head(name)) and _same_columns(other, info):
            return _paired_rows(info, other, notes)
        told = f"{name}: shape {list(info.shape)} fine-tuned but {list(other.shape)} in the base {base.path}"
        raise PairError(told, where=finetuned.path, way_out="give the base it was tuned from")
    if is_head(name) and is_tied(base.config) and (embedding := _embedding_for(info, base)) is not None:
        notes.append(f"{name} is tied to {embedding.name} in the base: paired with that")
        return _paired_rows(info, embedding, notes)
    notes.append(f"{name} is not in the base: stored whole")
    return TensorPair(info, None, "added")


def _paired_rows(info: TensorInfo, other: TensorInfo, notes: list[str]) -> TensorPair:
    found = TensorPair(info, other.name, "paired")
    if other.shape == info.shape:
        return found
    rows = min(other.shape[0], info.shape[0])
    notes.append(f"{info.name} has {info.shape[0]} rows, the base {other.shape[0]}: paired over the first {rows}")
    return replace(found, base_rows=rows)


def _same_columns(a: TensorInfo, b: TensorInfo) -> bool:
    return len(a.shape) == len(b.shape) >= 1 and a.shape[1:] == b.shape[1:]


def _embedding_for(head: TensorInfo, checkpoint: Checkpoint) -> TensorInfo | None:
    """The one input embedding that a missing `head` (or a mere copy of it) would be tied to, if there is just one."""
    fits = [
        info
        for name, info in checkpoint.tensors.items()
        if is_embedding(name) and len(info.shape) == 2 and _same_columns(info, head) and info.dtype in FLOATS
    ]
    return fits[0] if len(fits) == 1 and head.dtype in FLOATS else None


def _twin(info: TensorInfo, finetuned: Checkpoint) -> str | None:
    """The input embedding that head `info` is a bitwise copy of, if any."""
    if not is_head(info.name):
        return None
    twin = _embedding_for(info, finetuned)
    if twin is None or (twin.dtype, twin.shape) != (info.dtype, info.shape):
        return None
    return twin.name if finetuned.equals(twin.name, finetuned, info.name) else None


def _explain_leftovers(base: Checkpoint, finetuned: Checkpoint, counterpart: dict[str, str], notes: list[str]) -> None:
    """Every base tensor that the fine-tuned checkpoint lacks is noted with its reason, or refused."""
    lost = []
    for name, base_name in counterpart.items():
        if name in finetuned.tensors:
            continue
        if _is_buffer(base.tensors[base_name]):
            notes.append(f"{base_name} is a buffer that only the base stores: not part of the fine-tuned checkpoint")
        elif is_head(name) and is_tied(finetuned.config) and not name.endswith(".bias"):
            notes.append(f"{base_name} is tied to the embedding in the fine-tuned model: nothing to store")
        else:
            lost.append(base_name)
    if lost:
        if told := already_quantized(finetuned.config):
            raise PairError(told, where=finetuned.path)
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise PairError(
            f"tensor {lost[0]}{more} of the base is missing",
            where=finetuned.path,
            way_out="save the whole fine-tuned model",
        )
