"""Which models can be walked layer by layer, and the refusal of every other one.

A model that slips through and is walked wrongly gives a delta that is wrong in silence, so each assumption of the
walk is checked here, on the config first (cheap, and the clearest message) and then on the modules themselves, and
the message always names a recipe that works for any checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from deltacompress.files.places import CONFIG
from deltacompress.models.architectures import refusals
from deltacompress.models.config import config_class, read_config, unsupported, unusable
from deltacompress.models.experts.own_weights import is_experts
from deltacompress.models.quiet import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MODULES, _MODULES_PER_TENSOR = 2000, 10
"""More than any model has, of which there are two modules or so for each tensor."""
_MAX_BUFFERS = 192 << 20
"""Of the tables that a model computes from its config: those of GPT-Neo 2.7B, the largest public ones, take 128 MiB."""

_OF_THE_MACHINE = re.compile(r"CUDA|HIP|MPS|memory|cuDNN|cuBLAS|CUBLAS", re.IGNORECASE)
"""In what torch raises as a RuntimeError, whether a size is wrong or a device is lost."""


def of_the_machine(error: RuntimeError) -> bool:
    """Whether it is for want of memory, or a device's own, and not of what was computed."""
    return isinstance(error, torch.OutOfMemoryError) or _OF_THE_MACHINE.search(str(error)) is not None


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
        if of_the_machine(error):
            raise
        raise unusable(path / CONFIG, error) from error


def settle_vector_math() -> None:
    """Make the process's first sine and cosine small ones, which run on one thread.

    On a busy CPU the very first call of the vector math library, if it is threaded, now and then leaves one thread in
    a low-accuracy mode (errors of 2e-4 instead of 4e-8). That call would be the rotary table of the first batch: runs
    would not repeat, and an interrupted compression would not resume to the same bytes.
    """
    torch.ones(8).cos()
    torch.ones(8).sin()


def is_norm(module: nn.Module) -> bool:
    """Normalization layers share no base class in transformers; their class names all say so."""
    return "norm" in type(module).__name__.lower()


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight; GPT-2's Conv1D is a linear layer whose weight lies as [in, out]."""
    return isinstance(module, nn.Linear | Conv1D)


def read_decoder(raw: Mapping[str, Any], file: Path, *, tensors: int) -> PretrainedConfig:
    """The config of a text decoder that transformers ships; arguments as of `read_config`.

    Raises:
        UnsupportedModelError: anything but an unquantized decoder; else as read_config.
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
        with quiet(), _LargeOnMeta(), init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:
        raise unusable(file, error) from error
    return model


class _LargeOnMeta(TorchFunctionMode):
    """New tensors larger than all buffers of a model are on the meta device from the start, as weights end up anyway.

    One parameter of all experts may be larger than this machine's memory.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            sizes = args[0] if args and not isinstance(args[0], int) else args
            if math.prod(sizes) * torch.float32.itemsize > _MAX_BUFFERS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def decoder_layers(model: PreTrainedModel, where: Path) -> str:
    """Module path of the list of decoder layers of a model that can be walked.

    Raises:
        UnsupportedModelError: one that cannot: no linear output projection, else as find_layers.
    """
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise unsupported(where, f"{type(model).__name__} has no linear output projection")
    if reason := refusals.of_model(model):
        raise unsupported(where, reason)
    return find_layers(model, _layer_count(model), where)


def _layer_count(model: PreTrainedModel) -> int:
    """Of the decoder: some types count those of an encoder too, which their causal models lack."""
    config = model.config.get_text_config()
    count: int = getattr(config, "decoder_layers", 0) or config.num_hidden_layers
    return count


def find_layers(model: PreTrainedModel, count: int, where: Path) -> str:
    """Module path of the ModuleList that holds the `count` decoder layers.

    Raises:
        UnsupportedModelError: there is no such list, or more than one.
    """
    found: list[str] = []
    beside = refusals.others(model)
    for name, module in model.named_modules():
        nested = any(name.startswith(outer + ".") for outer in (*found, *beside))
        if isinstance(module, nn.ModuleList) and len(module) == count and not nested:
            found.append(name)
    if len(found) != 1:
        raise unsupported(where, f"{type(model).__name__} has {len(found)} lists of {count} modules, expected one")
    return found[0]


def check_served(model: PreTrainedModel, layers: str, where: Path) -> None:
    """Refuse decoder layers with more than linears and norms: what stands beside many variants in one batch is linears.

    layers: module path of the list of decoder layers.

    Raises:
        UnsupportedModelError: experts, a convolution, Conv1D, or any other matrix that is no linear layer.
    """
    inside = dict(model.get_submodule(layers).named_modules())
    if experts := next((name for name, module in inside.items() if is_experts(module)), None):
        raise unsupported(where, f"{layers}.{experts} are experts, only nn.Linear weights are served")
    for name, module in inside.items():
        kind = type(module).__name__
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or is_norm(module) or (isinstance(module, nn.Linear) and attribute == "weight"):
                continue
            shape = "x".join(map(str, parameter.shape))
            reason = f"{layers}.{name}.{attribute} ({shape}) belongs to a {kind}, only nn.Linear weights are served"
            raise unsupported(where, reason)
