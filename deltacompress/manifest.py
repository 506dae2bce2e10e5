"""manifest.json: the versioned description of an artifact. docs/formats.md documents every field.

The file is canonical JSON (sorted keys, no spaces, ASCII) and holds a digest over itself, so that any flipped bit, any
unknown or repeated key and any other spelling of the same content is noticed. It holds nothing that differs between two
runs over the same input (no times, no paths), so that a resumed run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, field_validator
from pydantic.json_schema import SkipJsonSchema

from deltacompress.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    InputError,
    SchemaVersionError,
    TruncatedFileError,
)
from deltacompress.files.regular import UnfitFileError, read_bytes, told
from deltacompress.json_memory import MAX_DEPTH, is_deep, parsed_bytes
from deltacompress.manifest_checks import AGAIN, check_relations
from deltacompress.types import TensorKind

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20  # of 45,000 packed tensors of four parts each, or more of fewer
_MAX_MEMORY = 256 << 20  # of the parsed manifest, by the estimate
_MAX_ELEMENTS = 1 << 50
_MAX_KEYS = 64

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=_MAX_ELEMENTS)]
Shape = Annotated[tuple[Count, ...], Field(max_length=16), FailFast()]
Name = Annotated[str, Field(min_length=1, max_length=1100)]
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}$"
FileName = Annotated[str, Field(pattern=FILE_NAME)]
DTYPE_NAMES = tuple(
    "BOOL U8 U16 U32 U64 I8 I16 I32 I64 F16 BF16 F32 F64 C64 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ".split()
)
"""The keys of dtypes.DTYPES, without the torch that they stand for."""
Dtype = Annotated[str, Field(pattern=rf"^({'|'.join(DTYPE_NAMES)})$")]
Status = Literal["coded", "exact", "identical", "added", "alias"]


def _few(value: object) -> object:
    """Refuse a mapping of thousands of keys before each of them is told to be wrong."""
    if isinstance(value, dict) and len(value) > _MAX_KEYS:
        raise ValueError(f"{len(value)} keys, more than {_MAX_KEYS}")
    return value


Few = BeforeValidator(_few)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecord(_Record):
    """One side of the pair.

    name: directory name or hub id; revision: commit of a hub model, else null; content_hash: checkpoint.content_hash
    of its tensors.
    """

    name: str
    revision: str | None = None
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
    """One part of a tensor before the lossless stage (dtype, shape), and its bytes and their hashes after it.

    sha256 names the part in a zoo. blake3 is a tree of chunks, which a GPU takes side by side, so it is what a load on
    a GPU compares; there is none where a lossless stream carries digests of its own.
    """

    name: Name
    dtype: Dtype
    shape: Shape
    bytes: Count
    sha256: Sha256
    blake3: Annotated[Sha256 | SkipJsonSchema[None], Field(exclude_if=lambda value: value is None)] = None

    @field_validator("blake3", mode="before")
    @classmethod
    def _no_null(cls, value: object) -> object:
        if value is None:
            raise ValueError("null; what a part does not have is left out")
        return value


class TensorRecord(_Record):
    """One tensor of the fine-tuned checkpoint; there is exactly one record for each.

    status: coded (lossy), exact, identical (to the base), added (no base), alias (of another tensor, stored there).
    codec: how the values were chosen, for the record; a reader needs only format and params, which say how the parts
    decode (codecs.encoded.restore_tensor). sha256: of the restored tensor's bytes.
    """

    name: Name
    dtype: Dtype
    shape: Shape
    kind: TensorKind
    status: Status
    codec: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
    format: Literal["packed", "exact", "none"]
    params: Annotated[dict[str, str | int | float], Few]
    base_name: Name | None = None
    base_rows: Count | None = None
    base_sha256: Sha256 | None = None
    alias_of: Name | None = None
    sha256: Sha256
    parts: Annotated[tuple[PartRecord, ...], FailFast()] = ()
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
    tensors: Annotated[tuple[TensorRecord, ...], FailFast()]
    shards: Annotated[tuple[FileRecord, ...], FailFast()]
    files: Annotated[tuple[FileRecord, ...], FailFast()]
    tools: Annotated[dict[str, str], Few]

    def to_bytes(self) -> bytes:
        """The file's bytes, digest included."""
        fields = _canonical_fields(self.model_dump(mode="json"))
        return _joined(fields | {"digest": _canonical(_digest(fields))})

    @property
    def digest(self) -> str:
        """What names this artifact: sha256 over the canonical manifest without its digest."""
        return _digest(_canonical_fields(self.model_dump(mode="json")))


