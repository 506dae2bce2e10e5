"""What a lossy codec sees of a tensor, what every codec returns, and what undoes them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltacompress.checkpoints.rows import Elements
from deltacompress.codecs.formats import exact, low_rank, packed, pieces
from deltacompress.codecs.formats.packed import Parts
from deltacompress.codecs.formats.pieces import Source
from deltacompress.codecs.formats.table import Format
from deltacompress.errors import CheckpointError, FormatError, option
from deltacompress.numerics.bits import packing
from deltacompress.numerics.finite import extremes

_LARGEST = 1e30


@dataclass(frozen=True, slots=True)
class LinearToEncode:
    """One linear of those encoded together: delta and fine-tuned weight f32 [rows, columns], on the solver's device.

    fisher: G of its outputs, f32 [rows, rows] (numerics/coupling.py), where the settings ask for it and it is known.
    energy: tr D H D^T of the delta D, where whoever has it encoded more than once knows it.
    moved: W_ft D f32 [rows, columns] (numerics/hessian.py), where that was summed up in the place of D.
    """

    name: str
    delta: Tensor
    finetuned: Tensor
    fisher: Tensor | None = None
    energy: float | None = None
    moved: Tensor | None = None


class Sums(NamedTuple):
    """Sums over the rows of a linear, in the metric of H: |Q - T|^2, |D|^2, <Q, T> and |T|^2."""

    lost: float
    energy: float
    both: float
    target: float

    @property
    def loss(self) -> float:
        """As Encoded has it: 0 where there is no delta."""
        return max(self.lost, 0.0) / self.energy if self.energy > 0 else 0.0

    @property
    def kept(self) -> float | None:
        """As Encoded has it."""
        known = 0 < self.target < math.inf and math.isfinite(self.both)
        return self.both / self.target if known else None


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded tensor: how it decodes (format, params) and its parts in the serving layout.

    loss: H-weighted squared error against the (possibly shifted) target, relative to tr D H D^T of the delta D
    (obs), squared error with the weights of rows relative to the delta's (counted), or plain squared error (all
    others); None where nothing is lost. damp_fraction: what the factorization needed in the end (obs only). kept:
    the share of the target that is kept on average, tr Q H T^T / tr T H T^T (obs only); None of a target of zeros,
    or whose sums are beyond fp32. sums: what these two come from, where a codec tells it, so that a matrix can be
    encoded some rows at a time. tokens: of an expert, how many calibration tokens went to it.
    """

    format: Format
    params: dict[str, Any]
    parts: dict[str, Tensor]
    loss: float | None = None
    damp_fraction: float | None = None
    kept: float | None = None
    sums: Sums | None = None
    tokens: int | None = None

    @property
    def place(self) -> torch.device:
        """Where its parts are, but for rows that were added."""
        return next((part.device for part in self.parts.values()), torch.device("cpu"))


def delta_rows(finetuned: Elements, base: Elements | None, name: str) -> tuple[Callable[[int, int], Tensor], int, int]:
    """(read, rows, columns) of the delta as a matrix, over the rows that both have; a vector is one row.

    read(begin, end): those rows, f32 [end - begin, columns]; raises as delta_of.
    """
    rows, columns = as_matrix(finetuned.shape if base is None else base.shape)

    def read(begin: int, end: int) -> Tensor:
        some = (begin * columns, end * columns)
        reference = None if base is None else base.read(*some)
        return delta_of(finetuned.read(*some), reference, name).view(end - begin, columns)

    return read, rows, columns


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a tensor as a matrix; a vector is one row."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def delta_of(finetuned: Tensor, reference: Tensor | None, name: str) -> Tensor:
    """w_ft - w_base in f32, over the rows that both have; of finite weights.

    Raises:
        CheckpointError: it is so large that sums of it are beyond fp32.
    """
    delta = (finetuned if reference is None or not finetuned.dim() else finetuned[: reference.shape[0]]).float()
    if reference is not None:
        delta = delta - reference
    if delta.numel() and not bool(extremes(delta).abs().max() <= _LARGEST):  # NaN compares as false
        raise CheckpointError(
            f"weights, or their differences from the base's, are beyond {_LARGEST:g}",
            where=f"tensor {name}",
            way_out=f"get the checkpoints again, or use {option('recipe')} lossless, which keeps any bits",
        )
    return delta


def restore_tensor(
    format_: str, params: dict[str, Any], parts: dict[str, Tensor], base: Tensor | None, like: Tensor, where: str
) -> Tensor:
    """The restored tensor: base + decoded delta (coded), or the bits of the fine-tuned tensor (exact).

    Args:
        format_, params, parts: as in Encoded, parts in the serving layout.
        base: f32 (or the tensor's own dtype, for dtypes that only `exact` takes), the shared rows; None = no base.
        like: empty tensor with the restored dtype and shape (may be on the meta device).
        where: tensor name for messages.

    Raises:
        FormatError: parts or parameters that do not fit the tensor.
    """
    return _decoder(format_, where).restore(params, parts, base, like, where)


