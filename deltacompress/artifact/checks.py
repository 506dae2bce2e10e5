"""What the fields of a manifest owe each other, checked before a byte of any other file is read.

Whoever wrote a manifest may have declared any size; here each is held against another that costs the writer something:
parts against the bytes that lie in the shards, rows and columns against the tensor, tensors against the model. All of
it is arithmetic on integers, so a file of a few kilobytes cannot ask for gigabytes. docs/formats.md lists the bounds.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from deltacompress.checkpoints.header import ITEMSIZE, MAX_NUMEL
from deltacompress.checkpoints.names import RULE, is_tensor_name, shown
from deltacompress.checkpoints.side_files import AS_THEY_ARE, FRAME, MAX_SIDE_FILE_BYTES, is_side_file
from deltacompress.codecs.formats.spec import AGAIN
from deltacompress.codecs.formats.table import FORMATS
from deltacompress.errors import FormatError
from deltacompress.files.places import MANIFEST
from deltacompress.lossless.stream import HEADER_BYTES, MOST_RAW_PER_BYTE

if TYPE_CHECKING:
    from deltacompress.artifact.records import Manifest, PartRecord, TensorRecord

_OWN_VALUES, _OWN_VALUES_PER_BYTE = 1 << 28, 1 << 12
"""Values without a base that an artifact may hold, and more for each stored byte: some zeros code to nearly nothing,
a whole model of them does not. So what `restore` writes is in proportion to what it reads."""


def check_relations(manifest: Manifest, where: str) -> None:
    """Refuse a manifest that contradicts itself.

    Raises:
        FormatError: names the tensor, and what does not fit.
    """
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    if [tensor.name for tensor in manifest.tensors] != sorted(tensors):
        raise FormatError("tensors are not listed once each, by name", where=where, way_out=AGAIN)
    _check_files(manifest, where)
    for tensor in manifest.tensors:
        check_tensor(tensor, where, scope=manifest.scope, lossless=manifest.lossless)
        if tensor.status == "alias" or tensor.alias_of is not None:
            _check_alias(tensor, tensors.get(tensor.alias_of or ""), where)
    _check_totals(manifest, where)


def _check_files(manifest: Manifest, where: str) -> None:
    """The names of all files, and what may be a side file; of one that is stored as a zstd frame, what one can hold."""
    names = [MANIFEST, *(record.file for record in (*manifest.shards, *manifest.files))]
    names += [record.file + FRAME for record in manifest.files]  # each has one of its two names
    if len(set(names)) != len(names):
        raise FormatError("a file is listed twice", where=where, way_out=AGAIN)
    for record in manifest.files:
        if not is_side_file(record.file):
            told = "is no config or tokenizer file, and an artifact holds no other"
            raise FormatError(f"{record.file} {told}", where=where, way_out=AGAIN)
        if record.bytes > MAX_SIDE_FILE_BYTES:
            raise FormatError(
                f"{record.file} has {record.bytes} bytes, as no such file has", where=where, way_out=AGAIN
            )
        if record.zstd is None:
            continue
        if manifest.lossless == "none" or record.file in AS_THEY_ARE:
            told = f"{record.file} is a zstd frame, which no config is, and nothing with lossless none"
            raise FormatError(told, where=where, way_out=AGAIN)
        if not record.zstd.bytes < record.bytes <= MOST_RAW_PER_BYTE["zstd"] * record.zstd.bytes:
            told = f"{record.zstd.bytes} bytes of zstd are no frame of the {record.bytes} of {record.file}"
            raise FormatError(told, where=where, way_out=AGAIN)
    if odd := [shard.file for shard in manifest.shards if shard.zstd is not None]:
        raise FormatError(f"{odd[0]} is a zstd frame, which no shard is", where=where, way_out=AGAIN)


def check_tensor(tensor: TensorRecord, where: str, *, scope: str, lossless: str) -> None:
    """Refuse a record that contradicts itself, whatever it says of other tensors; raises as check_relations."""
    try:
        _check_fields(tensor, scope=scope)
    except FormatError as error:  # there are thousands of parts, and hardly ever one to be named
        raise error.retold(FormatError, within=f"{where}: {shown(tensor.name)[1:-1]}") from error
    for part in tensor.parts:
        try:
            _check_part(part, lossless)
        except FormatError as error:
            raise error.retold(FormatError, within=f"{where}: {tensor.name}: part {part.name}") from error
    alias = tensor.status == "alias" or tensor.alias_of is not None
    if not alias and (check := FORMATS[tensor.format].check):
        check(tensor, f"{where}: {tensor.name}", storage=lossless != "none")


def nbytes(record: TensorRecord | PartRecord) -> int:
    """Bytes of a restored tensor, or of a part before the lossless stage."""
    return math.prod(record.shape) * ITEMSIZE[record.dtype]


def own_values(tensor: TensorRecord) -> int:
    """Values of a tensor that are no differences from a base's, which would have to be as large."""
    if tensor.status == "alias":
        return 0
    whole = math.prod(tensor.shape)
    if tensor.base_name is None:
        return whole
    return 0 if tensor.base_rows is None else whole - tensor.base_rows * math.prod(tensor.shape[1:])


