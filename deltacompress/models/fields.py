"""What each field of a config.json may do here: matter to the model, be left out, or have the model refused.

transformers sets every field that it does not know as an attribute of the config, and its code looks some of them up:
to open another file, to fetch a kernel, to build other modules. So only fields that a model type declares (and the few
of `SHARED`, which the library's common code reads of any type) reach the library. Of the others, those that say nothing
or that are known to mean nothing to it are left out; whatever is left is refused by name, for it could mean anything.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from deltacompress.models.quiet import quiet

REFUSED = {
    "transformers_weights": "it names other weights than those that are checked and hashed",
    "configuration_files": "it names another config than this one",
    "fusion_config": "it has other modules built than the model type's own",
    "distributed_config": "it says how to spread the model over machines",
    "compression_config": "it says that the weights are quantized",
    "quantization": "it says that the weights are quantized",
}
"""Fields that choose other files, or another model than the one that is looked at, where they say anything."""

CODE = "code that comes with a checkpoint is never run"
OURS = "how it is computed is chosen here"
LEFT_OUT = {
    "auto_map": CODE,
    "custom_pipelines": CODE,
    "attn_implementation": OURS,
    "_attn_implementation": OURS,
    "_attn_implementation_internal": OURS,
    "experts_implementation": OURS,
    "_experts_implementation": OURS,
    "_experts_implementation_internal": OURS,
    "use_kernels": OURS,
    "kernel_config": OURS,
    "use_flash_attn": OURS,
    "use_flash_attention": OURS,
    "use_flash_attention_2": OURS,
    "use_xformers": OURS,
}
"""Fields that choose code or files, and that a model is whole without: left out, and told."""

SHARED = frozenset(
    (
        "head_dim original_max_position_embeddings tie_word_embeddings "
        "bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id"
    ).split()
)
"""Fields that code common to many types reads, whether a type declares them or not."""

_NOTES = frozenset(
    (
        # where it came from, how its outputs are returned, labels of classifiers: nothing that a load here asks
        "_commit_hash _name_or_path name_or_path "
        "output_attentions output_hidden_states return_dict use_return_dict torchscript use_bfloat16 tf_legacy_loss "
        "_num_labels finetuning_task id2label label2id num_labels problem_type pruned_heads tokenizer_class "
        "_attn_implementation_autoset gradient_checkpointing"
    ).split()
)
"""Left out in silence, declared or not."""

INERT = frozenset(
    (
        # tools that train, convert and serve
        "axolotl_config lora_config mergekit_config sft_config training_args trl_version unsloth_fixed "
        "unsloth_version unsloth_training_args transformers.js_config task_specific_params model_name name license "
        "keys_to_ignore_at_inference architecture quantize rope_config_validation seed world_size "
        # GPT-2, GPT-J, Neo, OPT, BLOOM, Falcon and what was made of them
        "activation attention_softmax_in_fp32 bias_dropout_fusion line_by_line masked_softmax_fusion n_ctx "
        "offset_alibi output_past prefix rotary scale_attn_weights scale_attention_softmax_in_fp32 "
        "skip_bias_add skip_bias_add_qkv "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj unk_token_id "
        "use_custom_kernels xla_device "
        # Llama, Yi, SmolLM, InternLM, StableLM
        "is_llama_config max_sequence_length multiple_of norm_eps pretraining_tp rope_pct "
        "rotary_scaling_factor use_rmsnorm_kernel "
        # Gemma, Phi, Qwen, Starcoder, Command-R, OLMo
        "embedding_dropout flash_rotary full_attn_mod fused_dense hidden_act interpolate_factor layer_switch "
        "lm_head_bias position_embedding_type "
        "max_window_layers mlp_type norm_type order_of_interleaved_layers rotary_pct sliding_window_size "
        "use_embedding_sharing use_gated_activation use_mrope use_parallel_block use_parallel_embedding "
        # DeepSeek and other mixtures of experts: of training and of serving
        "aux_loss_alpha ep_size num_nextn_predict_layers scoring_func seq_aux topk_method "
        # token ids of chat formats
        "image_token_index video_token_id vision_end_token_id vision_start_token_id vision_token_id"
    ).split()
)
"""Fields that published checkpoints carry and that transformers does nothing with: left out, and told."""

ConfigClass = Any
"""A class of configs; transformers is not typed here, and mypy takes such a class for unhashable."""

_TAKES = ("pop", "get", "setdefault")


def says(value: Any) -> bool:
    """Whether a value says anything: null, false and what is empty do not."""
    return not (value is None or value is False or value in ("", [], {}))


def matters(name: str, value: Any) -> bool:
    """Whether a field that is not known could matter with this value (`is_causal` says something by being false)."""
    return value is not True if name == "is_causal" else says(value)


def is_left_out(name: str) -> bool:
    """Whether a field never reaches the library, whatever its type declares."""
    return name in LEFT_OUT or name in _NOTES


def is_inert(name: str) -> bool:
    """Whether a field that its type does not declare means nothing to the library."""
    return name in INERT or name in _generation_settings()


@lru_cache(maxsize=64)
def declared(kind: ConfigClass) -> frozenset[str]:
    """The fields that a config class knows: its parameters, their other names, what it saves, and what it converts.

    Old spellings that it converts it takes out of its keyword arguments in its own code, where they are looked up.
    """
    names = {*inspect.signature(PretrainedConfig).parameters, *inspect.signature(kind).parameters}
    names.update(name for one in default(kind) for name in one.to_dict())
    names |= {*kind.attribute_map, *kind.attribute_map.values(), "model_type", "torch_dtype"}
    for one in kind.__mro__[: kind.__mro__.index(PretrainedConfig)]:
        for method in ("__init__", "__post_init__", "convert_rope_params_to_dict"):
            names.update(_taken(one.__dict__.get(method)))
    if "rope_parameters" in names:
        names |= {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    return frozenset(names - {"self", "kwargs"})


@lru_cache(maxsize=64)
def default(kind: ConfigClass) -> tuple[PretrainedConfig, ...]:
    """A config of this class with all its defaults; none where they do not go together."""
    try:
        with quiet():
            return (kind(),)
    except Exception:  # noqa: BLE001 - of any kind: each class checks itself
        return ()


def _taken(method: Any) -> Iterator[str]:
    """Names that a method looks for in its `kwargs`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (TypeError, OSError, SyntaxError):  # generated, or installed without its source
        return
    for node in ast.walk(tree):
        looked_up: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES:
            looked_up = node.args[0] if _is_kwargs(node.func.value) and node.args else None
        elif isinstance(node, ast.Subscript) and _is_kwargs(node.value):
            looked_up = node.slice
        elif isinstance(node, ast.Compare) and any(_is_kwargs(one) for one in node.comparators):
            looked_up = node.left
        if isinstance(looked_up, ast.Constant) and isinstance(looked_up.value, str):
            yield looked_up.value


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "kwargs"


@lru_cache(maxsize=1)
def _generation_settings() -> frozenset[str]:
    """Settings of generation that old configs hold; transformers takes them from generation_config.json."""
    return frozenset(GenerationConfig().to_dict())
