"""What an adapter brings for one module of its base, part by part; texts are names of tensors in its file.

W [out, in] is the base's weight, or the whole one that the adapter brings; W' is what comes out. docs/adapters.md puts
the parts together. Of each, only names of tensors, sizes and numbers of the config are kept here; `values` reads what
the tensors hold.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA of a linear: W' = W + scale * B A; with a magnitude, DoRA.

    A: [rank, in]; B: [out, rank]; bias: of B, [out], which adds scale * bias to the output; magnitude: [out], m of
    W' = (m / norm(W + scale * B A)) * (W + scale * B A), the norm of each row (over in).
    """

    A: str
    B: str
    rank: int
    scale: float
    bias: str | None = None
    magnitude: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingLowRank:
    """LoRA of an embedding E [rows, dim]: E' = E + scale * (B A)^T; with a magnitude, DoRA.

    A: [rank, rows]; B: [dim, rank]; magnitude: [dim], m of E' = (m / norm) * (E + scale * (B A)^T), the norm of each
    column (over all rows).
    """

    A: str
    B: str
    rank: int
    scale: float
    magnitude: str | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """BOFT of a linear: W' = s * (W R^T), R the product of the butterfly factors: (x R) goes through W.

    R: [factors, in / block, block, block], of which the skew-symmetric part (Q - Q^T) / 2 is put through Cayley's
    transform; s: [out, 1], which scales the product and not the bias.
    """

    R: str
    s: str
    factors: int
    block: int


@dataclass(frozen=True, slots=True)
class Sparse:
    """Single entries that are added to the weight: W' = W + S. S has no scale: PEFT's of SHiRA is 1, RoSA has none.

    values: [count]. Where they are added: indices [2, count], rows and then columns, in any order (SHiRA); or
    row_offsets [out + 1] and columns [count] (RoSA: compressed rows, columns as 16 bits that are meant unsigned).
    `values.entries` reads either as checked rows and columns.
    """

    values: str
    count: int
    indices: str | None = None
    row_offsets: str | None = None
    columns: str | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """Tensors that take the place of the base's; other parts of the module go on top of them.

    weight: as the base stores it; of an embedding or head it may have more rows. bias: [out].
    """

    weight: str | None = None
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows that take the place of an embedding's or head's: row indices[i] becomes row i of `values` [indices, dim].

    Of an embedding whose base ties its head to it, the head's rows too (unless the head brings its own).
    """

    indices: tuple[int, ...]
    values: str


@dataclass(frozen=True, slots=True)
class Change:
    """All that an adapter brings for one module.

    module: as the model calls it ("model.layers.0.self_attn.q_proj"); tensor: what the base's file calls its weight
    ("" where it has none, and the adapter brings a bias only); shape: that weight's, as stored, with the rows that
    `whole` has; transposed: the config says that the base stores it as [in, out] (fan_in_fan_out).
    Of low_rank, embedding, rotation and sparse, only low_rank and sparse occur together (RoSA).
    """

    module: str
    tensor: str
    shape: tuple[int, ...]
    transposed: bool = False
    low_rank: LowRank | None = None
    embedding: EmbeddingLowRank | None = None
    rotation: Rotation | None = None
    sparse: Sparse | None = None
    whole: Whole | None = None
    rows: TokenRows | None = None

    @property
    def outputs(self) -> int:
        """Rows of W in y = W x; of an embedding, its dimension."""
        if self.embedding is not None:
            return self.shape[1]
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def inputs(self) -> int:
        """Columns of W in y = W x; of an embedding, its rows."""
        if self.embedding is not None:
            return self.shape[0]
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all its tensors, in the order of the fields."""
        parts = (self.low_rank, self.embedding, self.rotation, self.sparse, self.whole, self.rows)
        found: list[str] = []
        for part in parts:
            if part is not None:
                found += [text for name in type(part).__slots__ if isinstance(text := getattr(part, name), str)]
        return tuple(found)
