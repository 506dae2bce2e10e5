"""Routers: what chooses the experts of a token. They are small, and a token that goes elsewhere is another's answer."""

from __future__ import annotations

import re

from torch import nn

_EXPERTS = re.compile(r"Experts$")
_ROUTER = re.compile(r"(^|_)(gate|router)$")


def routers(model: nn.Module) -> set[nn.Module]:
    """All modules of a model by which tokens are sent to experts, or a shared expert is weighted."""
    return {
        inner
        for block in model.modules()
        if any(_EXPERTS.search(type(child).__name__) for child in block.children())
        for name, child in block.named_children()
        if _ROUTER.search(name)
        for inner in child.modules()
    }
