"""A loaded model: transformers' own classes and its own conversion of names, over weights that this project reads.

`from_pretrained` takes a config and a state dict in the place of a directory. The state dict holds promises of tensors:
each is read when the library asks for it, from the file whose header was checked and whose bytes are hashed, so there
is never more than one copy of the weights. First the same is done with empty tensors on the meta device, which costs
no memory: so a checkpoint that does not fit its config is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.errors import BackendError, CheckpointError
from deltacompress.files.places import CONFIG
from deltacompress.models.architectures.refusals import is_dense_decoder
from deltacompress.models.architectures.trial import try_forward
from deltacompress.models.config import other_way_out, read_config, unsupported, unusable
from deltacompress.models.quiet import quiet
from deltacompress.models.support import outline
from deltacompress.types import TensorInfo

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


WAY_OUT = "give a checkpoint of a model that transformers can run"


class Weights(Protocol):
    """What a model is loaded from: a checkpoint, or a part of one. As Checkpoint has them."""

    path: Path
    config: dict[str, Any]
    nbytes: int
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, *, pinned: bool = False) -> Tensor:
        """A tensor on the CPU."""


def load_model(
    checkpoint: Weights,
    *,
    device: torch.device,
    dtype: torch.dtype,
    shrink: Callable[[PretrainedConfig], None] = lambda _: None,
) -> PreTrainedModel:
    """The causal language model of a checkpoint, in evaluation mode, its weights of `dtype` on `device`.

    What the model type keeps in fp32 stays so. Tensors that no part of the model takes are not read. shrink: makes the
    config in the checkpoint's directory that of a part of it.

    Raises:
        UnsupportedModelError: no causal language model that transformers knows, or a config that could mean anything.
        CheckpointError: a config that transformers cannot use, a tensor that is missing, of another shape, or changed
            since the checkpoint was opened.
        BackendError: it does not fit into the device's memory.
    """
    file = checkpoint.path / CONFIG
    with other_way_out(WAY_OUT):
        config = read_config(checkpoint.config, file, tensors=len(checkpoint.tensors))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise unsupported(file, f"model type {config.model_type!r} is no causal language model")
    shrink(config)
    model = outline(config, file, tensors=len(checkpoint.tensors))
    if is_dense_decoder(config):
        try_forward(model, file)
    check_fit(checkpoint, config, dtype)
    stored = {name: _Stored(checkpoint, name, device) for name in checkpoint.tensors}
    try:
        model, _ = _loaded(config, stored, dtype, device)
    except torch.OutOfMemoryError as error:
        told = f"{checkpoint.nbytes} bytes of weights do not fit into the memory of {device}"
        raise BackendError(told, where=checkpoint.path, way_out="use a smaller dtype") from error
    model.name_or_path = model.config.name_or_path = str(checkpoint.path)
    return model.eval()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a checkpoint that is read when it is indexed, which is how the library asks for its values."""

    checkpoint: Weights
    name: str
    device: torch.device

    def __getitem__(self, _: Any) -> Tensor:
        on_gpu = self.device.type == "cuda"
        return self.checkpoint.read(self.name, pinned=on_gpu).to(self.device, non_blocking=on_gpu)


def check_fit(checkpoint: Weights, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Let the library load empty tensors, which takes no memory, for an outline that was checked before.

    Raises:
        CheckpointError: it misses a tensor, or finds one in another shape.
    """
    empty = {
        name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
        for name, info in checkpoint.tensors.items()
    }
    try:
        model, info = _loaded(config, empty, dtype, torch.device("meta"))
    except Exception as error:
        raise unusable(checkpoint.path / CONFIG, error) from error
    del model
    if lost := sorted(info["missing_keys"]):  # the library would go on with random numbers there
        raise CheckpointError(f"no weight {lost[0]} in it", where=checkpoint.path, way_out="give a whole checkpoint")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise misfit(checkpoint.path, name, found, wanted)


def misfit(where: Path, name: str, found: Sequence[int], wanted: Sequence[int]) -> CheckpointError:
    """One line: which tensor is not of the shape that the config implies."""
    told = f"tensor {name!r} has shape {tuple(found)}, config.json implies {tuple(wanted)}"
    return CheckpointError(told, where=where, way_out="get the config.json that came with the weights")


def _loaded(
    config: PretrainedConfig, state: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """What the library makes of a state dict: (model, what it missed)."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if kind.config_class is config.sub_configs.get("text_config"):  # the text half of a multimodal model
        config = config.get_text_config()
    with quiet():
        loaded: tuple[Any, dict[str, Any]] = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_fit tells them by name
            local_files_only=True,
        )
    return loaded
