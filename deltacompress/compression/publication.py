"""From finished steps to a published artifact: shards, side files, manifest; artifact/outputs.py renames."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from deltacompress.artifact.manifest import parse_manifest
from deltacompress.artifact.outputs import publish_directory
from deltacompress.artifact.records import CalibrationRecord, FileRecord, Manifest, ModelRecord, TensorRecord
from deltacompress.artifact.side_by_side import side_by_side
from deltacompress.calibration.data import CalibrationTokens
from deltacompress.checkpoints.hub import hub_origin
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.writer import METADATA, Make, shard_chunks, split_into_shards, write_file, write_hashed
from deltacompress.compression.encoding import alias_record
from deltacompress.compression.planning import Plan
from deltacompress.compression.run_identity import tool_versions
from deltacompress.compression.side_files import write_side_files
from deltacompress.compression.steps import Steps
from deltacompress.compression.workspace import Workspace
from deltacompress.files.output import output_errors
from deltacompress.files.places import MANIFEST
from deltacompress.types import TensorInfo

_WRITERS = 8
_SHARD = 2**29
"""Bytes of a shard: a core hashes and a disk takes so much in about a second, and some are written at once."""


def publish(plan: Plan, work: Workspace, steps: Steps, codec: str, tokens: CalibrationTokens | None) -> Manifest:
    """Assemble the artifact inside the workspace and rename it to its final name.

    Raises:
        OutputError: it cannot be written.
    """
    ready = work.path / "artifact"
    with output_errors(ready):
        ready.mkdir(exist_ok=True)
        for left in ready.iterdir():
            left.unlink()
    records = sorted([*steps.all_records(), *_aliases(plan, steps)], key=lambda record: record.name)
    if dropped := set(plan.finetuned.tensors) ^ {record.name for record in records}:
        raise RuntimeError(f"tensor {min(dropped)} was dropped on the way: this is a bug, and nothing was published")
    home = steps.stored()
    parts = [
        (_stored_info(record, i, codec), partial(work.pieces, home[record.name], f"{record.name}.{part.name}"))
        for record in records
        for i, part in enumerate(record.parts)
    ]
    shards = _written_shards(split_into_shards(ready, parts, stem="delta", max_shard_bytes=_SHARD))
    files = write_side_files(plan.finetuned, ready, lossless=codec)
    manifest = Manifest(
        base=_model(plan.base),
        finetuned=_model(plan.finetuned),
        recipe=plan.recipe.model_dump(mode="json"),
        scope=plan.recipe.scope,
        calibration=_calibration(tokens),
        lossless=codec,  # type: ignore[arg-type]
        tensors=tuple(records),
        shards=shards,
        files=files,
        tools=tool_versions(),
    )
    raw = manifest.to_bytes()
    parse_manifest(raw, str(work.out / MANIFEST))  # what no reader would take is not published
    write_file(ready / MANIFEST, [raw])
    made = ready.stat()
    try:
        publish_directory(ready, work.out, replaces=work.replaces)
    finally:
        work.published = work.out.exists() and os.path.samestat(work.out.stat(), made)  # whatever came after it
    return manifest


def _written_shards(shards: Iterable[tuple[Path, list[tuple[TensorInfo, Make]]]]) -> tuple[FileRecord, ...]:
    """Write shards side by side, and hash each while it is written: that takes as long as writing it, and a core."""

    def write(shard: tuple[Path, list[tuple[TensorInfo, Make]]]) -> FileRecord:
        path, tensors = shard
        digest, size = write_hashed(path, shard_chunks(path, tensors, METADATA))
        return FileRecord(file=path.name, bytes=size, sha256=digest)

    return tuple(side_by_side(write, shards, _WRITERS))


def _aliases(plan: Plan, steps: Steps) -> list[TensorRecord]:
    known = {record.name: record for record in steps.all_records()}
    return [
        alias_record(plan, tensor, known[tensor.pair.alias_of])
        for tensor in plan.tensors.values()
        if tensor.treatment == "alias" and tensor.pair.alias_of is not None
    ]


def _stored_info(record: TensorRecord, index: int, codec: str) -> TensorInfo:
    part = record.parts[index]
    name = f"{record.name}.{part.name}"
    if codec == "none":
        return TensorInfo(name, part.dtype, part.shape, part.bytes)
    return TensorInfo(name, "U8", (part.bytes,), part.bytes)


def _model(checkpoint: Checkpoint) -> ModelRecord:
    name, revision = hub_origin(checkpoint.path)
    return ModelRecord(
        name=name,
        revision=revision,
        content_hash=checkpoint.fingerprint(),
        bytes=checkpoint.nbytes,
        tensors=len(checkpoint.tensors),
    )


def _calibration(tokens: CalibrationTokens | None) -> CalibrationRecord | None:
    if tokens is None:
        return None
    samples, seq_len = tokens.ids.shape
    return CalibrationRecord(
        source=tokens.source,
        format=tokens.format,
        sha256=tokens.sha256,
        records=tokens.records,
        samples=samples,
        seq_len=seq_len,
        tokens=tokens.tokens,
        seed=tokens.seed,
    )
