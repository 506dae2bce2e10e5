"""Bytes of an artifact that is not there yet: what a tensor's parts, its record and its place in a shard take."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deltacompress.artifact.records import Manifest, PartRecord, TensorRecord
from deltacompress.checkpoints.dtypes import DTYPE_NAMES
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.codecs.encoded import Encoded
from deltacompress.codecs.formats import packed
from deltacompress.compression.encoding import encode_uncalibrated, finish_on_disk, record_of
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.side_files import side_file_bytes
from deltacompress.lossless import Coder

_HASH, _NUMBER = "0" * 64, 0.1234567890123456
_FRAME, _FILE, _NAMES, _RULES = 950, 98, 150, 1700
"""What a manifest holds at least, without names, and of each side file; what names add to that, about, and rules of a
choice without those of tensors."""
_HEADER = 49
"""What a shard's header holds of a part besides its name and three numbers, none of which is shorter than its bytes
but those of the first few parts."""


def part_bytes(encoded: Encoded, coder: Coder, scale: float = 1.0) -> float:
    """Bytes of a tensor's parts after the lossless stage. scale: how many times as many rows as `encoded` it has."""
    if coder.codec == "none":
        return scale * sum(part.nbytes for part in encoded.parts.values())
    return coded_bytes(to_code(encoded), coder, scale)


def to_code(encoded: Encoded) -> list[memoryview]:
    """A tensor's parts as the lossless stage is given them, in host memory."""
    parts = encoded.parts
    if encoded.format == "packed":
        parts = packed.to_storage(packed.PackedSpec.from_json(encoded.params, ""), parts)
    return [tensor_bytes(part.contiguous().cpu()) for part in parts.values()]


def coded_bytes(parts: Iterable[memoryview], coder: Coder, scale: float) -> float:
    """Bytes of parts after the lossless stage. scale: how many times as many rows as in `parts` there are."""
    frame = coder.coded_bytes(b"")
    return sum(frame + scale * (coder.coded_bytes(part) - frame) for part in parts)


def group_bytes(manifest: Manifest, groups: Iterable[Iterable[str]]) -> tuple[int, ...]:
    """What each group of tensors takes in an artifact."""
    records = {record.name: record for record in manifest.tensors}
    taken = {name: sum(part.bytes for part in one.parts) + told_of(one) for name, one in records.items()}
    return tuple(sum(taken[name] for name in names) for names in groups)


def told_of_coded(tensor: TensorPlan, encoded: Encoded) -> int:
    """As `told_of`, of a tensor that is coded so."""
    parts = [
        PartRecord(name=name, dtype=DTYPE_NAMES[part.dtype], shape=tuple(part.shape), bytes=part.nbytes, sha256=_HASH)
        for name, part in encoded.parts.items()
    ]
    return told_of(_record(tensor, encoded, tuple(parts)))


def told_of(record: TensorRecord) -> int:
    """Bytes in the manifest, its recipe included, and in the header of the shard; at least, where it is not coded."""
    written = len(json.dumps(record.model_dump(mode="json"), separators=(",", ":"))) + 1
    written += len(record.name) + 3 if record.status == "coded" else 0  # a rule names it
    headers = (len(record.name) + len(part.name) + _HEADER + 3 * len(str(part.bytes)) for part in record.parts)
    return written + sum(headers)


def _record(tensor: TensorPlan, encoded: Encoded, parts: tuple[PartRecord, ...]) -> TensorRecord:
    pair = tensor.pair
    return TensorRecord(
        name=tensor.name,
        dtype=pair.info.dtype,
        shape=pair.info.shape,
        kind=tensor.kind,
        status="coded",
        codec=tensor.settings.codec,
        format=encoded.format,
        params=encoded.params,
        base_name=pair.base_name,
        base_rows=pair.base_rows,
        base_sha256=_HASH if pair.base_name else None,
        alias_of=None,
        sha256=_HASH,
        parts=parts,
        loss=_NUMBER,
        damp_fraction=encoded.damp_fraction and _NUMBER,
    )


def fixed_bytes(plan: Plan, coder: Coder) -> int:
    """What every choice has: tensors that are stored as they are, side files, and the frame of the manifest.

    No artifact has less than this without `unsure_bytes`.
    """
    total = _FRAME + unsure_bytes(plan) + side_file_bytes(plan.finetuned, lossless=coder.codec)
    total += sum(_FILE + len(file.name) for file in plan.finetuned.side_files())
    for tensor in plan.tensors.values():
        if tensor.treatment in ("exact", "added", "identical"):
            outcome = finish_on_disk(plan, tensor, encode_uncalibrated(plan, tensor), coder)
            total += sum(part.bytes for part in outcome.record.parts) + told_of(outcome.record)
        elif tensor.treatment == "alias":
            total += told_of(record_of(plan, tensor, Encoded("none", {}, {}), _HASH, ()))
    return total


def unsure_bytes(plan: Plan) -> int:
    """How much of `fixed_bytes` is an estimate: what a manifest holds that a choice, or a name, may make shorter."""
    return _NAMES + (_RULES if any(one.treatment == "code" for one in plan.tensors.values()) else 0)
