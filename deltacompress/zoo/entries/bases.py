"""A base model's identity as an entry: hub id, revision, what every tensor and file hashes to. Its weights stay where
they are.

Two things make a base the right one: its tensors, however they are dealt out to files, and what its tokenizer makes of
text. Weights with another tokenizer pass every check of shapes and answer nonsense, so the tokenizer is part of the
identity: the files that define it, without what saving changes (spelling of the JSON, padding and truncation settings).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import FailFast, Field

from deltacompress.checkpoints.header import TensorSpan, load_json_object
from deltacompress.checkpoints.side_files import (
    GENERATION_CONFIG,
    MAX_SIDE_FILE_BYTES,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    matches,
)
from deltacompress.checkpoints.weight_files import content_hash, find_weights
from deltacompress.errors import BaseMismatchError, CheckpointError
from deltacompress.files import regular
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest
from deltacompress.files.hashing import hash_chunks, hash_file, read_chunks, sha256_hex
from deltacompress.files.places import CONFIG
from deltacompress.files.regular import ANYWHERE, open_regular, read_bytes
from deltacompress.zoo.entries.artifact import Described
from deltacompress.zoo.errors import DamagedRecordError
from deltacompress.zoo.ledger import blobs, canonical
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.canonical import Strict
from deltacompress.zoo.ledger.entry import BASE, Descriptor, EntryManifest, Lineage
from deltacompress.zoo.ledger.names import check_texts
from deltacompress.zoo.ledger.records import Sha256, Size, Text
from deltacompress.zoo.store.base import Store

MAX_IDENTITY_BYTES = 16 << 20
"""And canonical.MAX_MEMORY: about 60,000 tensors."""
_OTHER = (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS)
_RUNTIME = ("padding", "truncation")  # what a program last asked of the tokenizer, saved with it


class BaseTensor(Strict):
    """One tensor of the base."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Size, ...], FailFast()]
    sha256: Sha256


class BaseFile(Strict):
    """One file of the base."""

    file: Text
    bytes: Size
    sha256: Sha256


class BaseIdentity(Strict):
    """The config of a base-ref entry.

    content_hash: content_hash of `tensors`; bytes: of `files` together; tokenizer: file that defines it ->
    sha256 of what it says.
    """

    content_hash: Sha256
    hub_id: Text | None
    revision: Text | None
    bytes: Size
    tensors: Annotated[tuple[BaseTensor, ...], FailFast()]
    tokenizer: dict[Annotated[str, Field(max_length=200)], Sha256]
    files: Annotated[tuple[BaseFile, ...], FailFast()]


def describe_base(directory: Path, *, hub_id: str | None, revision: str | None) -> Described:
    """Hash the checkpoint at `directory`; stores nothing of it but its identity.

    Raises:
        CheckpointError: not a checkpoint, damaged or unreadable.
    """
    try:
        spans, weights = find_weights(directory)
        tensors = tuple(
            BaseTensor(name=name, dtype=span.info.dtype, shape=span.info.shape, sha256=_hash(path, span))
            for name, (path, span) in sorted(spans.items())
        )
        files = tuple(_file(path) for path in sorted({*weights, *_side_files(directory)}))
        tokenizer = _tokenizer(directory)
    except OSError as error:
        raise regular.unreadable(CheckpointError, error.filename or directory, error) from error
    name = hub_id or directory.resolve().name
    check_texts({"hub id": hub_id, "revision": revision, "its name": name}, str(directory))
    identity = BaseIdentity(
        content_hash=_content_hash(tensors),
        hub_id=hub_id,
        revision=revision,
        bytes=sum(file.bytes for file in files),
        tensors=tensors,
        tokenizer=tokenizer,
        files=files,
    )
    raw = canonical_bytes(identity.model_dump(mode="json"))
    if not canonical.fits(raw, MAX_IDENTITY_BYTES):
        raise CheckpointError(f"{len(tensors)} tensors are more than a base-ref holds", where=directory)
    blob = Blob(sha256_hex(raw), len(raw), lambda: (raw,), str(directory))
    entry = EntryManifest(
        kind="base-ref",
        config=Descriptor(media_type=BASE, digest=blob.digest, size=blob.size),
        lineage=Lineage(base=identity.content_hash, base_name=name, relation="base"),
        summary={
            "hub_id": hub_id,
            "revision": revision,
            "base_bytes": identity.bytes,
            "tensors": len(tensors),
            "tokenizer": canonical_digest(dict(tokenizer)) if tokenizer else None,
        },
    )
    return Described(entry, [blob])


def identity_in(store: Store, entry: EntryManifest, name: str) -> BaseIdentity:
    """What a base-ref `name` of a store is.

    Raises:
        IntegrityError: it is damaged.
    """
    config = entry.config
    raw = blobs.read(store, config.digest, config.size, limit=MAX_IDENTITY_BYTES, what=f"identity of {name}")
    return parse_base(raw, f"{store.where}: {name}")


