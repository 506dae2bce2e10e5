"""Names of tensors: which there may be, and what a name tells of the tensor.

One rule for checkpoints, artifacts and zoos: whatever one of them takes, the others take too. Letters and digits of any
script and the separators that frameworks use, in the one normal form of Unicode: nothing that two programs could take
for two things, that moves a terminal's cursor, or that ends a line of a log.

What a name tells, by the naming habits of decoder models, decides only what a reader is shown (groups of an analysis,
kinds of an artifact whose recipe asked for none), not how a tensor is compressed: a recipe that asks for kinds has them
from the model itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from deltacompress.types import TensorKind

MAX_NAME = 1024
"""Characters; of a part of an artifact, called `tensor.part`, too."""
RULE = f"letters and digits in NFC, and . _ - / : +, at most {MAX_NAME}"
_RESERVED = "__metadata__"  # what a safetensors header calls its free text
_NAME = re.compile(rf"[\w./:+-]{{1,{MAX_NAME}}}")


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may be called that."""
    fits = _NAME.fullmatch(name) is not None and name != _RESERVED
    return fits and (name.isascii() or unicodedata.is_normalized("NFC", name))


def shown(name: str) -> str:
    """A name that breaks the rule, for a message: one line of ASCII."""
    return ascii(name[:80])


Group = Literal["attention", "mlp", "norm", "embedding", "head", "other"]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "norm", "embedding", "head", "other")

# First match wins: "post_attention_layernorm" is a norm, "embed_out" a head, "attention.dense" attention.
_GROUP_PATTERNS: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("norm", re.compile(r"norm|(^|[._])ln(_|\d|\.)")),
    ("head", re.compile(r"lm_head|embed_out|output_projection|^output\.|score\.|classifier")),
    ("embedding", re.compile(r"embed|(^|\.)wte\.|(^|\.)wpe\.")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|experts|moe|\.fc\d|router")),
)
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def group_of(name: str) -> Group:
    """What a tensor belongs to, by the naming habits of decoder models (biases go with their module)."""
    lowered = name.lower()
    return next((group for group, pattern in _GROUP_PATTERNS if pattern.search(lowered)), "other")


def layer_of(name: str) -> int | None:
    """Index of the decoder layer in a checkpoint name: the first `.<int>.`; None outside the layers."""
    match = _LAYER.search(name)
    return None if match is None else int(match.group(1))


def module_of(name: str) -> str:
    """Short label of the module that owns a tensor: "q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a linear layer (or stacked experts) inside a decoder layer."""
    return len(shape) >= 2 and layer_of(name) is not None and group_of(name) in ("attention", "mlp")


def kind_of(name: str, shape: Sequence[int]) -> TensorKind:
    """What the tensor most likely is in its model, in the words of recipes."""
    group = group_of(name)
    if name.endswith(".bias"):
        return "bias"
    if is_linear(name, shape):
        return "linear"
    if group == "norm":
        return "norm"
    if len(shape) == 2 and group in ("embedding", "head"):
        return "head" if group == "head" else "embedding"
    return "other"
