"""Why a model cannot be walked: by its type, by its config, by what transformers builds of it."""

from __future__ import annotations

import inspect
import re

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from deltacompress.models.fields import ConfigClass, default

# num_experts, num_local_experts, n_routed_experts, moe_num_experts, ...: more than one of them makes a router.
_EXPERT_COUNT = re.compile(r"experts$")
_SENSES = re.compile(r"Vision|Image|Audio|Speech|Video")
_ALWAYS_CAUSAL = frozenset(("gpt_neox", "gpt_neox_japanese", "trocr"))
"""Types that declare is_decoder and look at no token to the right whatever it says."""

_OTHERWISE = frozenset(("git",))
"""Types whose hidden states, handed to their own forward, do not give the logits that it gives by itself."""


def is_dense_decoder(config: PretrainedConfig) -> bool:
    """Whether a config is that of a dense text decoder, and of nothing more."""
    return is_text(config) and not (of_type(type(config)) or of_config(config) or _has_experts(config))


def is_text(config: PretrainedConfig) -> bool:
    """Whether a config is that of a language model alone."""
    return _has_one_text(config) and config.get_text_config() is config


def _has_one_text(config: PretrainedConfig) -> bool:
    try:
        config.get_text_config()
    except ValueError:  # it has several
        return False
    return True


def of_type(kind: ConfigClass) -> str | None:
    """Why no model of a config class can be walked; None if there is no reason."""
    if not all(map(_has_one_text, default(kind))):
        return f"model type {kind.model_type!r} is multimodal, with several language models"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"model type {kind.model_type!r} is no causal language model"
    if kind.model_type in _OTHERWISE:
        return f"model type {kind.model_type!r}, run layer by layer, is not what it is run whole"
    return None


def of_config(config: PretrainedConfig) -> str | None:
    """Why a model with this config, of a type that can be walked, cannot be; None if there is no reason."""
    if config.is_encoder_decoder:
        return f"model type {config.model_type!r} is no causal language model"
    config = config.get_text_config()
    if field := _bidirectional(config):
        told = f"is bidirectional with {field}: each token sees those after it, and only causal decoders are calibrated"
        return f"model type {config.model_type!r} {told}"
    if getattr(config, "hidden_size_per_layer_input", 0):
        told = "embeds the tokens for each layer anew (hidden_size_per_layer_input), which is not supported yet"
        return f"model type {config.model_type!r} {told}"
    if getattr(config, "cross_attention_layers", None):
        return f"model type {config.model_type!r} has layers that only images run (cross_attention_layers)"
    return None


def _has_experts(config: PretrainedConfig) -> bool:
    counts = (value for field, value in config.to_dict().items() if _EXPERT_COUNT.search(field))
    return any(isinstance(value, int) and value > 1 for value in counts)


def of_model(model: PreTrainedModel) -> str | None:
    """Why a model that transformers has built cannot be walked; None if there is no reason."""
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no hidden states in the place of tokens (inputs_embeds)"
    names = sorted({type(one).__name__ for one in others(model).values()})
    if names and is_text(model.config) and not any(map(_SENSES.search, names)):
        told = f"{type(model).__name__} is made of several models ({', '.join(names)})"
        return f"{told}, only one stack of layers is walked"
    return None


def others(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """By path, the models inside a model that are not its language model: what sees and hears in a multimodal one."""
    own = (type(model.config), type(model.config.get_text_config()))
    return {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, PreTrainedModel) and type(one.config) not in own
    }


def _bidirectional(config: PretrainedConfig) -> str | None:
    """The field, with its value, by which the tokens of this decoder see those after them."""
    own = _own_fields(type(config))
    encoder_too = "is_decoder" in own and config.model_type not in _ALWAYS_CAUSAL
    if encoder_too and "is_encoder_decoder" not in own and not config.is_decoder:
        return "is_decoder false"
    if "causal" in own and not config.causal:
        return "causal false"
    if "attn_type" in own and config.attn_type == "bi":
        return "attn_type 'bi'"
    both: object = getattr(config, "use_bidirectional_attention", None)
    return f"use_bidirectional_attention {both!r}" if both is True or both == "all" else None


def _own_fields(kind: ConfigClass) -> set[str]:
    """Fields that a config class declares itself, beyond those of every config."""
    below = kind.__mro__[: kind.__mro__.index(PretrainedConfig)]
    return {name for one in below for name in inspect.get_annotations(one)}
