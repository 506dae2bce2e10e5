"""A and B of LoRA and RoSA, magnitudes of DoRA: of a linear, and of an embedding."""

from __future__ import annotations

from collections.abc import Mapping

from deltacompress.adapters.checks.base import same
from deltacompress.adapters.records import EmbeddingLowRank, LowRank
from deltacompress.adapters.settings import AdapterConfig
from deltacompress.adapters.tensors import Brought
from deltacompress.types import TensorInfo

Tensors = Mapping[str, TensorInfo]


def low_rank(brought: Brought, tensors: Tensors, settings: AdapterConfig, outputs: int, inputs: int) -> LowRank:
    """A, B and what comes with them, of a linear of this size.

    Raises:
        ValueError: one is missing, or does not fit.
    """
    module, roles = brought.module, brought.roles
    need(brought, settings)
    rank = settings.rank_of(module)
    if rank < 1:
        raise ValueError(f"module {module} has A and B, but its rank is {rank}")
    _agree(module, tensors[roles["A"]], tensors[roles["B"]], rank)
    wanted = {"A": (rank, inputs), "B": (outputs, rank), "B bias": (outputs,), "magnitude": (outputs,)}
    for role, shape in wanted.items():
        if role in roles:
            same(module, _called(role), tensors[roles[role]], shape)
    if "B bias" in roles and not settings.biased:
        raise ValueError(f"module {module} has a lora_B.bias, but lora_bias is not set")
    if settings.biased and "B bias" not in roles:
        raise ValueError(f"module {module} has no lora_B.bias, but lora_bias is set")
    scale = settings.scale_of(module)
    return LowRank(roles["A"], roles["B"], rank, scale, bias=roles.get("B bias"), magnitude=roles.get("magnitude"))


def embedding(brought: Brought, tensors: Tensors, settings: AdapterConfig, rows: int, columns: int) -> EmbeddingLowRank:
    """A, B and magnitude of an embedding [rows, columns]; raises as `low_rank`."""
    module, roles = brought.module, brought.roles
    need(brought, settings)
    rank = settings.rank_of(module)
    _agree(module, tensors[roles["embedding A"]], tensors[roles["embedding B"]], rank)
    wanted = {"embedding A": (rank, rows), "embedding B": (columns, rank), "magnitude": (columns,)}
    for role, shape in wanted.items():
        if role in roles:
            same(module, _called(role), tensors[roles[role]], shape)
    return EmbeddingLowRank(
        roles["embedding A"], roles["embedding B"], rank, settings.scale_of(module), magnitude=roles.get("magnitude")
    )


def _agree(module: str, a: TensorInfo, b: TensorInfo, rank: int) -> None:
    """Where they are of one rank, it must be that of the config: else it is not the base that they do not fit."""
    if len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] != rank:
        raise ValueError(f"module {module}: A and B are of rank {a.shape[0]}, by the config it is {rank}")


def alone(brought: Brought, tensors: Tensors, settings: AdapterConfig) -> None:
    """What can be known of them without a base; raises ValueError."""
    need(brought, settings)
    of = "embedding " if "embedding A" in brought.roles else ""
    a, b = (tensors[brought.roles[f"{of}{one}"]] for one in "AB")
    _agree(brought.module, a, b, settings.rank_of(brought.module))


def need(brought: Brought, settings: AdapterConfig) -> None:
    """Raises ValueError: A, B or the magnitude is missing, or something else is there."""
    of_embedding = any(role.startswith("embedding") for role in brought.matrices)
    pair = {"embedding A", "embedding B"} if of_embedding else {"A", "B"}
    there = brought.matrices
    allowed = pair | ({"magnitude"} if of_embedding else {"magnitude", "B bias"})
    if not there >= pair or not there <= allowed:
        raise ValueError(f"module {brought.module} has {', '.join(sorted(there))} only; A and B belong together")
    if ("magnitude" in there) != settings.dora:
        has, is_set = ("a", "not ") if "magnitude" in there else ("no", "")
        raise ValueError(f"module {brought.module} has {has} magnitude, but use_dora is {is_set}set")


def _called(role: str) -> str:
    return "the magnitude" if role == "magnitude" else f"lora {role}"
