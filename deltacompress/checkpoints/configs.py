"""Do two checkpoints describe one architecture? As far as their configs tell."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import CheckpointError, PairError
from deltacompress.files.places import CONFIG

_ARCHITECTURE_SUFFIX = re.compile(r"(ForCausalLM|LMHeadModel|Model)$")
_SIZES = (("hidden_size", "n_embd", "d_model"), ("num_hidden_layers", "n_layer", "num_layers"))
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model_type": ("a name in quotes", lambda value: isinstance(value, str)),
    "architectures": (
        "a list of class names",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool)),
    "text_config": ("an object", lambda value: isinstance(value, dict)),
} | {key: ("a whole number above 0", lambda value: type(value) is int and value > 0) for keys in _SIZES for key in keys}
"""What a field of config.json must be, where it is neither absent nor null: those that pairing reads."""
_UNTIED = frozenset(
    (
        "deepseek_v2 deepseek_v3 exaone4 glm glm4 glm4_moe gpt_neox gpt_oss gptj granite granitemoe helium llama "
        "llama4_text ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 "
        "qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss stablelm"
    ).split()
)
"""Model types that transformers leaves untied when the config does not say; all others it ties (Gemma, GPT-2, ...)."""


def check_fields(checkpoint: Checkpoint) -> None:
    """Refuse a config whose fields are not what they must be; raises CheckpointError."""
    for field, (wanted, is_right) in _FIELDS.items():
        value = field_of(checkpoint.config, field)
        if value is not None and not is_right(value):
            raise CheckpointError(
                f"{field} is {reprlib.repr(value)}, not {wanted}",
                where=checkpoint.path / CONFIG,
                way_out="mend it, or get the file that came with the weights",
            )


def check_configs(base: Checkpoint, finetuned: Checkpoint) -> None:
    """Architecture first: where it differs, any later message would name a symptom."""

    def differ(field: str, a: Any, b: Any) -> PairError:
        told = f"config.json has {field} {b}, the base {base.path} has {a}"
        return PairError(told, where=finetuned.path, way_out="give the base it was tuned from")

    a, b = base.config, finetuned.config
    if a.get("model_type") and b.get("model_type") and a["model_type"] != b["model_type"]:
        raise differ("model_type", a["model_type"], b["model_type"])
    if a.get("architectures") and b.get("architectures") and _stems(a) != _stems(b):
        raise differ("architectures", a["architectures"], b["architectures"])
    for keys in _SIZES:
        values = [next((v for key in keys if (v := field_of(config, key)) is not None), None) for config in (a, b)]
        if None not in values and values[0] != values[1]:
            raise differ(keys[0], *values)


def _stems(config: dict[str, Any]) -> list[str]:
    """Architectures without the part that says bare model or causal LM: a base may be saved as either."""
    return [_ARCHITECTURE_SUFFIX.sub("", name) for name in config["architectures"]]


def field_of(config: dict[str, Any], key: str) -> Any:
    """A field of the config, or of its text model's where a multimodal config nests it."""
    nested = config.get("text_config")
    return config[key] if key in config else nested.get(key) if isinstance(nested, dict) else None


def is_tied(config: dict[str, Any]) -> bool:
    """Whether the output head is the embedding, said or by the model type's own default."""
    explicit = field_of(config, "tie_word_embeddings")
    return bool(explicit) if explicit is not None else config.get("model_type") not in _UNTIED


def already_quantized(config: Mapping[str, Any]) -> str | None:
    """What to say where dense weights are needed, if config.json says that these are not."""
    if (found := config.get("quantization_config")) is None:
        return None
    gptq = isinstance(found, dict) and found.get("quant_method") == "gptq"
    other = ", or from what `deltacompress dequantize` makes of this one" if gptq else ""
    return f"the weights are quantized already; start from the unquantized checkpoint{other}"
