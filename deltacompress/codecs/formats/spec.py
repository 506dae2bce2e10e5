"""What a packed tensor's parts must be: PackedSpec, as a manifest says it, and the dtype and shape of each part.

All of it is arithmetic on integers that a file declares, without torch, so every verb does it before it reads a part.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, get_args

from deltacompress.errors import FormatError
from deltacompress.numerics.bits.widths import STORED_BITS, GridKind, packed_width
from deltacompress.numerics.sparsity import Sparsity

FREE: Final = -1
AGAIN = "copy the artifact again"
_MAX_GROUP = 1 << 48  # of any number of columns; so that no sum of it leaves 64 bits
_TWO_OF_FOUR = Sparsity("n:m", 2, 4)
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Part -> safetensors dtype and shape; FREE stands for a length that depends on the data."""


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """How to read the parts of one tensor.

    rows: the stored rows, all of them unless row_mask says otherwise. transposed: whether rows and columns are those of
    the linear layer, [out, in], while the tensor lies as [in, out] (GPT-2's Conv1D). masked: whether dense codes are
    rearranged into a mask of the weights that are not zero, and the codes of those. seed: of a drawn pattern. first:
    row and column of the matrix that a piece of it begins at, which its share of a drawn pattern depends on.
    """

    rows: int
    columns: int
    bits: int
    sparsity: Sparsity
    group: int
    grid: GridKind
    transposed: bool = False
    masked: bool = False
    seed: int = 0
    first: tuple[int, int] = (0, 0)

    def to_json(self) -> dict[str, Any]:
        """The `params` of the manifest."""
        more = {"transposed": 1} if self.transposed else {}
        more |= {"masked": 1} if self.masked else {}
        more |= {"seed": self.seed} if self.sparsity.kind == "drawn" else {}
        return {"bits": self.bits, "sparsity": str(self.sparsity), "group_size": self.group, "grid": self.grid,
                "rows": self.rows, "columns": self.columns} | more  # fmt: skip

    @classmethod
    def from_json(cls, params: dict[str, Any], where: str) -> PackedSpec:
        """Inverse of to_json, checked.

        Raises:
            FormatError: a field is missing, unknown or out of range.
        """
        try:
            spec, sane = _spec(tuple(params.items()))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"bad parameters of the packed format ({error})", where=where, way_out=AGAIN) from error
        if not sane or float in map(type, params.values()):  # 2.0 equals 2, and is another spelling
            told = f"parameters of the packed format out of range: {reprlib.repr(params)}"
            raise FormatError(told, where=where, way_out=AGAIN)
        return spec

    @property
    def groups(self) -> int:
        """Column groups that have a scale of their own."""
        return -(-self.columns // self.group)

    @property
    def padded(self) -> int:
        """Columns up to a whole number of n:m groups; the extra ones are never kept weights with a value."""
        return -(-self.columns // self.sparsity.m) * self.sparsity.m if self.sparsity.m else self.columns

    @property
    def kept(self) -> int:
        """Weights kept in each row: of a dense, n:m or drawn pattern."""
        return self.padded * self.sparsity.n // self.sparsity.m if self.sparsity.m else self.columns

    @property
    def is_24(self) -> bool:
        """Whether the pattern is stored as 2-bit positions."""
        return self.sparsity == _TWO_OF_FOUR

    @property
    def has_zero_code(self) -> bool:
        """Whether some code means exactly zero (so that a kept zero can be told from others)."""
        return self.bits != 16 and self.grid != "midrise"

    @property
    def has_storage_layout(self) -> bool:
        """Whether the parts are rearranged for an entropy coder that follows."""
        if self.sparsity.kind == "dense":
            return self.has_zero_code or self.bits == 3
        return self.is_24 and self.has_zero_code


@lru_cache(maxsize=256)
def _spec(params: tuple[tuple[str, Any], ...]) -> tuple[PackedSpec, bool]:
    """What the parameters say, and whether they may say it; most tensors of a model share theirs with others."""
    fields = dict(params)
    spec = PackedSpec(
        rows=int(fields["rows"]),
        columns=int(fields["columns"]),
        bits=int(fields["bits"]),
        sparsity=Sparsity.parse(fields["sparsity"]),
        group=int(fields["group_size"]),
        grid=fields["grid"],
        transposed=fields.get("transposed") == 1,
        masked=fields.get("masked") == 1,
        seed=int(fields.get("seed", 0)),
    )
    sane = spec.rows >= 0 and spec.columns > 0 and 0 < spec.group <= _MAX_GROUP and spec.bits in (1, 2, 3, 4, 8, 16)
    sane = sane and (not spec.masked or (spec.sparsity.kind == "dense" and spec.has_zero_code))
    sane = sane and (spec.sparsity.kind != "drawn" or (spec.bits == 1 and 0 <= spec.seed < 1 << 32))
    return spec, sane and spec.grid in get_args(GridKind) and spec.to_json() == fields


def check_shapes(
    spec: PackedSpec, parts: Mapping[str, tuple[str, tuple[int, ...]]], *, storage: bool, where: str | None
) -> None:
    """Make sure that dtypes and shapes of parts (of the storage or the serving layout) are those that `spec` means.

    Raises:
        FormatError: a part is missing, not of this format, or has another dtype or shape.
    """
    shapes = part_shapes(spec, storage=storage)
    extra = {"row_mask", "added_rows"}  # of any packed tensor; they must fit the whole tensor, which is not known here
    if odd := (shapes.keys() - parts.keys()) | (parts.keys() - shapes.keys() - extra):
        raise FormatError(
            f"part {min(odd)} is missing or does not belong to {spec.to_json()}", where=where, way_out=AGAIN
        )
    for name, (dtype, shape) in shapes.items():
        found, sizes = parts[name]
        free = sizes[0] if shape == (FREE,) and len(sizes) == 1 and sizes[0] <= _most(spec, name) else FREE
        if found != dtype or sizes != tuple(free if size == FREE else size for size in shape):
            told = f"part {name} is {found} {list(sizes)}, expected {dtype} {list(shape)}"
            raise FormatError(told, where=where, way_out=AGAIN)


def part_shapes(spec: PackedSpec, *, storage: bool) -> Shapes:
    """dtype and shape that each part must have."""
    rows = spec.rows
    shapes: Shapes = {}
    if spec.bits != 16:
        shapes["scales"] = ("BF16", (rows, spec.groups))
        if spec.grid == "minmax":
            shapes["zeros"] = ("U8", (rows, spec.groups))
    if storage and spec.has_storage_layout:
        if spec.sparsity.kind == "dense" and not spec.masked:
            shapes["symbols"] = ("U8", (rows, packed_width(spec.columns, STORED_BITS[spec.bits])))
        elif spec.bits == 2 and not spec.masked:
            shapes["symbols"] = ("U8", (rows, spec.padded // 4))
        else:
            shapes["groups"] = ("U8", (rows, packed_width(spec.padded, 1)))
            shapes["nonzero"] = ("U8", (FREE,))
        return shapes
    values, dtype = ("values", "BF16") if spec.bits == 16 else ("codes", "U8")
    if spec.sparsity.kind == "unstructured":
        shapes[values] = (dtype, (FREE,))
    else:
        shapes[values] = (dtype, (rows, spec.kept if spec.bits == 16 else packed_width(spec.kept, spec.bits)))
    if spec.sparsity.kind not in ("dense", "drawn"):
        width = packed_width(spec.padded // 4, 4) if spec.is_24 else packed_width(spec.padded, 1)
        shapes["pattern"] = ("U8", (rows, width))
    return shapes


def largest_shapes(spec: PackedSpec, *, storage: bool) -> Shapes:
    """As part_shapes, with the most that a length can be which depends on the data."""
    return {
        name: (dtype, (_most(spec, name),) if shape == (FREE,) else shape)
        for name, (dtype, shape) in part_shapes(spec, storage=storage).items()
    }


def _most(spec: PackedSpec, name: str) -> int:
    """The most elements that a part of a free length can have."""
    if name == "nonzero":
        return packed_width(spec.rows * spec.kept, STORED_BITS[spec.bits])
    return spec.rows * (spec.columns if name == "values" else packed_width(spec.columns, spec.bits))
