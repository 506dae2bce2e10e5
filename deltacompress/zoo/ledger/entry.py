"""The manifest of an entry, shaped as an OCI image manifest: a config, layers, what it descends from.

Its bytes are canonical JSON and it is stored as a blob; their sha256 is the entry's digest. It holds nothing that
changes between two publications of the same thing (no times, no names), so publishing twice gives one digest. Media
types are an allow-list: a reader refuses what it would have to guess at.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import FailFast, Field, model_validator

from deltacompress.artifact.records import FILE_NAME
from deltacompress.files.canonical_json import canonical_bytes
from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo.errors import DamagedRecordError
from deltacompress.zoo.ledger import canonical
from deltacompress.zoo.ledger.canonical import Strict
from deltacompress.zoo.ledger.records import Sha256, Size, Text

MAX_ENTRY_BYTES = 16 << 20
"""And canonical.MAX_MEMORY: about 55,000 parts."""
_PREFIX = "application/vnd.deltacompress."
ARTIFACT = _PREFIX + "artifact.manifest.v1+json"
HEADER = _PREFIX + "shard.header.v1"
BUNDLE = _PREFIX + "shard.bundle.v1"
PART = _PREFIX + "shard.part.v1"
FILE = _PREFIX + "file.v1"
BASE = _PREFIX + "base.v1+json"
ADAPTER = _PREFIX + "adapter.v1+json"
REPORT = _PREFIX + "report.v1+json"
SIGNATURE = _PREFIX + "signature.v1+json"
MEDIA_TYPES = (ARTIFACT, HEADER, BUNDLE, PART, FILE, BASE, ADAPTER, REPORT, SIGNATURE)
SHARD_TYPES = (HEADER, BUNDLE, PART)

Relation = Literal["finetune", "adapter", "quantized", "merge", "recompressed", "distilled", "base"]
RELATIONS = get_args(Relation)
Kind = Literal["delta", "base-ref", "adapter", "report", "signature"]
Key = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]


class Descriptor(Strict):
    """One blob. annotations: `file` (of which file), `part` (which part of a shard)."""

    media_type: Text
    digest: Sha256
    size: Size
    annotations: dict[Key, Annotated[str, Field(max_length=1200)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _allowed(self) -> Descriptor:
        if self.media_type not in MEDIA_TYPES:
            raise ValueError(f"media type {self.media_type[:80]!a} is not one that a zoo holds")
        return self


class Lineage(Strict):
    """What an entry descends from.

    base, finetuned: content hashes of checkpoints (content_hash); base_name, finetuned_name: what they are called where
    they came from: hub id, or name of the directory; parents: digests of entries; relation: how
    the entry came from them, in Hugging Face's words for base_model_relation or ours.
    """

    base: Sha256 | None = None
    base_name: Text | None = None
    finetuned: Sha256 | None = None
    finetuned_name: Text | None = None
    parents: Annotated[tuple[Sha256, ...], FailFast()] = ()
    relation: Relation | None = None


class EntryManifest(Strict):
    """The whole manifest. summary: small facts for lists (recipe, bytes, ratio); subject: what a referrer is about."""

    media_type: Literal["application/vnd.deltacompress.entry.v1+json"] = "application/vnd.deltacompress.entry.v1+json"
    schema_version: Literal[1] = 1
    kind: Kind
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], FailFast()] = ()
    lineage: Lineage = Lineage()
    summary: dict[Key, str | int | float | None] = Field(default_factory=dict)
    subject: Sha256 | None = None

    @model_validator(mode="after")
    def _files(self) -> EntryManifest:
        for layer in self.layers:
            name = layer.annotations.get("file", "")
            if not re.fullmatch(FILE_NAME, name):
                raise ValueError(f"a layer of file {name[:80]!a}, which is no plain file name")
        return self

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Every blob it needs, config first."""
        return (self.config, *self.layers)

    @property
    def blobs(self) -> dict[str, int]:
        """Digest -> size of every blob it needs."""
        return {one.digest: one.size for one in self.descriptors}

    @property
    def logical_bytes(self) -> int:
        """Logical size: what a reader gets (a blob used twice counts twice), without the manifest."""
        return sum(one.size for one in self.descriptors)

    @property
    def texts(self) -> dict[str, object]:
        """What others have chosen in it: what it is -> the text (or what stands in its place)."""
        told = self.lineage
        named = {"name of the base": told.base_name, "name of the fine-tuned model": told.finetuned_name}
        noted = {key: value for one in self.descriptors for key, value in one.annotations.items()}
        return {**self.summary, **noted, **named}

    def files(self) -> dict[str, tuple[Descriptor, ...]]:
        """File name -> its layers, in order."""
        found: dict[str, list[Descriptor]] = {}
        for layer in self.layers:
            found.setdefault(layer.annotations["file"], []).append(layer)
        return {name: tuple(layers) for name, layers in found.items()}

    def to_bytes(self) -> bytes:
        """The bytes whose sha256 is the entry's digest."""
        return canonical_bytes(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """sha256 of to_bytes."""
        return sha256_hex(self.to_bytes())


def parse_entry(raw: bytes, where: str) -> EntryManifest:
    """Check the bytes of a manifest.

    Raises:
        DamagedRecordError: too large, or breaks a rule of this module.
    """
    data: dict[str, Any] = canonical.parse(raw, where, limit=MAX_ENTRY_BYTES)
    entry = canonical.validate(EntryManifest, data, where)
    sizes: dict[str, int] = {}
    for one in entry.descriptors:
        if sizes.setdefault(one.digest, one.size) != one.size:
            raise DamagedRecordError(f"blob {one.digest[:12]} is given two sizes", where=where)
    return entry
