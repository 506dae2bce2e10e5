"""Which parameter of the model each checkpoint tensor fills, and what kind of tensor that makes it.

Artifacts and recipes speak checkpoint names; modules have their own. For every supported decoder the two differ by a
base-model prefix at most, or by one renamed head, and experts are taken apart until each tensor has a parameter of its
own: so the mapping is one to one or the model is refused. A parameter that no tensor fills would be random in silence.
Tensors that fill nothing (buffers that old versions of transformers saved) are of kind "other".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from deltacompress.files.places import CONFIG
from deltacompress.models.config import unsupported
from deltacompress.models.experts.own_weights import OwnWeights, is_experts, take_apart
from deltacompress.models.experts.routers import routers
from deltacompress.models.support import decoder_layers, is_linear, is_norm, outline, read_decoder
from deltacompress.types import OddLinears, TensorKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Site = tuple[nn.Module, str]
"""A module and the name of one of its tensors."""

# GPT-NeoX checkpoints call the output projection embed_out, transformers 5 calls the module lm_head.
_RENAMED_PREFIXES = {"embed_out.": "lm_head."}


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter (or saved buffer) of the model, and the checkpoint tensor that fills it.

    sites holds each place the tensor goes to: two for a tied head. layer is None outside the decoder layers.
    """

    name: str
    sites: tuple[Site, ...]
    layer: int | None
    kind: TensorKind

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer now in the model (on the meta device while it is not loaded)."""
        module, attribute = self.sites[0]
        found = getattr(module, attribute)
        assert isinstance(found, torch.Tensor)
        return found


def match_names(model: PreTrainedModel, layers: str, names: Iterable[str], where: Path) -> dict[str, Slot]:
    """Slots by checkpoint name, in the order of the model's own modules; names that fill nothing are left out.

    A head that is tied by the config but stored beside the embedding gets a slot (and a parameter) of its own: that is
    exact whether the two stored tensors agree or not, and transformers does not tie them either if they differ.

    Args:
        model: on the meta device, with tied weights tied; untied where both tensors are stored.
        layers: module path of the list of decoder layers.
        names: every tensor name of the checkpoint.
        where: checkpoint directory, for messages.

    Raises:
        UnsupportedModelError: a parameter that no tensor fills, two tensors for one parameter, or one parameter that
            several decoder layers share; else as take_apart. CheckpointError: as take_apart.
    """
    stored = _stored(model, sorted(names), where)
    tensors = _model_tensors(model)

    groups: dict[int, list[str]] = defaultdict(list)  # parameters that are one object: tied
    for target, tensor in tensors.items():
        groups[id(tensor)].append(target)

    slots: dict[str, Slot] = {}
    exact = routers(model)
    for targets in groups.values():
        filled = [target for target in targets if target in stored]
        if not filled and not isinstance(tensors[targets[0]], nn.Parameter):
            continue  # a buffer keeps the value its module computed
        if not filled:
            reason = f"no tensor of the checkpoint fills parameter {targets[0]!r}: names do not map one to one"
            raise unsupported(where, f"{reason} onto {type(model).__name__}")
        if len({_layer_index(target, layers) for target in targets}) > 1:
            raise unsupported(where, f"decoder layers share parameter {targets[0]!r}")
        if len(filled) > 1:  # stored apart: give each its own parameter
            for target in filled[1:]:
                _give_own_parameter(model, target)
        for target in filled:
            shared = targets if len(filled) == 1 else [target]
            sites = tuple(_site(model, each) for each in shared)
            layer = _layer_index(target, layers)
            slots[stored[target]] = Slot(stored[target], sites, layer, _kind(model, sites, layer, exact))
    return slots


def _stored(model: PreTrainedModel, names: Sequence[str], where: Path) -> dict[str, str]:
    """Checkpoint name of the tensor that fills each parameter, by the parameter's name; takes experts apart."""
    tensors = _model_tensors(model)
    library = _LibraryNames.of(model, tensors)
    stored: dict[str, str] = {}
    merged: dict[str, dict[str, str]] = {}
    for name in names:
        target, pattern = library.find(name)
        own = [*_candidates(name, model.base_model_prefix), *([target] if pattern is None else [])]
        if (found := next((one for one in own if one in tensors), None)) is not None:
            _only(found, name, stored, where)
        elif pattern is not None and target in tensors:
            merged.setdefault(target, {})[name] = pattern
    for target, patterns in merged.items():
        _only(target, min(patterns), dict(stored), where)  # a checkpoint with all experts in one, and one by one
    for name, target in take_apart(model, merged, library.converters, where).items():
        _only(target, name, stored, where)
    return stored


