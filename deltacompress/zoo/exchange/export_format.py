"""The tar file of `zoo export`, as bytes: its list, its headers, its end. One spelling of each.

tarfile writes the headers; nothing here lets it read any.
"""

from __future__ import annotations

import tarfile
from typing import Annotated, Literal

from pydantic import FailFast

from deltacompress.zoo.ledger.canonical import Strict
from deltacompress.zoo.ledger.records import LedgerRecord, Number, Sha256, Size, Text

FORMAT = 1
INDEX = "zoo-export.json"
MAX_INDEX_BYTES = 16 << 20
BLOCK = 512


class ExportManifest(Strict):
    """An attachment of a version: the digest and size of its manifest."""

    manifest: Sha256
    size: Size


class ExportVersion(Strict):
    """One version. version: its number where it comes from; attached: reports and signatures."""

    name: Text
    version: Number
    manifest: Sha256
    size: Size
    attached: Annotated[tuple[ExportManifest, ...], FailFast()]


class ExportBlob(Strict):
    """One blob of the archive, manifests included."""

    digest: Sha256
    size: Size


class ExportRecord(LedgerRecord):
    """zoo-export.json. versions, by name and number; blobs in the order of the archive."""

    type: Literal["export"] = "export"
    format: Literal[1] = 1
    versions: Annotated[tuple[ExportVersion, ...], FailFast()]
    blobs: Annotated[tuple[ExportBlob, ...], FailFast()]


def blob_member(digest: str) -> str:
    """Name of a blob in the archive."""
    return f"blobs/sha256/{digest[:2]}/{digest}"


def header_for(name: str, size: int) -> bytes:
    """The block before a file of `size` bytes."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o444
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padding_for(size: int) -> bytes:
    """The zeros after a file of `size` bytes."""
    return b"\0" * (-size % BLOCK)


def end_of_archive() -> bytes:
    """Two empty blocks, and nothing after them."""
    return b"\0" * (2 * BLOCK)
