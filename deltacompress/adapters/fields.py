"""What the fields of adapter_config.json mean for whoever applies the matrices, as of PEFT 0.21.

An adapter is plain if its matrices, the base and the settings that are read make up the whole model. A field that makes
it something else is refused by name, and so is one that is not known here, unless it says nothing: a newer PEFT writes
its new fields into every config, switched off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltacompress.errors import CheckpointError

_CONVERT = (
    "save it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=DIR), DIR being the adapter as "
    "it was before training, which makes it plain, or merge it and compress the merged model"
)
MERGE = "merge it (merge_and_unload), then compress the merged model"
_KEEP = "it cannot be merged either, so keep it with PEFT"


@dataclass(frozen=True, slots=True)
class Fields:
    """Every field of one kind of adapter.

    read: by settings.parse_settings, which checks them. inert: told by the matrices that are there, of training, or
    PEFT's own bookkeeping. off: must say nothing; else what the adapter is, and the way out.
    """

    read: frozenset[str]
    inert: frozenset[str]
    off: Mapping[str, tuple[str, str]]


_READ = frozenset({"peft_type", "base_model_name_or_path", "revision", "target_modules", "modules_to_save"})
_READ_OF_ALL = _READ | {"fan_in_fan_out", "exclude_modules", "bias", "layers_to_transform", "layers_pattern"}
_SCALED = frozenset({"r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights"})
_INERT = frozenset({"task_type", "auto_mapping", "peft_version", "inference_mode"})
_OFF = {
    "loftq_config": ("LoftQ, which quantizes the weights of the base", MERGE),
    "megatron_config": ("for Megatron's parallel layers", MERGE),
}
_LORA_OFF = _OFF | {
    "use_qalora": ("QALoRA, whose A reads averages of its inputs", MERGE),
    "use_bdlora": ("BD-LoRA, which stores the blocks of a diagonal", MERGE),
    "kasa_config": ("KaSA, which changes the weights of the base", MERGE),
    "velora_config": ("VeLoRA, which keeps a projection besides A and B", MERGE),
    "monteclora_config": ("MonteCLoRA, which keeps a sampler besides A and B", MERGE),
    "target_parameters": ("for parameters that are no module's weight", MERGE),
    "layer_replication": ("for a model that repeats layers of the base", MERGE),
    "ensure_weight_tying": ("with matrices that are tied to each other", MERGE),
    "alora_invocation_tokens": ("aLoRA, which applies to a part of the tokens only", _KEEP),
    "arrow_config": ("Arrow, which routes between other adapters", _KEEP),
}
FIELDS = {
    "lora": Fields(
        read=_READ_OF_ALL | _SCALED | {"lora_bias", "use_dora", "trainable_token_indices"},
        # The three configs say how the matrices began, where init_lora_weights asks for it, which is read.
        inert=_INERT
        | {"lora_dropout", "eva_config", "corda_config", "lora_ga_config"}
        | {"megatron_core", "qalora_group_size", "runtime_config"},  # read with a field of `off`, or not at all
        off=_LORA_OFF,
    ),
    "boft": Fields(
        read=_READ_OF_ALL | {"boft_block_size", "boft_block_num", "boft_n_butterfly_factor"},
        inert=_INERT | {"boft_dropout", "init_weights"},
        off={},
    ),
    "shira": Fields(
        read=_READ | {"fan_in_fan_out", "r"},
        inert=_INERT | {"mask_type", "random_seed", "init_weights"},  # where the entries lie is in the file
        off={},
    ),
    # Of PEFT's fork by RoSA's authors (https://github.com/IST-DASLab/peft-rosa): how S is found, kept and multiplied
    # while it is trained makes no difference to what it is.
    "rosa": Fields(
        read=_READ_OF_ALL | _SCALED | {"d", "density_pattern"},
        inert=_INERT
        | {"lora_dropout", "impl", "spa_store_transpose", "spa_num_grads", "grad_acc_mode", "grad_4bit_accum"}
        | {"mask_load_path", "mask_save_path", "rosa_dtype", "terminate_after_mask_generation", "schedule"}
        | {"megatron_core"},
        off=_OFF,
    ),
}
"""By peft_type, in small letters."""
UNKNOWN_KINDS = {
    "oft": ("OFT, whose rotations are stored otherwise than BOFT's", MERGE),
    "adalora": ("AdaLoRA, whose singular values stand between A and B", MERGE),
    "trainable_tokens": ("rows of the embedding alone", "train it as trainable_token_indices of LoRA, or merge it"),
}
"""What is not read, though it sounds like it: what it is, and the way out."""

_PLAIN_BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica")
_OTHER_BASES = {
    "pissa": ("PiSSA", _CONVERT),
    "olora": ("OLoRA", _CONVERT),
    "corda": ("CorDA", _CONVERT),
    "lora_ga": ("LoRA-GA", _CONVERT),
    "loftq": ("LoftQ", MERGE),
}


def check_fields(config: Mapping[str, Any], kind: str, path: str) -> None:
    """Refuse a config that asks for more than plain matrices beside the base; `path` names it.

    Raises:
        CheckpointError: names the field, what it makes of the adapter, and the way out.
    """
    known = FIELDS[kind]
    for name, value in config.items():
        if name in known.read or name in known.inert or _says_nothing(value):
            continue
        if name not in known.off:
            raise CheckpointError(
                f"{name[:80]!a} is set, and no field of {kind} that this program knows (PEFT 0.21)",
                where=path,
                way_out=f"upgrade deltacompress, or {MERGE}",
            )
        what, way_out = known.off[name]
        raise CheckpointError(f"{name} is set, which makes it no plain {kind} ({what})", where=path, way_out=way_out)
    _check_beginning(config.get("init_lora_weights"), path)


def _check_beginning(value: object, path: str) -> None:
    """How the matrices began matters where the base was changed to make up for it."""
    if value is None or isinstance(value, bool) or value in _PLAIN_BEGINNINGS:
        return
    told = f"init_lora_weights is {str(value)[:40]!a}"
    for prefix, (called, way_out) in _OTHER_BASES.items():
        if str(value).lower().startswith(prefix):
            raise CheckpointError(
                f"{told}: {called} changes the weights of the base, so the matrices alone do not tell it",
                where=path,
                way_out=way_out,
            )
    raise CheckpointError(
        f"{told}, which this program does not know (PEFT 0.21)",
        where=path,
        way_out=f"upgrade deltacompress, or {MERGE}",
    )


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})
