"""Which models can be walked layer by layer, and the refusal of every other one.

A model that slips through and is walked wrongly gives a delta that is wrong in silence, so each assumption of the
walk is checked here, on the config first (cheap, and the clearest message) and then on the modules themselves, and
the message always names a recipe that works for any checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from deltacompress.files.places import CONFIG
from deltacompress.models.architectures import refusals
from deltacompress.models.config import config_class, read_config, unsupported, unusable
from deltacompress.models.quiet import quiet
from deltacompress.models.relay import BrokenChain
from deltacompress.types import TensorKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MODULES, _MODULES_PER_TENSOR = 2000, 10
"""More than any model has, of which there are two modules or so for each tensor."""
_MAX_BUFFERS = 192 << 20
"""Of the tables that a model computes from its config: those of GPT-Neo 2.7B, the largest public ones, take 128 MiB."""

_OF_THE_MACHINE = re.compile(r"CUDA|HIP|MPS|memory|cuDNN|cuBLAS|CUBLAS", re.IGNORECASE)
"""In what torch raises as a RuntimeError, whether a size is wrong or a device is lost."""

_EXPERT_MODULE = re.compile(r"(^|_)(experts?|router|moe)(_|$)|MoE|Moe|Experts|Router")


@contextmanager
def failing_forward(path: Path) -> Iterator[None]:
    """Name config.json where a model's own forward fails on a value in it, as on a factor that is null.

    Raises:
        CheckpointError: says what the forward raised. Other errors (no memory, a lost device) pass as they are.
    """
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
        raise unusable(path / CONFIG, error) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _OF_THE_MACHINE.search(str(error)):
            raise
        raise unusable(path / CONFIG, error) from error


def is_norm(module: nn.Module) -> bool:
    """Normalization layers share no base class in transformers; their class names all say so."""
    return "norm" in type(module).__name__.lower()


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight; GPT-2's Conv1D is a linear layer whose weight lies as [in, out]."""
    return isinstance(module, nn.Linear | Conv1D)


def is_transposed(module: nn.Module, kind: TensorKind) -> bool:
    """Whether a tensor of this kind and module is a linear weight that lies as [in, out]."""
    return kind == "linear" and isinstance(module, Conv1D)


def read_decoder(raw: Mapping[str, Any], file: Path, *, tensors: int) -> PretrainedConfig:
    """The config of a dense text decoder that transformers ships; arguments as of `read_config`.

    Raises:
        UnsupportedModelError: anything but a dense, unquantized decoder; else as read_config.
        CheckpointError: as read_config.
    """
    kind = config_class(raw, file)
    if reason := refusals.of_type(kind):  # first: its fields are another model's, and each would be refused
        raise unsupported(file, reason)
    config = read_config(raw, file, tensors=tensors)
    if reason := refusals.of_config(config):
        raise unsupported(file, reason)
    return config


def outline(config: PretrainedConfig, file: Path, *, tensors: int) -> PreTrainedModel:
    """The causal model on the meta device, buffers too: it takes little memory, whatever sizes the config says.

    tensors: how many the checkpoint holds; a model of far more modules than that is another's.

    Raises:
        CheckpointError: names `file` and what transformers said; more modules or larger buffers than such a model has.
    """
    try:
        with quiet(), torch.device("meta"), _at_most_modules(_MODULES + _MODULES_PER_TENSOR * tensors):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # values that pass a config's validation meet any line of the model's own code
        raise unusable(file, error) from error
    computed = sum(buffer.nbytes for buffer in model.buffers())
    if computed > _MAX_BUFFERS:
        raise unusable(file, ValueError(f"its tables of positions would take {computed} bytes"))
    return model


@contextmanager
def _at_most_modules(limit: int) -> Iterator[None]:
    """Stop what builds more modules than `limit` in this block."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise ValueError(f"it would have more than {limit} modules, which these weights do not fill")

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def build_model(config: PretrainedConfig, file: Path) -> PreTrainedModel:
    """The causal model in f32 on the meta device, but for its buffers: those are computed, so they must be real.

    To be called once `outline` has told that they are small.

    Raises:
        CheckpointError: names `file` and what transformers said.
    """
    try:
        with quiet(), init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:
        raise unusable(file, error) from error
    return model


@torch.no_grad()
def try_forward(model: PreTrainedModel, file: Path, layers: str | None = None) -> None:
    """Run a dense decoder on the meta device over two tokens, to meet what a config breaks before weights are read.

    layers: module path of the decoder layers, if each has to receive what the one before it returned.

    Raises:
        CheckpointError: names `file` and what the forward raised.
        UnsupportedModelError: the model does more between its layers, or what it runs depends on values.
    """
    with _in_a_chain(() if layers is None else tuple(model.get_submodule(layers).children())):
        _try_two_tokens(model, file)


def _try_two_tokens(model: PreTrainedModel, file: Path) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, 2, 2, device="meta")  # given whole, for making one looks at values
    try:
        try:
            model(input_ids=ids, use_cache=False)
        except RuntimeError as error:
            if "meta tensors" not in str(error):
                raise
            model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
    except BrokenChain as error:
        reason = f"{type(model).__name__} changes the hidden states between its layers"
        raise unsupported(file.parent, reason) from error
    except NotImplementedError as error:  # the meta device has no values to decide by
        reason = f"what {type(model).__name__} runs depends on the values that it meets"
        raise unsupported(file.parent, reason) from error
    except Exception as error:
        raise unusable(file, error) from error


@contextmanager
def _in_a_chain(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Raise BrokenChain where a layer receives something else than the one before it returned."""
    returned: list[Any] = []

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if layer is not layers[len(returned) % len(layers)] or (returned and hidden is not returned[-1]):
            raise BrokenChain

    def after(_layer: nn.Module, _args: Any, output: Any) -> None:
        returned.append(output[0] if isinstance(output, tuple | list) else output)

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(model: PreTrainedModel, where: Path) -> str:
    """Module path of the list of decoder layers of a model that can be walked.

    Raises:
        UnsupportedModelError: one that cannot: no linear output projection, else as find_layers and check_layer.
    """
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise unsupported(where, f"{type(model).__name__} has no linear output projection")
    if reason := refusals.of_model(model):
        raise unsupported(where, reason)
    found = find_layers(model, _layer_count(model), where)
    for layer in model.get_submodule(found).children():
        check_layer(layer, where)
    return found


def _layer_count(model: PreTrainedModel) -> int:
    """Of the decoder: some types count those of an encoder too, which their causal models lack."""
    count: int = getattr(model.config, "decoder_layers", 0) or model.config.num_hidden_layers
    return count


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
            if parameter.ndim < 2 or is_norm(module) or (is_linear(module) and attribute == "weight"):
                continue
            shape = "x".join(map(str, parameter.shape))
            reason = f"{name}.{attribute} ({shape}) belongs to a {kind}, only nn.Linear weights can be calibrated"
            raise unsupported(where, reason)
