"""The forward of a mixture's experts, one after the other, as an experts function of the library.

Model types hand their experts a choice: the library's registry of experts functions. Each function is told by the
module itself what its experts are made of (a gate, biases, transposed weights), so no architecture is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from deltacompress.models.experts.own_weights import OwnWeights
from deltacompress.models.experts.routing import Routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "deltacompress_one_by_one"
Watch = Callable[[str, Tensor, Routing], Tensor]
"""(the weights that are about to run, by attribute, what they receive, and which of it goes where) -> their input.

Of the first product there is a row for each token, of the second one for each pair of an expert and a token.
"""


def run_one_by_one(model: PreTrainedModel) -> None:
    """From now on the experts of this model run through `forward`."""
    model.config._experts_implementation = NAME


def first_product(experts: nn.Module) -> str:
    """The attribute that holds what the experts' inputs are multiplied with first."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


@contextmanager
def watched(experts: nn.Module, watch: Watch) -> Iterator[None]:
    """In this block `watch` sees what the two products of these experts receive."""
    vars(experts)["watch"] = watch
    try:
        yield
    finally:
        del vars(experts)["watch"]


def forward(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the chosen experts make of each token, weighted and summed.

    hidden: [tokens, in]; chosen: i64 [tokens, choices]; weights: [tokens, choices].
    """
    if hidden.is_meta:  # a trial: without values nobody knows which experts run
        return torch.zeros_like(hidden)
    module: Any = experts
    watch = vars(experts).get("watch", lambda _name, inputs, _routing: inputs)
    first, routing = first_product(experts), Routing.of(chosen, module.num_experts)
    shares = weights.reshape(-1)[routing.choice]
    zeros = partial(torch.zeros, hidden.shape, dtype=hidden.dtype, device=hidden.device)
    inputs = watch(first, hidden, routing)
    del hidden  # a forward that waits between the products needs it no more
    middle = [
        _activated(module, _product(module, first, e, inputs[routing.tokens[own]])) for e, own in routing.experts()
    ]
    inner = watch("down_proj", torch.cat(middle) if middle else inputs[:0], routing)
    del inputs, middle
    result = zeros()
    for e, own in routing.experts():
        output = _product(module, "down_proj", e, inner[own])
        if getattr(module, "has_post_expert_norm", False):
            output = module.post_expert_norm(output)
        output = output * shares[own].unsqueeze(-1)
        result.index_add_(0, routing.tokens[own], output.to(result.dtype))  # no token twice: in a fixed order
    return result


def _activated(module: Any, outputs: Tensor) -> Tensor:
    result: Tensor = module._apply_gate(outputs) if module.has_gate else module.act_fn(outputs)
    return result


def _product(module: Any, name: str, expert: int, inputs: Tensor) -> Tensor:
    """Of one expert's inputs [rows, in] with its weight, and the bias."""
    weight = getattr(module, name)
    if isinstance(weight, OwnWeights):
        outputs = torch.cat([linear(inputs, part) for part in weight.parts_of(expert)], dim=-1)
    else:
        outputs = inputs @ weight[expert] if module.is_transposed else linear(inputs, weight[expert])
    return outputs + getattr(module, f"{name}_bias")[expert] if module.has_bias else outputs


ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
