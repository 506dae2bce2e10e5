"""manifest.json: the versioned description of an artifact. docs/formats.md documents every field.

The file is canonical JSON (sorted keys, no spaces, ASCII) and holds a digest over itself, so that any flipped bit, any
unknown or repeated key and any other spelling of the same content is noticed. It holds nothing that differs between two
runs over the same input (no times, no paths), so that a resumed run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltacompress.errors import ChecksumError, FormatError, SchemaVersionError, TruncatedFileError
from deltacompress.types import TensorKind

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 28

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=1 << 50)]
Shape = Annotated[tuple[Count, ...], Field(max_length=8)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", max_length=200)]
Status = Literal["coded", "exact", "identical", "added", "alias"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecord(_Record):
    """One side of the pair. name: directory name or hub id; content_hash: checkpoint.content_hash of its tensors."""

    name: str
    content_hash: Sha256
    bytes: Count
    tensors: Count


class CalibrationRecord(_Record):
    """What the Hessians were made from. sha256: over the token ids."""

    source: str
    format: str
    sha256: Sha256
    records: Count
    samples: Count
    seq_len: Count
    tokens: Count
    seed: Count


class PartRecord(_Record):
    """One part of a tensor before the lossless stage (dtype, shape) and its bytes after it."""

    name: Name
    dtype: str
    shape: Shape
    bytes: Count


class TensorRecord(_Record):
    """One tensor of the fine-tuned checkpoint; there is exactly one record for each.

    status: coded (lossy), exact, identical (to the base), added (no base), alias (of another tensor, stored there).
    format, params: how the parts decode (codecs.encoded.restore_tensor). sha256: of the restored tensor's bytes.
    """

    name: Name
    dtype: str
    shape: Shape
    kind: TensorKind
    status: Status
    codec: Literal["obs", "rtn", "exact", "skip"]
    format: Literal["packed", "exact", "none"]
    params: dict[str, str | int | float]
    base_name: Name | None = None
    base_rows: Count | None = None
    base_sha256: Sha256 | None = None
    alias_of: Name | None = None
    sha256: Sha256
    parts: tuple[PartRecord, ...] = ()
    loss: float | None = None
    damp_fraction: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all parts as stored."""
        return sum(part.bytes for part in self.parts)


class FileRecord(_Record):
    """One file of the artifact other than the manifest."""

    file: FileName
    bytes: Count
    sha256: Sha256


class Manifest(_Record):
    """The whole manifest; `tools` are the versions that wrote it."""

    schema_version: Literal[1] = 1
    base: ModelRecord
    finetuned: ModelRecord
    recipe: dict[str, Any]
    scope: Literal["delta", "full"]
    calibration: CalibrationRecord | None
    lossless: Literal["none", "zstd", "gdeflate", "ans"]
    tensors: tuple[TensorRecord, ...]
    shards: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...]
    tools: dict[str, str]

    def to_bytes(self) -> bytes:
        """The file's bytes, digest included."""
        data = self.model_dump(mode="json")
        return _canonical(data | {"digest": _digest(data)})

    @property
    def digest(self) -> str:
        """What names this artifact: sha256 over the canonical manifest without its digest."""
        return _digest(self.model_dump(mode="json"))


def read_manifest(directory: Path) -> Manifest:
    """Read and check `directory`/manifest.json.

    Raises:
        TruncatedFileError: no manifest, or cut short.
        SchemaVersionError: written by a newer version.
        ChecksumError: its bytes differ from its digest.
        FormatError: it breaks the schema.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise TruncatedFileError(f"{directory}: no {MANIFEST}; not an artifact, or an incomplete copy of one")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise FormatError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Check the bytes of a manifest; raises as read_manifest."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        if not raw.rstrip().endswith(b"}"):
            raise TruncatedFileError(f"{where}: cut short after {len(raw)} bytes; copy the artifact again") from error
        raise ChecksumError(f"{where}: not JSON any more ({error}); copy the artifact again") from error
    if not isinstance(data, dict):
        raise FormatError(f"{where}: not an artifact's manifest")
    version = data.get("schema_version")
    claimed = data.pop("digest", None)
    if type(version) is int and version > SCHEMA_VERSION and claimed == _digest(data):
        raise SchemaVersionError(
            f"{where}: schema version {version}, this program reads up to {SCHEMA_VERSION}; upgrade deltacompress"
        )
    if claimed != _digest(data) or raw != _canonical(data | {"digest": claimed}):
        raise ChecksumError(f"{where}: its bytes differ from its digest; copy the artifact again")
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(f"{where}: unknown schema version {version!r}")
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{where}: {at}: {first['msg']}") from error
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        raise FormatError(f"{where}: tensors are not listed once each, by name")
    return manifest


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _digest(data: dict[str, Any]) -> str:
    try:
        return hashlib.sha256(_canonical(data)).hexdigest()
    except ValueError:  # NaN or Infinity, which no manifest of ours holds
        return ""