def restore_pieces(
    format_: str,
    params: dict[str, Any],
    sources: Mapping[str, Source],
    base: Elements | None,
    like: Tensor,
    where: str,
    *,
    storage: bool,
) -> Iterator[Tensor]:
    """What restore_tensor gives, flat and piece by piece; of parts whose shapes fit the tensor.

    base: the rows that the tensor shares with its base, as restore_tensor takes them; storage: whether packed parts are
    in the storage layout.

    Raises:
        FormatError: the parts do not fit each other.
    """
    yield from _decoder(format_, where).pieces(params, sources, base, like, where, storage=storage)


def check_pieces(
    format_: str, params: dict[str, Any], sources: Mapping[str, Source], rows: int, where: str, *, storage: bool
) -> None:
    """Make sure that the parts decode, as far as that can be told without base and values; as restore_pieces.

    rows: of the tensor, those that it shares with its base.
    """
    if check := _decoder(format_, where).check:
        check(params, sources, rows, where, storage=storage)


def _decoder(name: str, where: str) -> Decoder:
    if name not in DECODERS:
        raise FormatError(f"unknown format {name!r}", where=where)
    return DECODERS[name]


def _base(params: dict[str, Any], parts: Parts, base: Tensor | None, like: Tensor, where: str) -> Tensor:
    if base is None or base.shape != like.shape:
        raise FormatError("stored without parts, but the base has no such tensor", where=where)
    return base.to(like.dtype)


def _packed(params: dict[str, Any], parts: Parts, base: Tensor | None, like: Tensor, where: str) -> Tensor:
    spec = packed.PackedSpec.from_json(params, where)
    packed.check_parts(spec, parts, storage=False, where=where)
    shape = like.shape if base is None else base.shape
    try:
        delta = packed.decode(spec, parts)
        if (row_mask := parts.get("row_mask")) is not None:
            whole = shape[1] if spec.transposed else shape[0]
            delta = _spread_rows(delta, row_mask, whole if len(shape) > 1 else 1)
    except torch.OutOfMemoryError:  # a RuntimeError, and no fault of theirs
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        raise FormatError(f"the parts do not decode ({error})", where=where) from error
    if delta.numel() != shape.numel() or (spec.transposed and tuple(shape) != (delta.shape[1], delta.shape[0])):
        raise FormatError(f"decodes to {tuple(delta.shape)}, expected {tuple(shape)}", where=where)
    return _with_base(delta.t() if spec.transposed else delta, parts, base, like, where)


def _low_rank(params: dict[str, Any], parts: Parts, base: Tensor | None, like: Tensor, where: str) -> Tensor:
    rows, columns = as_matrix(tuple(like.shape if base is None else base.shape))
    return _with_base(low_rank.decode(params, parts, rows, columns, where), parts, base, like, where)


def _with_base(delta: Tensor, parts: Parts, base: Tensor | None, like: Tensor, where: str) -> Tensor:
    """The restored tensor from the delta of the shared rows (which is used up) and the rows added to them."""
    shape = like.shape if base is None else base.shape
    delta = delta.reshape(shape)
    if base is not None:
        delta.add_(base)
    restored = delta.to(like.dtype)
    if (added := parts.get("added_rows")) is not None:
        if added.dtype != like.dtype or added.dim() != len(shape) or added.shape[1:] != shape[1:]:
            raise FormatError(f"added_rows {tuple(added.shape)} do not continue {tuple(shape)}", where=where)
        restored = torch.cat([restored, added])
    if restored.shape != like.shape:
        raise FormatError(f"decodes to {tuple(restored.shape)}, expected {tuple(like.shape)}", where=where)
    return restored


def _spread_rows(stored: Tensor, row_mask: Tensor, rows: int) -> Tensor:
    bits = packing.unpack_codes(row_mask.unsqueeze(0), 1, rows).squeeze(0).bool()
    if int(bits.sum()) != stored.shape[0]:
        raise ValueError(f"row_mask names {int(bits.sum())} rows, {stored.shape[0]} are stored")
    out = torch.zeros(rows, stored.shape[1], device=stored.device)
    out[bits] = stored
    return out


@dataclass(frozen=True, slots=True)
class Decoder:
    """How parts decode: as restore_tensor, restore_pieces and check_pieces (None: any parts of the right shapes do)."""

    restore: Callable[[dict[str, Any], Parts, Tensor | None, Tensor, str], Tensor]
    pieces: Callable[..., Iterator[Tensor]]
    check: Callable[..., None] | None = None


DECODERS: dict[str, Decoder] = {
    "packed": Decoder(_packed, pieces.packed_pieces, pieces.check_packed),
    "low_rank": Decoder(_low_rank, low_rank.pieces, low_rank.check),
    "exact": Decoder(exact.decode, exact.pieces),
    "none": Decoder(_base, pieces.base_pieces),
}
"""Of each format of formats/table.py."""
