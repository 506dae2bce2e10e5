"""The two products of a layer's experts, each a stage of calibration of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from deltacompress.models.experts.forward import first_product, watched
from deltacompress.models.experts.own_weights import OwnWeights, is_experts
from deltacompress.models.experts.routing import Routing

See = Callable[["ExpertStage", Tensor, Routing], Tensor]
"""(a stage, what it receives, which of it goes where) -> its input."""


@dataclass(frozen=True, slots=True)
class ExpertStage:
    """One product of all experts of a module.

    weights: the attribute that holds what they multiply with. expert_of: for each tensor in it, whose it is.
    a_row_a_token: whether it receives a row for each token, and not for each pair of an expert and a token.
    """

    module: nn.Module
    weights: str
    expert_of: Mapping[str, int]
    a_row_a_token: bool


def expert_stages(layer: nn.Module, sites: Mapping[str, tuple[nn.Module, str]]) -> Iterator[ExpertStage]:
    """Those of a decoder layer. sites: module and attribute of each of its linear weights, by the checkpoint's name."""
    names: dict[int, dict[str, int]] = {}
    for name, (module, attribute) in sites.items():
        if isinstance(module, OwnWeights):
            names.setdefault(id(module), {})[name] = module.expert_of(attribute)
    for module in filter(is_experts, layer.modules()):
        for attribute, weights in module.named_children():
            if id(weights) in names:
                yield ExpertStage(module, attribute, names[id(weights)], attribute == first_product(module))


@contextmanager
def watched_stages(stages: Sequence[ExpertStage], see: See) -> Iterator[None]:
    """In this block `see` is called when one of these stages is about to run."""

    def watch(own: Mapping[str, ExpertStage], weights: str, inputs: Tensor, routing: Routing) -> Tensor:
        return see(own[weights], inputs, routing) if weights in own else inputs

    with ExitStack() as watches:
        for module in {stage.module for stage in stages}:
            own = {stage.weights: stage for stage in stages if stage.module is module}
            watches.enter_context(watched(module, partial(watch, own)))
        yield
