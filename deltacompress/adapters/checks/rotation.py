"""R and s of BOFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    factors, blocks, block, _ = tensors[roles["R"]].shape
    if blocks * block != inputs:
        raise DoesNotFitError(f"module {module}: {blocks} blocks of {block} are not its {inputs} columns")
    same(module, "boft_R", tensors[roles["R"]], (factors, blocks, block, block))
    same(module, "boft_s", tensors[roles["s"]], (outputs, 1))
    return Rotation(roles["R"], roles["s"], factors, block)


def check_factors(brought: Iterable[Brought], tensors: Mapping[str, TensorInfo]) -> None:
    """All modules have as many, fallen back to one or not; raises ValueError. Of what `alone` has passed."""
    counts = [(one.module, tensors[one.roles["R"]].shape[0]) for one in brought if "R" in one.roles]
    for module, factors in counts:
        if factors != counts[0][1]:
            first, others = counts[0]
            raise ValueError(f"module {module}: boft_R has {factors} factors, that of {first} {others}")


def alone(brought: Brought, tensors: Mapping[str, TensorInfo], settings: AdapterConfig) -> None:
    """What can be known of them without a base; raises ValueError."""
    module, roles = brought.module, brought.roles
    if brought.matrices != {"R", "s"}:
        there = ", ".join(sorted(roles))
        raise ValueError(f"module {module} has {there} only; boft_R and boft_s belong together")
    shape = tensors[roles["R"]].shape
    if len(shape) != 4 or shape[2] != shape[3]:
        raise ValueError(f"module {module}: boft_R has shape {list(shape)}, not factors of so many square blocks")
    factors, blocks, block, _ = shape
    for what, own, by_config in (
        ("blocks of {} columns", block, settings.block or block),
        ("{} blocks", blocks, settings.blocks or blocks),
        # PEFT falls back to one factor where its CUDA extension is missing, whatever the config asks for
        ("{} factors", factors, 1 if factors == 1 else settings.factors),
    ):
        if own != by_config:
            raise ValueError(f"module {module}: boft_R has {what.format(own)}, by the config {what.format(by_config)}")
    if factors > 1 and (block % 2 or blocks % 2 ** (factors - 1)):
        raise ValueError(
            f"module {module}: {blocks} blocks of {block} columns cannot be halved {factors - 1} times, as "
            f"{factors} butterfly factors need"
        )
