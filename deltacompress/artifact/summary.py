"""A manifest as plain data for people and scripts: sizes, ratio, and a row per part and per tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltacompress.artifact.records import Manifest, TensorRecord
from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.checkpoints.names import kind_of
from deltacompress.codecs.formats.table import FORMATS
from deltacompress.types import TensorKind

_KINDS = ("linear", "embedding", "head", "norm", "bias", "other")


def summarize(
    manifest: Manifest, *, artifact: Path, artifact_bytes: int, entropy: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What `inspect --json` prints.

    ratio: bytes of the fine-tuned checkpoint / bytes of the whole artifact, everything included; finetuned_bytes covers
    the same files. linear_bits_per_weight: 8 x stored bytes / weights, over the linears of the decoder layers, None if
    there are none. tensors: a row each, in the natural order of their names; kind as `kinds`.
    entropy: by tensor, the bytes that its parts take at their order-0 entropies. With it, parts and tensors also have
    over_entropy: stored bytes / those bytes, None where nothing but one byte occurs, or nothing at all.
    """
    kind = kinds(manifest)
    linear = [record for record in manifest.tensors if kind[record.name] == "linear"]
    weights = sum(math.prod(record.shape) for record in linear)
    return {
        "artifact": str(artifact),
        "digest": manifest.digest,
        "base": manifest.base.name,
        "finetuned": manifest.finetuned.name,
        "recipe": str(manifest.recipe.get("name", "")),
        "scope": manifest.scope,
        "lossless": manifest.lossless,
        "calibration_tokens": manifest.calibration.tokens if manifest.calibration else 0,
        "finetuned_bytes": manifest.finetuned.bytes,
        "artifact_bytes": artifact_bytes,
        "ratio": manifest.finetuned.bytes / artifact_bytes,
        "linear_bits_per_weight": 8 * sum(record.bytes for record in linear) / weights if weights else None,
        "parts": _parts(manifest, kind, artifact_bytes, entropy),
        "tensors": [
            _row(record, kind[record.name], entropy)
            for record in sorted(manifest.tensors, key=lambda record: natural(record.name))
        ],
    }


def kinds(manifest: Manifest) -> dict[str, TensorKind]:
    """What each tensor is in its model; by its name where the recipe did not ask, and so nobody looked."""
    recorded = {record.name: record.kind for record in manifest.tensors}
    if set(recorded.values()) != {"other"}:
        return recorded
    return {record.name: kind_of(record.name, record.shape) for record in manifest.tensors}


def natural(name: str) -> list[str | int]:
    """Sort key that reads numbers as numbers: layer 2 comes before layer 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", name))]


def _parts(
    manifest: Manifest, kinds: Mapping[str, TensorKind], artifact_bytes: int, entropy: Mapping[str, float] | None
) -> list[dict[str, Any]]:
    """Where the bytes are: tensors by kind, side files, and what describes them; sums to the whole artifact."""
    rows: list[dict[str, Any]] = []
    for kind in _KINDS:
        chosen = [record for record in manifest.tensors if kinds[record.name] == kind]
        if chosen:
            full = sum(math.prod(record.shape) * ITEMSIZE[record.dtype] for record in chosen)
            row = _share(kind, len(chosen), full, sum(record.bytes for record in chosen))
            rows.append(row | _over_entropy(chosen, entropy))
    content, files = (sum(one.bytes for one in found) for found in (manifest.files, [f.stored for f in manifest.files]))
    none = _over_entropy([], entropy)
    rows.append(_share("config and tokenizer", len(manifest.files), content, files) | none)
    stored = sum(record.bytes for record in manifest.tensors)
    rows.append(_share("manifest and headers", 1 + len(manifest.shards), 0, artifact_bytes - files - stored) | none)
    return rows


def _over_entropy(records: Sequence[TensorRecord], entropy: Mapping[str, float] | None) -> dict[str, float | None]:
    if entropy is None:
        return {}
    least = sum(entropy[record.name] for record in records)
    return {"over_entropy": sum(record.bytes for record in records) / least if least else None}


def _share(what: str, count: int, full: int, stored: int) -> dict[str, Any]:
    return {
        "part": what,
        "count": count,
        "full_bytes": full,
        "stored_bytes": stored,
        "ratio": full / stored if stored and full else None,
    }


def _row(record: TensorRecord, kind: TensorKind, entropy: Mapping[str, float] | None) -> dict[str, Any]:
    count = math.prod(record.shape)
    return {
        "name": record.name,
        "shape": list(record.shape),
        "kind": kind,
        "status": record.status,
        "codec": _codec_label(record),
        "bits_per_weight": 8 * record.bytes / count if count else 0.0,
        "bytes": record.bytes,
        "loss": record.loss,
        "kept": record.kept,
        "damp_fraction": record.damp_fraction,
    } | _over_entropy([record], entropy)


def _codec_label(record: TensorRecord) -> str:
    codec = record.codec if record.status in ("exact", "coded") else record.status
    return f"{codec} {FORMATS[record.format].label.format_map(record.params)}".rstrip()
