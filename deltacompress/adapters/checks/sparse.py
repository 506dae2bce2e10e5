"""Entries that SHiRA and RoSA add: how many, and the shapes of what says where; `values` checks what that says."""

from __future__ import annotations

from collections.abc import Mapping

from deltacompress.adapters.checks.base import DoesNotFitError, same
from deltacompress.adapters.records import Sparse
from deltacompress.adapters.settings import AdapterConfig
from deltacompress.adapters.tensors import Brought
from deltacompress.types import TensorInfo

Tensors = Mapping[str, TensorInfo]
_AS_FLOATS = "F32"  # how PEFT saves indices on Windows


def scattered(brought: Brought, tensors: Tensors, settings: AdapterConfig, outputs: int, inputs: int) -> Sparse:
    """SHiRA's, of a linear of this size.

    Raises:
        ValueError: one is missing, or they do not fit.
    """
    module, roles = brought.module, brought.roles
    need(brought)
    count = settings.rank * (outputs + inputs)
    needs = f"the base and r {settings.rank} of the config need"
    same(module, "shira_weight", tensors[roles["values"]], (count,), needs=needs)
    _indices(module, "shira_indices", tensors[roles["indices"]], (2, count), ("I32", "I64", _AS_FLOATS))
    _check_count(module, count, outputs, inputs)
    return Sparse(roles["values"], count, indices=roles["indices"])


def need(brought: Brought) -> None:
    """Raises ValueError: SHiRA's values or indices are missing."""
    if brought.matrices != {"values", "indices"}:
        there = ", ".join(sorted(brought.roles))
        raise ValueError(f"module {brought.module} has {there} only; shira_weight and shira_indices belong together")


def need_compressed(brought: Brought) -> None:
    """Raises ValueError: RoSA's values, or what says where they are, are missing."""
    if not brought.roles.keys() >= {"values", "row offsets", "columns"}:
        there = ", ".join(sorted(brought.matrices))
        raise ValueError(f"module {brought.module} has {there} only; values, row_offs and col_idx belong together")


def compressed(brought: Brought, tensors: Tensors, settings: AdapterConfig, outputs: int, inputs: int) -> Sparse:
    """RoSA's, of a linear of this size; raises as `scattered`."""
    module, roles = brought.module, brought.roles
    need_compressed(brought)
    density = settings.density_of(module)
    count = int(density * (outputs * inputs))
    if not count:
        raise ValueError(f"module {module} has a sparse part, but its density is {density}")
    needs = f"the base and d {density} of the config need"
    same(module, "rosa_spa.values", tensors[roles["values"]], (count,), needs=needs)
    _indices(module, "rosa_spa.row_offs", tensors[roles["row offsets"]], (outputs + 1,), ("I32", "I64"))
    _indices(module, "rosa_spa.col_idx", tensors[roles["columns"]], (count,), ("I16", "I32", "I64"))
    if tensors[roles["columns"]].dtype == "I16" and inputs > 1 << 16:
        raise DoesNotFitError(f"module {module}: 16 bits do not number its {inputs} columns")
    return Sparse(roles["values"], count, row_offsets=roles["row offsets"], columns=roles["columns"])


def _indices(module: str, what: str, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if info.dtype not in dtypes:
        raise ValueError(f"module {module}: {what} has dtype {info.dtype}; read are {', '.join(dtypes)}")
    if info.shape != shape:
        raise DoesNotFitError(f"module {module}: {what} has shape {list(info.shape)}, needed is {list(shape)}")


def _check_count(module: str, count: int, outputs: int, inputs: int) -> None:
    if count > outputs * inputs:
        raise DoesNotFitError(f"module {module}: {count} entries, but the weight has {outputs * inputs}")