def _only(target: str, name: str, stored: dict[str, str], where: Path) -> None:
    if target in stored:
        raise unsupported(where, f"tensors {stored[target]!r} and {name!r} both fill parameter {target!r}")
    stored[target] = name


def odd_linears(model: PreTrainedModel, slots: Mapping[str, Slot], once: Collection[str]) -> OddLinears:
    """Of the linears in layers, those that lie as [in, out], do not run once in a forward, or are experts'.

    once: paths of the modules that do.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    modules = {slot.name: slot.sites[0][0] for slot in slots.values() if slot.kind == "linear"}

    def runs(module: nn.Module) -> bool:
        path = paths[id(module)]
        return (path.rpartition(".")[0] if isinstance(module, OwnWeights) else path) in once

    return OddLinears(
        transposed=frozenset(name for name, module in modules.items() if isinstance(module, Conv1D)),
        unwalked=frozenset(name for name, module in modules.items() if not runs(module)),
        merged=frozenset(name for name, module in modules.items() if isinstance(module, OwnWeights)),
        stacked=frozenset(slot.name for slot in slots.values() if slot.layer is not None and _is_stack(slot)),
    )


def _is_stack(slot: Slot) -> bool:
    return slot.tensor.ndim == 3 and is_experts(slot.sites[0][0])


def module_paths(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name of each tensor that fills a part of the model -> path of the module that it is in.

    path, config: the checkpoint's directory and its config.json. Where a module is in an outline of the model, it is in
    the model that transformers loads.

    Raises:
        UnsupportedModelError: no dense decoder; else as match_names. CheckpointError: an unusable config.
    """
    file, names = path / CONFIG, tuple(names)
    model = outline(read_decoder(config, file, tensors=len(names)), file, tensors=len(names))
    model.tie_weights()
    slots = match_names(model, decoder_layers(model, path), names, path)
    paths = {id(module): name for name, module in model.named_modules()}
    return {name: paths[id(slot.sites[0][0])] for name, slot in slots.items()}


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones under each of their names) and the buffers that a checkpoint saves, by module name."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict().keys()
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in saved})
    return tensors


def _candidates(name: str, prefix: str) -> Iterable[str]:
    """Module names that a checkpoint name can mean, best first."""
    yield name
    yield f"{prefix}.{name}"
    yield name.removeprefix(f"{prefix}.")
    for old, new in _RENAMED_PREFIXES.items():
        if name.startswith(old):
            yield new + name.removeprefix(old)


@dataclass(frozen=True)
class _LibraryNames:
    """What the library calls a checkpoint's tensors in its model. there: all that the model has."""

    renamings: list[WeightRenaming]
    converters: list[WeightConverter]
    prefix: str
    there: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> _LibraryNames:
        known = get_model_conversion_mapping(model)
        renamings = [one for one in known if isinstance(one, WeightRenaming)]
        converters = [one for one in known if isinstance(one, WeightConverter)]
        return cls(renamings, converters, model.base_model_prefix, dict(tensors))

    def find(self, name: str) -> tuple[str, str | None]:
        """(the parameter that a tensor fills, and, if others fill it too, the pattern by which they are merged)."""
        found, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.there)
        return str(found), pattern


def _layer_index(target: str, layers: str) -> int | None:
    if not target.startswith(layers + "."):
        return None
    return int(target.removeprefix(layers + ".").split(".", 1)[0])


def _site(model: nn.Module, target: str) -> Site:
    path, _, attribute = target.rpartition(".")
    return model.get_submodule(path), attribute


def _give_own_parameter(model: nn.Module, target: str) -> None:
    module, attribute = _site(model, target)
    setattr(module, attribute, nn.Parameter(torch.empty_like(getattr(module, attribute)), requires_grad=False))


def _kind(
    model: PreTrainedModel, sites: tuple[Site, ...], layer: int | None, exact: Collection[nn.Module]
) -> TensorKind:
    """exact: the modules that stay as they are, whatever they are made of."""
    modules = [module for module, _ in sites]
    module, attribute = sites[0]
    tensor = getattr(module, attribute)
    if attribute == "weight" and model.get_input_embeddings() in modules:
        return "embedding"
    if attribute == "weight" and model.get_output_embeddings() in modules:
        return "head"
    if isinstance(module, OwnWeights) or (attribute == "weight" and layer is not None and is_linear(module)):
        return "other" if module in exact else "linear"
    if tensor.ndim == 1 and attribute.endswith("bias"):
        return "bias"
    if tensor.ndim == 1 and isinstance(tensor, nn.Parameter) and is_norm(module):
        return "norm"
    return "other"
