"""From stored bytes back to a tensor: the one path that artifacts, resumed runs and the runtime share.

Bytes of a part -> lossless stage undone -> serving layout -> restored tensor, each step checked before the next one
allocates anything. What a part claims comes from a manifest, so nothing here trusts it beyond its own hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from blake3 import blake3
from torch import Tensor

from deltacompress.artifact.checks import nbytes, own_values
from deltacompress.artifact.parts import CodedSource
from deltacompress.artifact.records import PartRecord, TensorRecord
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint, tensor_bytes
from deltacompress.checkpoints.rows import Elements, Rows
from deltacompress.codecs.encoded import check_pieces, restore_pieces, restore_tensor
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.pieces import Source
from deltacompress.codecs.formats.table import shared_matrix
from deltacompress.errors import BackendError, ChecksumError, FormatError, TruncatedFileError
from deltacompress.lossless import Coder

_ANY, _GROWTH = 1 << 23, 1 << 10
"""Values that may come of nothing, and of each stored byte: `check_growth`."""


def decode_part(part: PartRecord, stored: bytes, coder: Coder, *, where: str) -> Tensor:
    """One part as it was before the lossless stage, on the CPU.

    stored: its bytes in the shard; coder: of the manifest's `lossless`; where: how messages call it.

    Raises:
        IntegrityError: the bytes are not those that were recorded.
        BackendError: this machine cannot decode the codec, or has too little memory.
    """
    if len(stored) != part.bytes:
        raise TruncatedFileError(
            f"{len(stored)} bytes, {part.bytes} recorded", where=where, way_out="copy the artifact again"
        )
    wanted = nbytes(part)
    try:
        if coder.codec != "none":  # such a stream carries digests of its own
            raw = coder.decode(stored, raw_bytes=wanted, name=where)
        else:
            check_part(part, stored, where=where)
            raw = bytearray(stored)
    except MemoryError as error:
        raise BackendError(f"{wanted} bytes when decoded, more than this machine's memory", where=where) from error
    if len(raw) != wanted:
        raise FormatError(
            f"{len(raw)} bytes, its shape {list(part.shape)} needs {wanted}",
            where=where,
            way_out="copy the artifact again",
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
        raise ChecksumError("its bytes differ from their recorded hash", where=where, way_out="copy the artifact again")


def serving_parts(
    record: TensorRecord,
    coder: Coder,
    read: Callable[[PartRecord], bytes],
    *,
    where: str = "",
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """All parts of a tensor in the serving layout (codecs.formats.packed).

    read: gives the stored bytes of a part; where: prefix of messages, the file or directory. device: where that layout
    is made, and stays; the CPU by default.

    Raises:
        IntegrityError, BackendError: as decode_part; parts that do not fit each other.
    """
    parts = {
        part.name: decode_part(part, read(part), coder, where=f"{where}{record.name}.{part.name}").to(device)
        for part in record.parts
    }
    if record.format != "packed":
        return parts
    spec = packed.PackedSpec.from_json(dict(record.params), record.name)
    coded = coder.codec != "none"
    packed.check_parts(spec, parts, storage=coded, where=record.name)
    return packed.to_serving(spec, parts, record.name) if coded else parts


def check_growth(record: TensorRecord, *, where: str = "") -> None:
    """Refuse to decode at once what a few stored bytes would make huge, and no base holds to its size.

    Of all values that are not the base's, a few million may be anything; more need stored bytes.

    Raises:
        FormatError: they are too many.
    """
    own = own_values(record)
    if own > _ANY + _GROWTH * record.bytes:
        raise FormatError(
            f"{own} values in {record.bytes} bytes, which takes too much memory at once",
            where=f"{where}{record.name}",
            way_out="`deltacompress restore` writes them piece by piece",
        )


def restored_tensor(record: TensorRecord, parts: dict[str, Tensor], base: Tensor | None, *, where: str = "") -> Tensor:
    """The restored tensor, contiguous, where its parts and its base are, checked against its recorded hash.

    parts: in the serving layout; base: as restore_tensor takes it.

    Raises:
        IntegrityError: parts that do not fit, or a result that is not what was compressed.
        BackendError: too little memory.
    """
    like, told = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta"), f"{where}{record.name}"
    try:
        tensor = restore_tensor(record.format, dict(record.params), parts, base, like, told).contiguous()
    except MemoryError as error:
        raise BackendError(f"shape {list(record.shape)} does not fit into memory", where=told) from error
    if hashlib.sha256(tensor_bytes(tensor.cpu())).hexdigest() != record.sha256:
        raise _another_tensor(record, where)
    return tensor


def restored_pieces(
    record: TensorRecord, sources: Mapping[str, Source], base: Elements | None, *, storage: bool, where: str = ""
) -> Iterator[Tensor]:
    """As restored_tensor, flat and piece by piece; the hash is compared after the last piece.

    sources, storage: as codecs.encoded.restore_pieces takes them. Raises as restored_tensor.
    """
    like = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
    seen = hashlib.sha256()
    for piece in restore_pieces(
        record.format, dict(record.params), sources, base, like, f"{where}{record.name}", storage=storage
    ):
        seen.update(tensor_bytes(piece))
        yield piece
    if seen.hexdigest() != record.sha256:
        raise _another_tensor(record, where)


def check_streams(record: TensorRecord, sources: Mapping[str, Source], *, storage: bool, where: str = "") -> None:
    """Make sure that the parts of a tensor decode, as far as that can be told without its base.

    Streams of codecs that not every machine decodes stay as they are: their digests were compared.

    Raises:
        IntegrityError: they do not decode, or not to what was coded.
    """
    streams = [source.windows for source in sources.values() if isinstance(source, CodedSource)]
    if any(stream.frame.codec != "zstd" for stream in streams):
        return
    rows, told = shared_matrix(record)[0], f"{where}{record.name}"
    check_pieces(record.format, dict(record.params), sources, rows, told, storage=storage)
    for stream in streams:
        stream.check_raw()


def _another_tensor(record: TensorRecord, where: str) -> ChecksumError:
    return ChecksumError(
        "the restored tensor is not what was compressed",
        where=f"{where}{record.name}",
        way_out="copy the artifact again",
    )


def base_rows(
    record: TensorRecord, base: Checkpoint, *, where: str = "", device: torch.device | None = None
) -> Rows | None:
    """What a tensor is a delta against in an opened base: f32 where something is added to it; None for nothing.

    device: as Rows takes it.

    Raises:
        FormatError: the base has no such tensor, or one of another shape.
    """
    if record.base_name is None:
        return None
    info = base.tensors.get(record.base_name)
    rows = record.shape[:1] if record.base_rows is None else (record.base_rows,)
    found = () if info is None else info.shape
    enough = found[:1] == rows if record.base_rows is None else found[:1] >= rows
    if info is None or len(found) != len(record.shape) or found[1:] != record.shape[1:] or not enough:
        has = "has no such tensor" if info is None else f"has {list(info.shape)}"
        raise FormatError(
            f"{list(record.shape)} is a delta of {record.base_name}, of which its own base {has}",
            where=f"{where}{record.name}",
            way_out="copy the artifact again",
        )
    wide = record.status not in ("exact", "identical")
    return Rows(base, record.base_name, rows=record.base_rows, wide=wide, device=device)
