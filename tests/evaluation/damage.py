"""A damaged delta that is a valid artifact: the codes of one layer shuffled, every hash made right again."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch

from deltacompress import lossless
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.records import FileRecord, PartRecord, TensorRecord
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint, tensor_bytes
from deltacompress.checkpoints.writer import write_shards
from deltacompress.codecs.encoded import restore_tensor
from deltacompress.codecs.formats import packed
from deltacompress.files.places import MANIFEST
from deltacompress.types import TensorInfo


def shuffle_layer(artifact: Path, base: Path, out: Path, *, layer: int, seed: int) -> Path:
    """Write a copy of an artifact (lossless codec zstd) to `out`, the codes of one decoder layer in random order."""
    delta, checkpoint = load_delta(artifact), Checkpoint.open(base)
    assert delta.manifest.lossless == "zstd"
    rng = torch.Generator().manual_seed(seed)
    out.mkdir(parents=True)
    for side in delta.manifest.files:
        shutil.copy(artifact / side.file, out / side.file)
    records, streams = [], {}
    for record in delta.manifest.tensors:
        hit = f".{layer}." in record.name and record.format == "packed"
        kept, parts = _shuffled(delta, record, checkpoint, rng) if hit else (record, _stored(delta, record))
        records.append(kept)
        streams |= {f"{record.name}.{name}": raw for name, raw in parts.items()}
    infos = [
        (
            TensorInfo(name, "U8", (len(raw),), len(raw)),
            lambda raw=raw: torch.frombuffer(bytearray(raw), dtype=torch.uint8),
        )
        for name, raw in streams.items()
    ]
    shards = sorted(set(write_shards(out, infos, stem="delta").values()))
    files = tuple(_file(out / name) for name in shards)
    manifest = delta.manifest.model_copy(update={"tensors": tuple(records), "shards": files})
    (out / MANIFEST).write_bytes(manifest.to_bytes())
    return out


def _stored(delta: Delta, record: TensorRecord) -> dict[str, bytes]:
    return {part.name: delta.stored_part(record.name, part) for part in record.parts}


def _shuffled(
    delta: Delta, record: TensorRecord, base: Checkpoint, rng: torch.Generator
) -> tuple[TensorRecord, dict[str, bytes]]:
    parts = delta.parts(record.name)
    codes = parts["codes"]
    parts["codes"] = codes.flatten()[torch.randperm(codes.numel(), generator=rng)].reshape(codes.shape)
    like = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
    reference = delta.read_base(record.name, base)
    restored = restore_tensor(record.format, dict(record.params), parts, reference, like, record.name).contiguous()
    spec = packed.PackedSpec.from_json(dict(record.params), record.name)
    raws, made = {}, []
    for name, part in sorted(packed.to_storage(spec, parts).items()):
        raw = bytes(lossless.encode(tensor_bytes(part.contiguous()), "zstd", device="cpu"))
        dtype = next(key for key, value in DTYPES.items() if value == part.dtype)
        digest = hashlib.sha256(raw).hexdigest()
        made.append(PartRecord(name=name, dtype=dtype, shape=tuple(part.shape), bytes=len(raw), sha256=digest))
        raws[name] = raw
    digest = hashlib.sha256(tensor_bytes(restored)).hexdigest()
    return record.model_copy(update={"parts": tuple(made), "sha256": digest}), raws


def _file(path: Path) -> FileRecord:
    raw = path.read_bytes()
    return FileRecord(file=path.name, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
