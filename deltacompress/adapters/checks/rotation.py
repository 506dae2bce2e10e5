"""R and s of BOFT."""

from __future__ import annotations

from collections.abc import Mapping

from deltacompress.adapters.checks.base import DoesNotFitError, same
from deltacompress.adapters.records import Rotation
from deltacompress.adapters.settings import AdapterConfig
from deltacompress.adapters.tensors import Brought
from deltacompress.types import TensorInfo


def rotation(
    brought: Brought, tensors: Mapping[str, TensorInfo], settings: AdapterConfig, outputs: int, inputs: int
) -> Rotation:
    """R and s of a linear of this size.

    Raises:
        ValueError: one is missing, or they do not fit.
    """
    module, roles = brought.module, brought.roles
    alone(brought, tensors, settings)
    shape = tensors[roles["R"]].shape
    block = settings.block or inputs // settings.blocks
    if settings.blocks and settings.blocks * block != inputs:
        told = f"{settings.blocks} blocks of {block}, by the config, are not its {inputs} columns"
        raise DoesNotFitError(f"module {module}: {told}")
    if not block or inputs % block:
        raise DoesNotFitError(f"module {module}: {inputs} columns are no whole number of blocks of {block}")
    same(module, "boft_R", tensors[roles["R"]], (shape[0], inputs // block, block, block))
    same(module, "boft_s", tensors[roles["s"]], (outputs, 1))
    return Rotation(roles["R"], roles["s"], shape[0], block)


def alone(brought: Brought, tensors: Mapping[str, TensorInfo], settings: AdapterConfig) -> None:
    """What can be known of them without a base; raises ValueError."""
    module, roles = brought.module, brought.roles
    if brought.matrices != {"R", "s"}:
        there = ", ".join(sorted(roles))
        raise ValueError(f"module {module} has {there} only; boft_R and boft_s belong together")
    if not settings.block and not settings.blocks:
        raise ValueError(f"module {module}: boft_block_size and boft_block_num of the config are both 0")
    shape = tensors[roles["R"]].shape
    # PEFT falls back to one factor where its CUDA extension is missing, whatever the config asks for.
    factors = 1 if shape[:1] == (1,) else settings.factors
    block = settings.block or (shape[-1] if shape else 0)
    by_config = (factors, *shape[1:2], block, block)
    if shape != by_config:
        raise ValueError(f"module {module}: boft_R has shape {list(shape)}, by the config it is {list(by_config)}")
    if factors > 1 and (block % 2 or shape[1] % 2 ** (factors - 1)):
        raise ValueError(
            f"module {module}: {shape[1]} blocks of {block} columns cannot be halved {factors - 1} times, as "
            f"{factors} butterfly factors need"
        )
