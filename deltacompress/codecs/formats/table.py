"""The formats by name: which tensors are stored in each, and what a manifest must say of one; without torch.

How each decodes is codecs/encoded.py's.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.codecs.formats.spec import AGAIN, PackedSpec, check_shapes
from deltacompress.errors import FormatError

Format = Literal["packed", "low_rank", "exact", "none"]
Shape = tuple[int, ...]


class DeclaredPart(Protocol):
    """A part as a manifest tells it (artifact.records.PartRecord)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


class Declared(Protocol):
    """A tensor as a manifest tells it (artifact.records.TensorRecord)."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def base_rows(self) -> int | None: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def parts(self) -> Sequence[DeclaredPart]: ...


def shared_matrix(tensor: Declared) -> tuple[int, int, tuple[int, ...] | None]:
    """(rows, columns) of the matrix that a lossy tensor is a delta in, and the shape of the rows added to it.

    Where that is the tensor's own transpose, its rows are the tensor's columns.
    """
    return matrix_of(tensor.shape, tensor.base_rows, transposed=tensor.params.get("transposed") == 1)


def matrix_of(shape: Shape, base_rows: int | None, *, transposed: bool) -> tuple[int, int, Shape | None]:
    """As shared_matrix, of a tensor of this shape."""
    first, *rest = shape or (1,)
    shared = first if base_rows is None else base_rows
    added = (first - shared, *rest) if shared < first else None
    if transposed and len(rest) == 1:
        return rest[0], shared, added
    return (1, shared, added) if len(shape) < 2 else (shared, math.prod(rest), added)


def _check_exact(tensor: Declared, at: str, *, storage: bool) -> None:
    wanted = ("planes", "U8", (ITEMSIZE[tensor.dtype], math.prod(tensor.shape)))
    if [(part.name, part.dtype, part.shape) for part in tensor.parts] != [wanted]:
        raise FormatError(f"the exact format has one part, planes, U8 {list(wanted[2])}", where=at, way_out=AGAIN)


def _check_packed(tensor: Declared, at: str, *, storage: bool) -> None:
    """Rows and columns against the tensor's shape, and the parts against both."""
    spec = PackedSpec.from_json(dict(tensor.params), at)
    parts = tuple((part.name, part.dtype, part.shape) for part in tensor.parts)
    try:
        _check_packed_as(spec, tensor.dtype, tensor.shape, tensor.base_rows, parts, storage)
    except FormatError as error:
        raise error.retold(FormatError, within=at) from error


@lru_cache(maxsize=256)
def _check_packed_as(
    spec: PackedSpec, dtype: str, shape: Shape, base_rows: int | None, found: tuple[tuple[str, str, Shape], ...],
    storage: bool,
) -> None:  # fmt: skip
    """As _check_packed, which names the tensor; most of a model are declared as others are."""
    parts = {name: (kind, sizes) for name, kind, sizes in found}
    check_shapes(spec, parts, storage=storage, where=None)
    rows, columns, added = matrix_of(shape, base_rows, transposed=spec.transposed)
    mask = parts.get("row_mask", ("U8", (-(-rows // 8),)))
    stored_all = spec.rows == rows if "row_mask" not in parts else spec.rows < rows
    misplaced = spec.transposed and len(shape) != 2
    if misplaced or not stored_all or spec.columns != columns or mask != ("U8", (-(-rows // 8),)):
        told = f"{spec.rows} x {spec.columns} are stored of {list(shape)}, base rows {base_rows}"
        raise FormatError(f"{told}: these do not fit", way_out=AGAIN)
    if parts.get("added_rows") != ((dtype, added) if added else None):
        raise FormatError(f"added_rows should be {(list(added) if added else 'absent')}", way_out=AGAIN)


def _check_low_rank(tensor: Declared, at: str, *, storage: bool) -> None:
    """Both factors against the tensor's shape."""
    rows, columns, added = shared_matrix(tensor)
    rank = tensor.params.get("rank")
    if len(tensor.params) != 1 or type(rank) is not int or not 1 <= rank <= min(rows, columns):
        told = f"parameters {reprlib.repr(tensor.params)}, not a rank of a matrix of {rows} x {columns}"
        raise FormatError(told, where=at, way_out=AGAIN)
    wanted: list[tuple[str, str, tuple[int, ...]]] = [("left", "F16", (rows, rank)), ("right", "F16", (rank, columns))]
    if added:
        wanted.insert(0, ("added_rows", tensor.dtype, added))
    if [(part.name, part.dtype, part.shape) for part in tensor.parts] != wanted:
        told = f"the low_rank format has these parts: {', '.join(f'{name} {list(shape)}' for name, _, shape in wanted)}"
        raise FormatError(told, where=at, way_out=AGAIN)


@dataclass(frozen=True, slots=True)
class FormatRules:
    """What may be stored in a format, and how people are told of it.

    statuses: what may have become of a tensor that is stored so. check: (tensor, where, storage=whether parts are in
    the storage layout) raises FormatError where its parts do not fit it; None where it has none. label: what `inspect`
    adds to the codec's name, a template of the parameters. shared_rows: whether it holds only the rows that a tensor
    shares with its base; others go into a part added_rows.
    """

    statuses: frozenset[str]
    check: Callable[..., None] | None = None
    label: str = ""
    shared_rows: bool = False


FORMATS: dict[Format, FormatRules] = {
    "packed": FormatRules(frozenset({"coded"}), _check_packed, "{sparsity} int{bits}", shared_rows=True),
    "low_rank": FormatRules(frozenset({"coded"}), _check_low_rank, "rank {rank}", shared_rows=True),
    "exact": FormatRules(frozenset({"exact", "added"}), _check_exact),
    "none": FormatRules(frozenset({"coded", "identical", "alias"})),
}