def parse_base(raw: bytes, where: str) -> BaseIdentity:
    """Check the config of a base-ref.

    Raises:
        DamagedRecordError: not one.
    """
    identity = canonical.validate(BaseIdentity, canonical.parse(raw, where, limit=MAX_IDENTITY_BYTES), where)
    if identity.content_hash != _content_hash(identity.tensors):
        raise DamagedRecordError("its list of tensors is not the one that its content hash is of", where=where)
    return identity


def check_base(identity: BaseIdentity, directory: Path, name: str) -> None:
    """Make sure that the checkpoint at `directory` is the base `name`; how it is sharded does not matter.

    Raises:
        BaseMismatchError: names the first tensor or tokenizer file that differs.
        CheckpointError: not a checkpoint, damaged or unreadable.
    """
    try:
        _check_tensors(identity, find_weights(directory)[0], directory, f"not the base {name}")
    except OSError as error:
        raise regular.unreadable(CheckpointError, error.filename or directory, error) from error
    check_tokenizer(identity, directory, name)


def check_tokenizer(identity: BaseIdentity, directory: Path, name: str) -> None:
    """The quick half of check_base; raises as it does."""
    told = f"not the base {name}"
    try:
        tokenizer = _tokenizer(directory)
    except OSError as error:
        raise regular.unreadable(CheckpointError, error.filename or directory, error) from error
    common = sorted(identity.tokenizer.keys() & tokenizer.keys())
    for file in common:
        if tokenizer[file] != identity.tokenizer[file]:
            raise BaseMismatchError(
                f"{told}: its tokenizer is another ({file} differs), whatever its weights are",
                where=directory,
                way_out="give the original base",
            )
    if not common and (tokenizer or identity.tokenizer):
        odd = min(tokenizer.keys() | identity.tokenizer.keys())
        raise BaseMismatchError(
            f"{told}: {odd} is in only one of the two, so their tokenizers cannot be compared",
            where=directory,
            way_out="copy it",
        )


def _check_tensors(
    identity: BaseIdentity, spans: dict[str, tuple[Path, TensorSpan]], directory: Path, told: str
) -> None:
    known = {tensor.name: tensor for tensor in identity.tensors}
    if odd := sorted(known.keys() ^ spans.keys()):
        has = "lacks" if odd[0] in known else "has a further"
        raise BaseMismatchError(f"{told}: it {has} tensor {odd[0]}", where=directory, way_out="give the original base")
    for name, tensor in known.items():  # what costs nothing first
        info = spans[name][1].info
        if (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
            raise BaseMismatchError(
                f"{told}: tensor {name} is {info.dtype} {list(info.shape)}, not {tensor.dtype} {list(tensor.shape)}",
                where=directory,
                way_out="give the original base",
            )
    for name, tensor in known.items():
        if _hash(*spans[name]) != tensor.sha256:
            raise BaseMismatchError(f"{told}: tensor {name} differs", where=directory, way_out="give the original base")


def _content_hash(tensors: tuple[BaseTensor, ...]) -> str:
    return content_hash((one.name, one.dtype, one.shape, one.sha256) for one in tensors)


def _side_files(directory: Path) -> list[Path]:
    wanted = (*TOKENIZER_FILES, *_OTHER)
    return [file for file in directory.iterdir() if matches(file.name, wanted) and not file.is_dir()]


def _tokenizer(directory: Path) -> dict[str, str]:
    """File -> sha256 of what it says about the tokenizer."""
    found = {}
    for file in sorted(_side_files(directory)):
        if not matches(file.name, TOKENIZER_FILES):
            continue
        raw = read_bytes(file, at_most=MAX_SIDE_FILE_BYTES, links=ANYWHERE)
        if file.suffix == ".json":
            data = load_json_object(raw, str(file))
            try:
                raw = canonical_bytes({key: value for key, value in data.items() if key not in _RUNTIME})
            except ValueError as error:
                raise CheckpointError(
                    f"holds a number that is none ({error})", where=file, way_out="get it again"
                ) from error
        found[file.name] = sha256_hex(raw)
    return found


def _hash(path: Path, span: TensorSpan) -> str:
    with open_regular(path, links=ANYWHERE) as file:
        file.seek(span.begin)
        digest, size = hash_chunks(read_chunks(file, span.info.nbytes))
    if size != span.info.nbytes:
        raise CheckpointError("cut short while it was read", where=path, way_out="get it again")
    return digest


def _file(path: Path) -> BaseFile:
    digest, size = hash_file(path, links=ANYWHERE)
    return BaseFile(file=path.name, bytes=size, sha256=digest)
