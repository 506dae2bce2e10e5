"""The one door for config.json: from the bytes in a model directory to a transformers config that chooses nothing else.

Every field is looked up in `fields`, those of nested configs too; what passed is staged alone in a directory of our own
and read there by transformers, which thereby applies its own rules for old spellings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from deltacompress.checkpoints.configs import already_quantized
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG
from deltacompress.errors import CheckpointError, UnsupportedModelError, first_line
from deltacompress.files.places import CONFIG
from deltacompress.models import fields
from deltacompress.models.folder import check_depth, staged
from deltacompress.models.quiet import quiet

_left = ContextVar("_left", default="use `--recipe lossless`, which works for any checkpoint")
"""The way out of an unsupported model: who compresses has this one, `other_way_out` tells others another."""
_COUNTED = re.compile(r"^(n|num)_(hidden_|encoder_|decoder_)?layers?$|^(en|de)coder_layers$|^num_labels$")
"""Fields of which transformers makes lists while it reads a config, until memory is full."""
_MAX_COUNT = 10_000
_LAYERS = re.compile(r"^(n|num)_(hidden_)?layers?$")
_MAX_LAYERS = 1000
"""Several times as many as any model has."""
_MAX_INTEGER = 1 << 62


def unsupported(where: Path | str, reason: str, *, first: str | None = None) -> UnsupportedModelError:
    """An error that names the way out that is left to who reads it. first: what can be tried before."""
    way_out = _left.get() if first is None else f"{first}, or {_left.get()}"
    return UnsupportedModelError(reason, where=where, way_out=way_out)


def unusable(file: Path, error: Exception) -> CheckpointError:
    """One line: the config file, what transformers said of it, and the way out."""
    return CheckpointError(
        f"transformers cannot make a model of it ({first_line(error)})",
        where=file,
        way_out=f"mend {file.name}, or get the file that came with the weights",
    )


def read_config(raw: Mapping[str, Any], file: Path, *, tensors: int) -> PretrainedConfig:
    """The transformers config of a model, of which nothing but the values of its own fields is taken.

    A config that also names remote code (`auto_map`) is fine as long as the library itself knows its model type: the
    library's class is used, code from the checkpoint is never run.

    Args:
        raw: the JSON object in `file`. file: config.json, for messages.
        tensors: how many the checkpoint holds; a model has no more layers than that.

    Raises:
        UnsupportedModelError: a model type that the installed transformers does not know, quantized weights, or a field
            that could mean anything; names the field.
        CheckpointError: values that transformers cannot use.
    """
    check_depth(raw, file)
    passed = _passed(raw, config_class(raw, file), file, tensors)
    try:
        with quiet(), staged({CONFIG: json.dumps(passed).encode()}) as folder:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        if not isinstance(config.dtype, torch.dtype | None):
            raise TypeError(f"dtype {config.dtype!r} is none of torch's")
    except Exception as error:  # a wrong field raises whatever that model type's own validation raises
        raise unusable(file, error) from error
    config.name_or_path = str(file.parent)
    return config


def config_class(raw: Mapping[str, Any], file: Path, at: str = "") -> fields.ConfigClass:
    """The config class of the model type that a config names.

    Raises:
        UnsupportedModelError: the installed transformers does not know it.
    """
    found = raw.get("model_type")
    if isinstance(found, str) and found in CONFIG_MAPPING:
        return CONFIG_MAPPING[found]
    remote = f", and {fields.CODE}" if "auto_map" in raw else ""
    raise unsupported(file, f"{at}model type {found!r:.80} is unknown to the installed transformers{remote}")


@contextmanager
def other_way_out(instead: str) -> Iterator[None]:
    """Tell who does not compress another way out of an unsupported model than a recipe."""
    before = _left.set(instead)
    try:
        yield
    finally:
        _left.reset(before)


def notes(raw: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """What a user should know: fields of a config, and an adapter beside it, that another loader would use."""
    file = directory / CONFIG
    known, told = fields.declared(config_class(raw, file)), []
    for name, value in sorted(raw.items()):
        if name in fields.LEFT_OUT and fields.says(value):
            told.append(f"{name} ({fields.LEFT_OUT[name]})")
        elif name in fields.INERT and name not in known and fields.says(value):
            told.append(name)
    yield from _told(told, directory)


def base_notes(raw: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """As notes, of a base: nothing is built from its config, so what would have a model refused is told too."""
    reasons = fields.LEFT_OUT | fields.REFUSED
    told = [
        f"{name} ({reasons[name]})" for name, value in sorted(raw.items()) if name in reasons and fields.says(value)
    ]
    yield from _told(told, directory)


def stored_notes(raw: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """As notes, of a fine-tuned model that is stored without being built: what will have it refused once it is run."""
    reasons = fields.REFUSED | {"quantization_config": fields.REFUSED["quantization"]}
    told = [f"{name} ({reason})" for name, reason in sorted(reasons.items()) if fields.says(raw.get(name))]
    if told:
        yield f"{directory / CONFIG}: stored as it is, but no verb will run a model with {', '.join(told)}"


def _told(unused: Sequence[str], directory: Path) -> Iterator[str]:
    if unused:
        yield f"{directory / CONFIG}: not used: {', '.join(unused)}"
    if (directory / ADAPTER_CONFIG).exists():
        told = "not applied: the weights beside it are the model; merge the adapter to use it"
        yield f"{directory / ADAPTER_CONFIG}: {told}"


def _passed(raw: Mapping[str, Any], kind: fields.ConfigClass, file: Path, tensors: int, at: str = "") -> dict[str, Any]:
    """The fields of a config, or of one nested in it (`at`: where, with a dot), that may reach the library."""
    if told := already_quantized(raw):
        raise unsupported(file, told)
    known, nested = fields.declared(kind), dict(_nested(raw, kind, file, at))
    found: dict[str, Any] = {}
    for name, value in raw.items():
        where = f"{file}: {at}{_plain(name)}"
        if not (name == "sliding_window" and value == 0 and raw.get("use_sliding_window") is False):  # Qwen2-MoE's none
            _check_count(name, value, file, tensors)
        if name in fields.REFUSED and fields.says(value):
            raise unsupported(where, fields.REFUSED[name], first="remove that line")
        if name in fields.REFUSED or fields.is_left_out(name):
            continue
        if name in nested:
            found[name] = _passed(value, nested[name], file, tensors, f"{at}{name}.")
        elif name in known or name in fields.SHARED:
            found[name] = value
        elif not fields.is_inert(name) and fields.matters(name, value):
            raise unsupported(
                where,
                f"model type {kind.model_type!r} has no such field, and what else it could mean is not known here",
                first="remove that line if the model does without it",
            )
    return found


def _nested(
    raw: Mapping[str, Any], kind: fields.ConfigClass, file: Path, at: str
) -> Iterator[tuple[str, fields.ConfigClass]]:
    """Names of the configs inside a config, with the class of each."""
    for name, inner in kind.sub_configs.items():
        value = raw.get(name)
        if not isinstance(value, dict):
            continue
        yield name, inner if issubclass(inner, PretrainedConfig) else config_class(value, file, f"{at}{name}: ")


def _check_count(name: str, count: Any, file: Path, tensors: int) -> None:
    """Refuse more of something than there can be, and less."""
    if not isinstance(count, int):
        return
    if _COUNTED.search(name):
        if count > _MAX_COUNT:
            raise unusable(file, ValueError(f"{name} is above {_MAX_COUNT}"))
        least = 1 if _LAYERS.search(name) else 0
        if name.endswith(("layers", "layer")) and not least <= count <= tensors:
            raise unusable(file, ValueError(f"{name} is {count}, but the checkpoint has {tensors} tensors"))
    if abs(count) > _MAX_INTEGER:  # the model's own code puts it where 64 bits are the limit
        raise unusable(file, ValueError(f"{_plain(name)} is beyond 2^62"))
    if name == "sliding_window" and not isinstance(count, bool) and count < 1:
        raise unusable(file, ValueError(f"{name} is {count}; without a window it is null"))


def check_layers(config: PretrainedConfig) -> None:
    """Refuse a config, wherever it lies, of which transformers would build modules until memory is full.

    Raises:
        UnsupportedModelError: names the field.
    """
    for name, count in config.to_dict().items():
        if _LAYERS.search(name) and isinstance(count, int) and not 1 <= count <= _MAX_LAYERS:
            raise UnsupportedModelError(
                f"the base's {CONFIG}: {name} is {count}", way_out="get the file that came with it"
            )


def _plain(name: str) -> str:
    """A name for a message, whatever somebody put there."""
    told = ascii(name)[1:-1]
    return told if len(told) <= 80 else told[:77] + "..."
