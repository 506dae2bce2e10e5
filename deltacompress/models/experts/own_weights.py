"""A mixture's experts as its checkpoint holds them: a matrix each, where the library's modules hold one of all experts.

The library says by its conversion mapping which tensors of a checkpoint it merges into which parameter. Here that is
undone in the model: the parameter gives way to one for each tensor, so that each has a name, a shape and a place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from deltacompress.errors import CheckpointError
from deltacompress.files.places import CONFIG
from deltacompress.models.config import unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_experts(module: nn.Module) -> bool:
    """Whether a module's forward is one of the library's experts functions."""
    return all(isinstance(getattr(module, name, None), bool) for name in ("has_gate", "is_transposed"))


class OwnWeights(nn.Module):
    """In the place of a parameter [experts, parts * out, in]: `experts` times `parts` matrices [out, in]."""

    def __init__(self, fused: Tensor, parts: int) -> None:
        super().__init__()
        self._parts = parts
        experts, rows, columns = fused.shape
        for name in (f"{part}_{expert}" for expert in range(experts) for part in range(parts)):
            empty = torch.empty(rows // parts, columns, dtype=fused.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @staticmethod
    def expert_of(parameter: str) -> int:
        """Whose matrix a parameter is (part of)."""
        return int(parameter.split("_")[1])

    def parts_of(self, expert: int) -> list[Tensor]:
        """What an expert's matrix is made of, from its first row to its last."""
        return [self.get_parameter(f"{part}_{expert}") for part in range(self._parts)]


def take_apart(
    model: PreTrainedModel, merged: Mapping[str, Mapping[str, str]], converters: list[WeightConverter], where: Path
) -> dict[str, str]:
    """Give each of these tensors of a checkpoint a parameter of its own; returns that one's name for each.

    merged: parameter -> of each tensor that the library makes it of, the pattern by which it does.

    Raises:
        UnsupportedModelError: the library does more than stacking experts and putting their parts one below the other,
            or the module is none of experts that `forward` can run.
        CheckpointError: more experts, or less, than config.json says.
    """
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, str] = {}
    for target, patterns in merged.items():
        converter = by_pattern[next(iter(patterns.values()))]
        path, _, attribute = target.rpartition(".")
        experts = model.get_submodule(path)
        fused = getattr(experts, attribute)
        parts = len(converter.source_patterns)
        if not (is_experts(experts) and _stacks(converter) and fused.ndim == 3 and fused.shape[1] % parts == 0):
            told = ", ".join(type(one).__name__ for one in converter.operations)
            raise unsupported(where, f"{target} is made of tensors that transformers converts ({told})")
        setattr(experts, attribute, None)
        delattr(experts, attribute)
        setattr(experts, attribute, OwnWeights(fused, parts))
        numbered = _numbered(patterns, fused.shape[0], where)
        for name, expert in numbered.items():
            found[name] = f"{target}.{converter.source_patterns.index(patterns[name])}_{expert}"
    return found


def _stacks(converter: WeightConverter) -> bool:
    """Whether it puts experts side by side, and of each expert first all rows of the first tensor, then the next's."""
    shape = [(type(one), one.dim) for one in converter.operations if isinstance(one, MergeModulelist | Concatenate)]
    wanted: list[tuple[type, int]] = [(MergeModulelist, 0), (Concatenate, 1)]
    if len(shape) != len(converter.operations) or len(converter.target_patterns) != 1:
        return False
    return shape == (wanted if len(converter.source_patterns) > 1 else wanted[:1])


def _numbered(patterns: Mapping[str, str], experts: int, where: Path) -> dict[str, int]:
    """Which expert each of these tensors is of, by the last number in its name."""
    numbers = {name: int([part for part in name.split(".") if part.isdigit()][-1]) for name in patterns}
    by_pattern: dict[str, set[int]] = defaultdict(set)
    for name, pattern in patterns.items():
        by_pattern[pattern].add(numbers[name])
    for pattern, found in by_pattern.items():
        if found != set(range(experts)):
            one = min(name for name in patterns if patterns[name] == pattern)
            told = f"{len(found)} tensors like {one!r}, but config.json says that there are {experts} experts"
            raise CheckpointError(told, where=where, way_out=f"get the {CONFIG} that came with the weights")
    return numbers
