"""What a manifest holds, record by record, and its one spelling. docs/formats.md documents every field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator
from pydantic.json_schema import SkipJsonSchema

from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.checkpoints.side_files import FRAME
from deltacompress.codecs.formats.table import Format
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest, canonical_fields, join_fields
from deltacompress.files.hashing import sha256_hex
from deltacompress.types import TensorKind

SCHEMA_VERSION = 1
_MAX_ELEMENTS = 1 << 50
_MAX_KEYS = 64
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=_MAX_ELEMENTS)]
Shape = Annotated[tuple[Count, ...], Field(max_length=16), FailFast()]
Name = Annotated[str, Field(min_length=1, max_length=1100)]
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}$"
FileName = Annotated[str, Field(pattern=FILE_NAME)]
Dtype = Annotated[str, Field(pattern=rf"^({'|'.join(ITEMSIZE)})$")]
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
    """What a codec saw the model do: of Hessians, say. sha256: over the token ids."""

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
    decode (codecs.encoded.restore_tensor). sha256: of the restored tensor's bytes. kept: the share of the target that
    is kept on average. tokens: of an expert's matrix, how many of the calibration tokens went to that expert.
    """

    name: Name
    dtype: Dtype
    shape: Shape
    kind: TensorKind
    status: Status
    codec: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
    format: Format
    params: Annotated[dict[str, str | int | float], Few]
    base_name: Name | None = None
    base_rows: Count | None = None
    base_sha256: Sha256 | None = None
    alias_of: Name | None = None
    sha256: Sha256
    parts: Annotated[tuple[PartRecord, ...], FailFast()] = ()
    loss: float | None = None
    damp_fraction: float | None = None
    kept: Annotated[float | SkipJsonSchema[None], Field(exclude_if=lambda value: value is None)] = None
    tokens: Annotated[Count | SkipJsonSchema[None], Field(exclude_if=lambda value: value is None)] = None

    @property
    def bytes(self) -> int:
        """Bytes of all parts as stored."""
        return sum(part.bytes for part in self.parts)


class FrameRecord(_Record):
    """The zstd frame that lies in the place of a side file, in a file of its name and `.zst`."""

    bytes: Count
    sha256: Sha256


class FileRecord(_Record):
    """One file of the artifact other than the manifest. bytes, sha256: of its content, however it is stored.

    zstd: of a side file that is stored as one zstd frame.
    """

    file: FileName
    bytes: Count
    sha256: Sha256
    zstd: Annotated[FrameRecord | SkipJsonSchema[None], Field(exclude_if=lambda value: value is None)] = None

    @property
    def stored(self) -> FileRecord:
        """The file that lies in the artifact for it, under the name that it has there."""
        if self.zstd is None:
            return self
        name = self.file + FRAME  # of a long name, longer than one that a manifest may give
        return FileRecord.model_construct(file=name, bytes=self.zstd.bytes, sha256=self.zstd.sha256)


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

    @property
    def stored_files(self) -> tuple[FileRecord, ...]:
        """Every file that lies beside the manifest: shards, and side files as they are stored."""
        return (*self.shards, *(record.stored for record in self.files))

    def to_bytes(self) -> bytes:
        """The file's bytes, digest included."""
        fields = canonical_fields(self.model_dump(mode="json"))
        return join_fields(fields | {"digest": canonical_bytes(sha256_hex(join_fields(fields)))})

    @property
    def digest(self) -> str:
        """What names this artifact: sha256 over the canonical manifest without its digest."""
        return canonical_digest(self.model_dump(mode="json"))
