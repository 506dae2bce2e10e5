"""What every codec returns, and the one function that undoes them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deltacompress.codecs import exact, packed
from deltacompress.errors import FormatError
from deltacompress.numerics.bits import packing

Format = Literal["packed", "exact", "none"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded tensor: how it decodes (format, params) and its parts in the serving layout.

    loss: H-weighted squared error against the (possibly shifted) target, relative to tr D H D^T of the delta D (obs),
    or plain squared error relative to the delta's (rtn); None where nothing is lost. damp_fraction: what the
    factorization needed in the end (obs only).
    """

    format: Format
    params: dict[str, Any]
    parts: dict[str, Tensor]
    loss: float | None = None
    damp_fraction: float | None = None


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
    if format_ == "exact":
        return exact.decode(params, parts, base, like, where)
    if format_ == "none":
        if base is None or base.shape != like.shape:
            raise FormatError("stored without parts, but the base has no such tensor", where=where)
        return base.to(like.dtype)
    if format_ != "packed":
        raise FormatError(f"unknown format {format_!r}", where=where)
    spec = packed.PackedSpec.from_json(params, where)
    packed.check_parts(spec, parts, storage=False, where=where)
    shape = like.shape if base is None else base.shape
    try:
        delta = packed.decode(spec, parts)
        if (row_mask := parts.get("row_mask")) is not None:
            delta = _spread_rows(delta, row_mask, shape[0] if len(shape) > 1 else 1)
    except (ValueError, RuntimeError, IndexError) as error:
        raise FormatError(f"the parts do not decode ({error})", where=where) from error
    if delta.numel() != shape.numel():
        raise FormatError(f"decodes to {tuple(delta.shape)}, expected {tuple(shape)}", where=where)
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