def read_manifest(directory: Path) -> Manifest:
    """Read and check `directory`/manifest.json.

    Raises:
        InputError: no manifest, but a checkpoint.
        TruncatedFileError: no manifest, or cut short.
        CheckpointError: the system does not read it.
        SchemaVersionError: written by a newer version.
        ChecksumError: its bytes differ from its digest.
        FormatError: it breaks the schema.
    """
    return parse_manifest(read_manifest_bytes(directory), str(directory / MANIFEST))


def read_manifest_bytes(directory: Path) -> bytes:
    """The bytes of `directory`/manifest.json, unchecked but for their number; raises as read_manifest."""
    path = directory / MANIFEST
    try:
        return read_bytes(path, at_most=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        if _is_checkpoint(directory):
            raise InputError(
                f"{directory}: a model's checkpoint, not an artifact; give what `deltacompress compress` made of it "
                f"(or, to compress it: deltacompress compress BASE {directory} --recipe int2-24 ...)"
            ) from error
        raise TruncatedFileError(
            f"{directory}: no {MANIFEST}; not an artifact, or half of one; give one that `compress` published"
        ) from error
    except UnfitFileError as error:
        raise FormatError(f"{path}: {told(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {told(error)}") from error


def _is_checkpoint(directory: Path) -> bool:
    """Whether a directory without a manifest holds a model: an artifact that lost its own still has delta-* files."""
    if not (directory / "config.json").is_file():
        return False
    weights = [one.name for one in directory.iterdir() if one.suffix in (".safetensors", ".bin")]
    return bool(weights) and not any(name.startswith("delta-") for name in weights)


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Check the bytes of a manifest; raises as read_manifest."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise FormatError(_too_large(where))
    if parsed_bytes(raw) > _MAX_MEMORY:
        raise FormatError(f"{where}: holds more values than any manifest does; {AGAIN}")
    try:
        data = json.loads(raw, parse_constant=_refuse_constant, parse_float=_read_float)
    except (ValueError, RecursionError) as error:
        if not raw.rstrip(b"\0").endswith(b"}") or (
            isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc)
        ):
            raise TruncatedFileError(f"{where}: cut short after {len(raw)} bytes; {AGAIN}") from error
        raise ChecksumError(f"{where}: not JSON any more ({error}); {AGAIN}") from error
    if not isinstance(data, dict):
        raise FormatError(f"{where}: not an artifact's manifest (no JSON object); {AGAIN}")
    if is_deep(raw):
        raise FormatError(f"{where}: nested deeper than {MAX_DEPTH} levels, as no recipe is; {AGAIN}")
    version = data.get("schema_version")
    claimed = data.pop("digest", None)
    fields = _canonical_fields(data)  # once: of a large manifest this takes longer than all the rest
    digest = _digest(fields)
    if type(version) is int and version > SCHEMA_VERSION and claimed == digest:
        raise SchemaVersionError(
            f"{where}: schema version {version}, this program reads up to {SCHEMA_VERSION}; upgrade deltacompress"
        )
    if claimed != digest or raw != _joined(fields | {"digest": _canonical(claimed)}):
        raise ChecksumError(f"{where}: its bytes differ from its digest; {AGAIN}")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise SchemaVersionError(f"{where}: unknown schema version {str(version)[:40]!a}; {AGAIN}")
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ascii(".".join(str(part) for part in first["loc"])[:200])[1:-1]
        raise FormatError(f"{where}: {at}: {first['msg']}; {AGAIN}") from error
    # an absent optional field, or a value that was coerced: one spelling only
    if _canonical_fields(manifest.model_dump(mode="json")) != fields:
        raise FormatError(f"{where}: not spelled as this format spells it; {AGAIN}")
    check_relations(manifest, where)
    return manifest


def _too_large(where: str) -> str:
    return f"{where}: larger than {MAX_MANIFEST_BYTES} bytes; {AGAIN}"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _canonical_fields(data: dict[str, Any]) -> dict[str, bytes]:
    """Name -> canonical value of the top level; `_joined` makes them the whole."""
    return {name: _canonical(value) for name, value in data.items()}


def _joined(fields: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(_canonical(name) + b":" + fields[name] for name in sorted(fields)) + b"}"


def _digest(fields: dict[str, bytes]) -> str:
    return hashlib.sha256(_joined(fields)).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is out of range")
    return value