def _check_fields(tensor: TensorRecord, *, scope: str) -> None:
    """Its names, its shape, its figures, and whether there is a base where one belongs."""
    if not is_tensor_name(tensor.name):
        raise FormatError(f"is no tensor name ({RULE})", way_out=AGAIN)
    if _is_too_large(tensor.shape):
        raise FormatError(f"shape {list(tensor.shape)} is larger than any tensor", way_out=AGAIN)
    for part in tensor.parts:
        if _is_too_large(part.shape):
            told = f"shape {list(part.shape)} of part {part.name} is larger than any tensor"
            raise FormatError(told, way_out=AGAIN)
    if tensor.status not in FORMATS[tensor.format].statuses or (tensor.format == "none" and tensor.parts):
        raise FormatError(f"status {tensor.status}, format {tensor.format}: these contradict", way_out=AGAIN)
    if tensor.base_name not in (None, tensor.name) and not is_tensor_name(tensor.base_name):
        raise FormatError(f"base_name {shown(tensor.base_name)} is no tensor name ({RULE})", way_out=AGAIN)
    for field, value in (("loss", tensor.loss), ("damp_fraction", tensor.damp_fraction)):
        if value is not None and value < 0:
            raise FormatError(f"{field} {value} is below 0", way_out=AGAIN)
    based = tensor.base_name is not None
    if based != (tensor.base_sha256 is not None) or (tensor.base_rows is not None and not based):
        raise FormatError("base_name, base_rows and base_sha256 contradict", way_out=AGAIN)
    may_have_one = scope == "delta" and tensor.status not in ("added", "alias")
    if based != may_have_one or (tensor.format == "none" and tensor.status != "alias" and not based):
        raise FormatError(f"status {tensor.status} with base {tensor.base_name}, scope {scope}", way_out=AGAIN)
    if tensor.base_rows is not None and (not tensor.shape or tensor.base_rows > tensor.shape[0]):
        raise FormatError(f"{tensor.base_rows} rows of the base for shape {list(tensor.shape)}", way_out=AGAIN)
    if tensor.format == "none" and tensor.base_rows not in (None, *tensor.shape[:1]):
        raise FormatError(f"stored without parts, but the base has {tensor.base_rows} rows of it", way_out=AGAIN)


@lru_cache(maxsize=1024)
def _is_too_large(shape: tuple[int, ...]) -> bool:
    return math.prod(filter(None, shape)) > MAX_NUMEL


def _check_part(part: PartRecord, lossless: str) -> None:
    """Its bytes against its shape: the same where nothing is coded, else no more than the codec can make of them."""
    raw = nbytes(part)
    if lossless == "none":
        if part.blake3 is None:
            raise FormatError("no blake3 hash, which lossless none needs", way_out="compress again")
        if part.bytes != raw:
            raise FormatError(f"{part.bytes} bytes are not its {part.dtype} {list(part.shape)}", way_out=AGAIN)
    elif part.blake3 is not None:
        raise FormatError("a blake3 hash, which only lossless none has", way_out=AGAIN)
    elif raw > MOST_RAW_PER_BYTE[lossless] * (part.bytes - HEADER_BYTES):
        raise FormatError(
            f"{part.bytes} bytes of {lossless} cannot hold {part.dtype} {list(part.shape)}", way_out=AGAIN
        )


def _check_alias(tensor: TensorRecord, twin: TensorRecord | None, where: str) -> None:
    fits = twin is not None and (twin.dtype, twin.shape, twin.sha256) == (tensor.dtype, tensor.shape, tensor.sha256)
    if tensor.status != "alias" or twin is None or twin.status == "alias" or not fits:
        raise FormatError(f"{tensor.name} is no fitting alias of {tensor.alias_of}", where=where, way_out=AGAIN)


def _check_totals(manifest: Manifest, where: str) -> None:
    """The tensors are those of the fine-tuned model: as many, and no larger than its files or than can be stored."""
    count, told = len(manifest.tensors), manifest.finetuned
    if count != told.tensors:
        raise FormatError(f"lists {count} tensors, the fine-tuned model has {told.tensors}", where=where, way_out=AGAIN)
    own, stored = sum(map(own_values, manifest.tensors)), sum(tensor.bytes for tensor in manifest.tensors)
    if own > _OWN_VALUES + _OWN_VALUES_PER_BYTE * stored:
        raise FormatError(
            f"{own} values that no base has in {stored} bytes, as of no model", where=where, way_out=AGAIN
        )
    total = sum(nbytes(tensor) for tensor in manifest.tensors)
    if total > told.bytes:
        raise FormatError(
            f"its tensors take {total} bytes, the fine-tuned model {told.bytes}", where=where, way_out=AGAIN
        )
