"""Which models can be walked layer by layer, and the refusal of every other one.

A model that slips through and is walked wrongly gives a delta that is wrong in silence, so each assumption of the
walk is checked here, on the config first (cheap, and the clearest message) and then on the modules themselves, and
the message always names a recipe that works for any checkpoint.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from deltacompress.calibrate.records import first_line
from deltacompress.checkpoint import already_quantized
from deltacompress.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

WAY_OUT = "use `--recipe lossless`, which works for any checkpoint"
_COUNTED = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_labels")
_MAX_COUNT = 10_000
"""More layers (and labels) than any model has; transformers makes an object of each, until memory is full."""

# num_experts, num_local_experts, n_routed_experts, moe_num_experts, ...: more than one of them makes a router.
_EXPERT_COUNT = re.compile(r"experts$")
_EXPERT_MODULE = re.compile(r"(^|_)(experts?|router|moe)(_|$)|MoE|Moe|Experts|Router")


def unsupported(where: Path | str, reason: str) -> UnsupportedModelError:
    """One line: where, why, and the way out."""
    return UnsupportedModelError(f"{where}: {reason}; {WAY_OUT}")


def unusable(file: Path, error: Exception) -> CheckpointError:
    """One line: the config file, what transformers said of it, and the way out."""
    return CheckpointError(
        f"{file}: transformers cannot make a model of it ({first_line(error)}); "
        "mend that field, or get the file that came with the weights"
    )


@contextmanager
def failing_forward(path: Path) -> Iterator[None]:
    """Name config.json where a model's own forward fails on a value in it, as on a factor that is null.

    Raises:
        CheckpointError: says what the forward raised. Other errors (no memory, a lost device) pass as they are.
    """
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise unusable(path / "config.json", error) from error


def is_norm(module: nn.Module) -> bool:
    """Normalization layers share no base class in transformers; their class names all say so."""
    return "norm" in type(module).__name__.lower()


def read_config(path: Path) -> PretrainedConfig:
    """The transformers config of a checkpoint directory, if it is a dense text decoder that transformers ships.

    A config that also names remote code (`auto_map`) is fine as long as the library itself knows its model type: the
    library's class is used, code from the checkpoint is never run.

    Raises:
        CheckpointError: no readable config.json.
        UnsupportedModelError: anything but a dense, unquantized decoder of the installed transformers.
    """
    file = path / "config.json"
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; give the directory of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}); restore the file") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: holds no JSON object; restore the file")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remote = ", and the code that the checkpoint brings along is never run" if "auto_map" in raw else ""
        raise unsupported(file, f"model type {model_type!r} is unknown to the installed transformers{remote}")
    for field in _COUNTED:
        if isinstance(count := raw.get(field), int) and count > _MAX_COUNT:
            raise unusable(file, ValueError(f"{field} is above {_MAX_COUNT}"))
    if told := already_quantized(raw):
        raise unsupported(file, told)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a wrong field raises whatever that model type's own validation raises
        raise unusable(file, error) from error
    config._attn_implementation = None  # a checkpoint chooses no code: some names have kernels fetched from the hub
    if not _is_text(config):
        raise unsupported(file, f"model type {model_type!r} is multimodal, only text decoders can be calibrated")
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unsupported(file, f"model type {model_type!r} is no causal language model")
    for field, value in config.to_dict().items():
        if _EXPERT_COUNT.search(field) and "shared" not in field and isinstance(value, int) and value > 1:
            reason = f"model type {model_type!r} is a mixture of experts ({field}={value}), which is not supported yet"
            raise unsupported(file, reason)
    return config


def build_model(config: PretrainedConfig, file: Path) -> PreTrainedModel:
    """The causal model in f32 on the meta device, but for its buffers: those are computed, so they must be real.

    Raises:
        CheckpointError: names `file` and what transformers said.
    """
    try:
        with warnings.catch_warnings(action="ignore"), init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # values that pass a config's validation meet any line of the model's own code
        raise unusable(file, error) from error
    return model


def _is_text(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is config
    except ValueError:  # it has several
        return False


def find_layers(model: nn.Module, count: int, where: Path) -> str:
    """Module path of the ModuleList that holds the `count` decoder layers.

    Raises:
        UnsupportedModelError: there is no such list, or more than one.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        nested = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not nested:
            found.append(name)
    if len(found) != 1:
        raise unsupported(where, f"{type(model).__name__} has {len(found)} lists of {count} modules, expected one")
    return found[0]


def check_layer(layer: nn.Module, where: Path) -> None:
    """Refuse a decoder layer whose large weights are not all plain `nn.Linear` weights.

    Raises:
        UnsupportedModelError: experts, routers, convolutions, Conv1D, or any other matrix that is no linear layer.
    """
    for name, module in layer.named_modules():
        kind, leaf = type(module).__name__, name.rsplit(".", 1)[-1]
        if isinstance(module, nn.ModuleList):
            raise unsupported(
                where, f"{name} is a {kind} inside a decoder layer: experts or the like, not supported yet"
            )
        if _EXPERT_MODULE.search(leaf) or _EXPERT_MODULE.search(kind):
            raise unsupported(where, f"{name} is a {kind}: mixture-of-experts layers are not supported yet")
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or is_norm(module) or (isinstance(module, nn.Linear) and attribute == "weight"):
                continue
            shape = "x".join(map(str, parameter.shape))
            reason = f"{name}.{attribute} ({shape}) belongs to a {kind}, only nn.Linear weights can be calibrated"
            raise unsupported(where, reason)
