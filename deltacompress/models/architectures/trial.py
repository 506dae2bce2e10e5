"""A model tried on two tokens on the meta device, before a weight is read: does its config run, and what runs then?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deltacompress.models import support
from deltacompress.models.config import unsupported, unusable
from deltacompress.models.experts.forward import run_one_by_one
from deltacompress.models.relay import BrokenChain

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_TRIED = (1, 2)
"""Sequences and tokens."""


@torch.no_grad()
def try_forward(model: PreTrainedModel, file: Path) -> None:
    """Run a dense decoder on the meta device over two tokens, to meet what a config breaks before weights are read.

    Raises:
        CheckpointError: names `file` and what the forward raised.
        UnsupportedModelError: what it runs depends on values.
    """
    ids = torch.zeros(_TRIED, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, 2, 2, device="meta")  # given whole, for making one looks at values
    try:
        try:
            model(input_ids=ids, use_cache=False)
        except RuntimeError as error:
            if "meta tensors" not in str(error):
                raise
            model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
    except BrokenChain as error:
        reason = f"{type(model).__name__} changes the hidden states between its layers, or has several for a token"
        raise unsupported(file.parent, reason) from error
    except NotImplementedError as error:  # the meta device has no values to decide by
        reason = f"what {type(model).__name__} runs depends on the values that it meets"
        raise unsupported(file.parent, reason) from error
    except Exception as error:
        raise unusable(file, error) from error


@dataclass(frozen=True, slots=True)
class Walk:
    """How the layers run. once: paths of the modules in them that run exactly once in a forward.

    width: of the tuple that each layer returns, the hidden states first; 0 where it returns those alone.
    """

    once: frozenset[str]
    width: int


def try_walk(model: PreTrainedModel, layers: str, file: Path) -> Walk:
    """Try a forward as try_forward, and see how the decoder layers run in it.

    layers: module path of the list of decoder layers.

    Raises:
        UnsupportedModelError: a layer receives something else than the one before it returned; else as try_forward.
    """
    model.eval()  # as it will run
    trial = _Trial(tuple(model.get_submodule(layers).children()))
    inside = {f"{layers}.{name}": module for name, module in model.get_submodule(layers).named_modules() if name}
    with trial.watching(model, inside):
        try_forward(model, file)
    return Walk(frozenset(name for name in inside if trial.runs[name] == 1), trial.width)


_KNOWN: dict[tuple[str, int], tuple[str, Walk]] = {}
"""Of models that were tried in this process: the jobs of a fleet have one config."""


def tried(raw: object, config: PretrainedConfig, file: Path, *, tensors: int) -> tuple[str, Walk]:
    """Where the layers of a model are, and how they run.

    raw: config.json as it is; tensors: as support.outline. Raises as support.outline, decoder_layers and try_walk.
    """
    key = json.dumps(raw, sort_keys=True), tensors
    if key not in _KNOWN:
        model = support.outline(config, file, tensors=tensors)
        layers = support.decoder_layers(model, file.parent)
        run_one_by_one(model)
        _KNOWN[key] = layers, try_walk(model, layers, file)
    return _KNOWN[key]


@dataclass
class _Trial:
    """What is seen of one forward. returned: by each layer so far, and what it returned besides; runs: by path."""

    layers: tuple[nn.Module, ...]
    returned: list[Any] = field(default_factory=list)
    carried: list[torch.Tensor] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    width: int = 0

    @contextmanager
    def watching(self, model: nn.Module, inside: dict[str, nn.Module]) -> Iterator[None]:
        """Watch forwards of the model in this block; what an earlier one left is forgotten."""
        handles = [model.register_forward_pre_hook(self._begin)]
        handles += [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in self.layers]
        handles += [layer.register_forward_hook(self._leave) for layer in self.layers]
        handles += [module.register_forward_pre_hook(self._counted(name)) for name, module in inside.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        self.returned.clear()
        self.carried.clear()
        self.runs.clear()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        at = len(self.returned)
        if at >= len(self.layers) or layer is not self.layers[at] or (at and hidden is not self.returned[-1]):
            raise BrokenChain
        others = [*args, *kwargs.values()]
        if any(one is carried for one in others for carried in self.carried):  # beside the hidden states
            raise BrokenChain
        if hidden.ndim != 3 or tuple(hidden.shape[:2]) != _TRIED:  # a state for each token, and no others
            raise BrokenChain

    def _leave(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        self.width = len(output) if isinstance(output, tuple | list) else 0
        self.carried += [one for one in output[1:] if isinstance(one, torch.Tensor)] if self.width else []
        self.returned.append(output[0] if self.width else output)

    def _counted(self, name: str) -> Any:
        def count(_module: nn.Module, _args: Any) -> None:
            self.runs[name] += 1

        return count
