"""How many bytes a plan comes to: from the formats alone before the lossless stage, by samples after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.checkpoints.names import kind_of
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.rows import InMemory, Rows
from deltacompress.codecs import bitdelta, counted, rtn
from deltacompress.codecs.encoded import Encoded, as_matrix, delta_rows
from deltacompress.codecs.formats import exact, packed
from deltacompress.codecs.settings import BitDeltaSettings, CountedSettings, ObsSettings, Quantizing, RtnSettings
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.lossless import Coder
from deltacompress.types import TensorKind

_TENSORS, _WEIGHTS = 4, 1 << 18
"""How many tensors of a kind are sampled, and how many weights of each."""
_MANIFEST = 1200
"""What manifest and headers hold of a tensor, about."""


@dataclass(frozen=True, slots=True)
class Share:
    """Tensors of one kind that are treated alike.

    stored_bytes: before the lossless stage, None: nobody knows; at_most: whether the data may need fewer.
    expected_bytes: after it, by samples; None: not estimated.
    """

    kind: TensorKind
    treatment: str
    codec: str
    format: str
    tensors: int
    weights: int
    full_bytes: int
    stored_bytes: int | None
    at_most: bool
    expected_bytes: int | None


def shares(plan: Plan, coder: Coder) -> list[Share]:
    """Every tensor of the plan, in as few rows as tell what becomes of each."""
    groups: dict[tuple[TensorKind, str, str, str], list[TensorPlan]] = {}
    for tensor in plan.tensors.values():
        kind = tensor.kind if plan.recipe.needs_kinds else kind_of(tensor.name, tensor.pair.info.shape)
        groups.setdefault((kind, tensor.treatment, _codec(tensor), _format(tensor)), []).append(tensor)
    return [_share(plan, key, tensors, coder) for key, tensors in sorted(groups.items())]


def _share(plan: Plan, key: tuple[TensorKind, str, str, str], tensors: Sequence[TensorPlan], coder: Coder) -> Share:
    storage = coder.codec != "none"
    stored = [stored_bytes(plan, tensor, storage=storage) for tensor in tensors]
    known = None if None in stored else sum(one for one in stored if one is not None)
    weights = sum(tensor.pair.info.numel for tensor in tensors)
    expected = known if not storage or not known else _expected(plan, tensors, weights, coder)
    full = sum(tensor.pair.info.nbytes for tensor in tensors)
    at_most = any(_depends_on_data(plan, tensor, storage=storage) for tensor in tensors)
    return Share(*key, len(tensors), weights, full, known, at_most, expected)


def stored_bytes(plan: Plan, tensor: TensorPlan, *, storage: bool) -> int | None:
    """Bytes of the parts of a tensor before the lossless stage, the most that they can be; None: nobody knows.

    storage: whether one follows, for which codes are rearranged.
    """
    info = tensor.pair.info
    if tensor.treatment in ("identical", "alias"):
        return 0
    if tensor.treatment != "code":
        return info.nbytes
    rows, columns = tensor.matrix(plan.recipe.scope)
    shapes = tensor.settings.stored_shapes(rows, columns, storage=storage)
    if shapes is None:
        return None
    parts = sum(ITEMSIZE[dtype] * math.prod(shape) for dtype, shape in shapes.values())
    left_out = isinstance(tensor.settings, RtnSettings | CountedSettings)  # rows of zeros
    mask = -(-rows // 8) if left_out else 0
    return parts + mask + (_added_rows(plan, tensor) if shapes else 0)


def _added_rows(plan: Plan, tensor: TensorPlan) -> int:
    """Bytes of the rows that the base does not have, which are stored as they are."""
    info, shared = tensor.pair.info, tensor.pair.base_rows
    if shared is None or plan.recipe.scope == "full":
        return 0
    return info.nbytes // info.shape[0] * (info.shape[0] - shared)


def _depends_on_data(plan: Plan, tensor: TensorPlan, *, storage: bool) -> bool:
    if tensor.treatment != "code" or not isinstance(tensor.settings, Quantizing | CountedSettings):
        return False
    if not isinstance(tensor.settings, ObsSettings) or tensor.settings.pattern.kind == "unstructured":
        return True
    rows, columns = tensor.matrix(plan.recipe.scope)
    return "nonzero" in (tensor.settings.stored_shapes(rows, columns, storage=storage) or {})


def _codec(tensor: TensorPlan) -> str:
    return tensor.settings.codec if tensor.treatment in ("code", "exact", "added") else "-"


def _format(tensor: TensorPlan) -> str:
    """As `inspect` tells formats."""
    if tensor.treatment in ("identical", "alias"):
        return "none"
    if tensor.treatment != "code":
        return "exact"
    settings = tensor.settings
    if isinstance(settings, Quantizing):
        group = "" if settings.group_size == "row" else f" group {settings.group_size}"
        return f"packed {settings.sparsity} int{settings.bits}{group}"
    if isinstance(settings, CountedSettings):
        return f"packed dense int{settings.bits}"
    return {"bitdelta": "packed dense int1", "skip": "none"}.get(settings.codec, settings.codec.replace("-", "_"))


def _expected(plan: Plan, tensors: Sequence[TensorPlan], weights: int, coder: Coder) -> int | None:
    """Bytes after the lossless stage, as some weights of some tensors come out; None: these cannot be sampled."""
    step = max(len(tensors) // _TENSORS, 1)
    coded = sampled = 0
    by_size = sorted(tensors, key=lambda tensor: tensor.pair.info.numel, reverse=True)  # small ones are mostly frame
    for tensor in by_size[::step][:_TENSORS]:
        found = _sample(plan, tensor)
        if found is None:
            return None
        for part in found[0]:
            coded += len(coder.encode(tensor_bytes(part.contiguous())))
        sampled += found[1]
    return round(coded * weights / sampled) if sampled else 0


def _sample(plan: Plan, tensor: TensorPlan) -> tuple[list[Tensor], int] | None:
    """The parts that some rows from the middle of a tensor come to, and how many weights those are.

    What a solver would choose is rounded instead: the same grid and pattern, other codes.
    """
    base, finetuned = plan.rows(tensor)
    rows, columns = tensor.matrix(plan.recipe.scope) if base is not None else as_matrix(finetuned.shape)
    count = min(max(_WEIGHTS // max(columns, 1), 1), rows)
    begin = (rows - count) // 2 * columns
    end = begin + min(count * columns, _WEIGHTS * 4)
    shape = (count, columns) if end - begin == count * columns else (end - begin,)
    few, before = _some(finetuned, begin, end, shape), None if base is None else _some(base, begin, end, shape)
    if tensor.treatment != "code":
        return list(exact.encode(few, before)[1].values()), end - begin
    encoded = _rounded(tensor, few, before)
    if encoded is None or encoded.format != "packed":
        return None
    spec = packed.PackedSpec.from_json(encoded.params, tensor.name)
    return list(packed.to_storage(spec, encoded.parts).values()), end - begin


def _some(rows: Rows, begin: int, end: int, shape: tuple[int, ...]) -> InMemory:
    return InMemory(rows.read(begin, end).reshape(shape))


def _rounded(tensor: TensorPlan, few: InMemory, before: InMemory | None) -> Encoded | None:
    settings = tensor.settings
    if isinstance(settings, BitDeltaSettings):
        return bitdelta.encode_elements(few, before, settings, tensor.name, 1.0)
    if isinstance(settings, CountedSettings):  # as if all tokens came alike
        read, rows, columns = delta_rows(few, before, tensor.name)
        return counted.encode_rows(read, columns, settings, torch.ones(rows))
    if not isinstance(settings, Quantizing):
        return None
    fields = {name: getattr(settings, name) for name in Quantizing.model_fields}
    if isinstance(settings, ObsSettings) and settings.range_search:
        fields["range_factor"] = settings.range_search[0]
    rounded = RtnSettings.model_construct(**fields)  # unchecked: drawn patterns are for obs, but as large here
    return rtn.encode_elements(few, before, rounded, tensor.name)


def total(values: Iterable[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    found = list(values)
    return None if None in found else sum(one for one in found if one is not None)


def expected_bytes(found: Iterable[Share], side_files: int, tensors: int) -> int | None:
    """Of a whole artifact after the lossless stage, about; None: it is not estimated. side_files: bytes of those."""
    expected = total(one.expected_bytes for one in found)
    return None if expected is None else expected + side_files + _MANIFEST * tensors
