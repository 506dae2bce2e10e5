"""A and B of LoRA and RoSA, magnitudes of DoRA: of a linear, and of an embedding."""

from __future__ import annotations

from collections.abc import Mapping

from deltacompress.adapters.checks.base import same
from deltacompress.adapters.records import EmbeddingLowRank, LowRank
from deltacompress.adapters.settings import AdapterConfig
from deltacompress.adapters.tensors import TWICE, Brought
from deltacompress.types import TensorInfo

Tensors = Mapping[str, TensorInfo]


def low_rank(brought: Brought, tensors: Tensors, settings: AdapterConfig, outputs: int, inputs: int) -> LowRank:
    """A, B and what comes with them, of a linear of this size.

    Raises:
        ValueError: one is missing, or does not fit.
    """
    module, roles, rank = brought.module, brought.roles, settings.rank_of(brought.module)
    alone(brought, tensors, settings)
    wanted = {"A": (rank, inputs), "B": (outputs, rank), "B bias": (outputs,), "magnitude": (outputs,)}
    for role, shape in wanted.items():
        if role in roles:
            same(module, _called(role), tensors[roles[role]], shape)
    scale = settings.scale_of(module)
    return LowRank(roles["A"], roles["B"], rank, scale, bias=roles.get("B bias"), magnitude=roles.get("magnitude"))


def embedding(brought: Brought, tensors: Tensors, settings: AdapterConfig, rows: int, columns: int) -> EmbeddingLowRank:
    """A, B and magnitude of an embedding [rows, columns]; raises as `low_rank`."""
    module, roles, rank = brought.module, brought.roles, settings.rank_of(brought.module)
    alone(brought, tensors, settings)
    wanted = {"embedding A": (rank, rows), "embedding B": (columns, rank), "magnitude": (columns,)}
    for role, shape in wanted.items():
        if role in roles:
            same(module, _called(role), tensors[roles[role]], shape)
    return EmbeddingLowRank(
        roles["embedding A"], roles["embedding B"], rank, settings.scale_of(module), magnitude=roles.get("magnitude")
    )


def alone(brought: Brought, tensors: Tensors, settings: AdapterConfig) -> None:
    """What can be known of them without a base; raises ValueError: one is missing, or is not as the config says."""
    module, roles, rank = brought.module, brought.roles, settings.rank_of(brought.module)
    _need(brought, settings)
    if rank < 1:
        raise ValueError(f"module {module} has A and B, but its rank is {rank}")
    of = "embedding " if "embedding A" in roles else ""
    a, b = (tensors[roles[f"{of}{one}"]].shape for one in "AB")
    if len(a) == len(b) == 2 and (a[0], b[1]) != (rank, rank):  # else it is not the base that they do not fit
        told = f"A and B are of rank {a[0]}" if a[0] == b[1] else f"A is of rank {a[0]}, B of {b[1]}"
        raise ValueError(f"module {module}: {told}, by the config it is {rank}")
    if TWICE in roles:
        one, two = (tensors[roles[role]] for role in ("magnitude", TWICE))
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            raise ValueError(f"tensors {one.name} and {two.name} are both the magnitude of {module}, and not alike")
    if "B bias" in roles and not settings.biased:
        raise ValueError(f"module {module} has a lora_B.bias, but lora_bias is not set")
    if settings.biased and not of and "B bias" not in roles:
        raise ValueError(f"module {module} has no lora_B.bias, but lora_bias is set")


def _need(brought: Brought, settings: AdapterConfig) -> None:
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
