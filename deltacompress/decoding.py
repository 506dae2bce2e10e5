"""From stored bytes back to a tensor: the one path that artifacts, resumed runs and the runtime share.

Bytes of a part -> lossless stage undone -> serving layout -> restored tensor, each step checked before the next one
allocates anything. What a part claims comes from a manifest, so nothing here trusts it beyond its own hashes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from blake3 import blake3
from torch import Tensor

from deltacompress import lossless
from deltacompress.checkpoint import DTYPES, tensor_bytes
from deltacompress.codecs import packed
from deltacompress.codecs.encoded import restore_tensor
from deltacompress.errors import BackendError, ChecksumError, FormatError, TruncatedFileError
from deltacompress.manifest import PartRecord, TensorRecord


def raw_bytes(part: PartRecord) -> int:
    """Bytes of a part before the lossless stage."""
    return math.prod(part.shape) * DTYPES[part.dtype].itemsize


def decode_part(part: PartRecord, stored: bytes, codec: str, *, where: str, device: str = "auto") -> Tensor:
    """One part as it was before the lossless stage, on the CPU.

    stored: its bytes in the shard; codec: the manifest's `lossless`; where: how messages call it; device: as
    `lossless.decode`.

    Raises:
        IntegrityError: the bytes are not those that were recorded.
        BackendError: this machine cannot decode the codec, or has too little memory.
    """
    if len(stored) != part.bytes:
        raise TruncatedFileError(f"{where}: {len(stored)} bytes, {part.bytes} recorded; copy the artifact again")
    wanted = raw_bytes(part)
    try:
        if codec != "none":  # such a stream carries digests of its own
            raw = lossless.decode(stored, raw_bytes=wanted, device=device, name=where)
        else:
            check_part(part, stored, where=where)
            raw = bytearray(stored)
    except MemoryError as error:
        raise BackendError(f"{where}: {wanted} bytes when decoded, more than this machine's memory") from error
    if len(raw) != wanted:
        raise FormatError(
            f"{where}: {len(raw)} bytes, its shape {list(part.shape)} needs {wanted}; copy the artifact again"
        )
    if not wanted:
        return torch.empty(part.shape, dtype=DTYPES[part.dtype])
    return torch.frombuffer(raw, dtype=DTYPES[part.dtype]).reshape(part.shape)


def check_part(part: PartRecord, stored: bytes, *, where: str) -> None:
    """Compare the stored bytes of a part with their recorded hashes.

    Raises:
        ChecksumError: they differ.
    """
    alike = hashlib.sha256(stored).hexdigest() == part.sha256
    if not alike or (part.blake3 is not None and blake3(stored).hexdigest() != part.blake3):
        raise ChecksumError(f"{where}: its bytes differ from their recorded hash; copy the artifact again")


def serving_parts(
    record: TensorRecord, codec: str, read: Callable[[PartRecord], bytes], *, where: str = "", device: str = "auto"
) -> dict[str, Tensor]:
    """All parts of a tensor in the serving layout (codecs.packed), as CPU tensors.

    read: gives the stored bytes of a part; where: prefix of messages, the file or directory.

    Raises:
        IntegrityError, BackendError: as decode_part; parts that do not fit each other.
    """
    parts = {
        part.name: decode_part(part, read(part), codec, where=f"{where}{record.name}.{part.name}", device=device)
        for part in record.parts
    }
    if record.format != "packed":
        return parts
    spec = packed.PackedSpec.from_json(dict(record.params), record.name)
    coded = codec != "none"
    packed.check_parts(spec, parts, storage=coded, where=record.name)
    return packed.to_serving(spec, parts, record.name) if coded else parts


def restored_tensor(record: TensorRecord, parts: dict[str, Tensor], base: Tensor | None, *, where: str = "") -> Tensor:
    """The restored tensor, contiguous on the CPU, checked against its recorded hash.

    parts: in the serving layout; base: as restore_tensor takes it.

    Raises:
        IntegrityError: parts that do not fit, or a result that is not what was compressed.
        BackendError: too little memory.
    """
    like = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
    try:
        tensor = restore_tensor(record.format, dict(record.params), parts, base, like, record.name).contiguous()
    except MemoryError as error:
        raise BackendError(f"{where}{record.name}: shape {list(record.shape)} does not fit into memory") from error
    if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != record.sha256:
        raise ChecksumError(
            f"{where}{record.name}: the restored tensor is not what was compressed; copy the artifact again"
        )
    return tensor
