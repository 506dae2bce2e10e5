"""Small frozen types that the rooms of the package share. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TensorKind = Literal["linear", "embedding", "head", "norm", "bias", "other"]
"""What a checkpoint tensor is in its model; recipes match on it.

linear     weight of a linear layer, or of an expert, in a decoder layer (what has a Hessian of its own, besides head)
embedding  input embedding, rows are tokens
head       output projection, rows are tokens (absent where it is tied to the embedding)
norm       1-D weight of a normalization layer
bias       1-D bias
other      everything else (buffers, position tables, extra heads)
"""


@dataclass(frozen=True, slots=True)
class OddLinears:
    """Linear weights that are not all that others are, by checkpoint name.

    transposed: they lie as [in, out]. unwalked: they have no input of their own, as their module does not run just once
    in a forward. merged: in a model that the library loads they are part of a larger parameter, as experts are.
    stacked: no linears at all, but those of all experts in one tensor.
    """

    transposed: frozenset[str] = frozenset()
    unwalked: frozenset[str] = frozenset()
    merged: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, without its data.

    dtype is the safetensors name ("BF16", "F16", "F32", "I64", ...); nbytes = bytes of the raw data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        n = 1
        for size in self.shape:
            n *= size
        return n
