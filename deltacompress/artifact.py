"""Reading an artifact: a directory with manifest.json, delta-*.safetensors and the fine-tuned model's side files.

`load_delta` checks the manifest and the shard headers, and reads tensors when asked; `verify` reads every byte. Writing
is publication.py's; restoring a whole checkpoint is restoration.py's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress import decoding, lossless
from deltacompress.checkpoint import Checkpoint, is_side_file
from deltacompress.codecs import packed
from deltacompress.errors import (
    BaseMismatchError,
    CheckpointError,
    ChecksumError,
    FormatError,
    InputError,
    TruncatedFileError,
)
from deltacompress.manifest import MANIFEST, FileRecord, Manifest, PartRecord, TensorRecord, read_manifest
from deltacompress.reporter import SILENT, Reporter
from deltacompress.safetensors_header import TensorSpan, read_header
from deltacompress.summary import summarize

_CHUNK = 1 << 22
_AGAIN = "copy the artifact again"


class Delta:
    """One opened artifact; make it with `load_delta`.

    path: its directory; manifest: the checked manifest; tensors: name -> TensorRecord.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        specs: dict[str, packed.PackedSpec],
        spans: dict[str, tuple[Path, TensorSpan]],
        *,
        device: str = "auto",
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.tensors = {record.name: record for record in manifest.tensors}
        self._specs, self._spans = specs, spans
        self._device = device

    @property
    def artifact_bytes(self) -> int:
        """Bytes of every file of the artifact, manifest included."""
        files = (*self.manifest.shards, *self.manifest.files)
        return (self.path / MANIFEST).stat().st_size + sum(record.bytes for record in files)

    def record(self, name: str) -> TensorRecord:
        """The record that holds tensor `name`: its own, or that of the tensor it is an alias of.

        Raises:
            InputError: the artifact has no such tensor.
        """
        if name not in self.tensors:
            raise InputError(f"{self.path}: no tensor named {name}; `deltacompress inspect` lists them")
        record = self.tensors[name]
        return self.tensors[record.alias_of] if record.alias_of else record

    def spec(self, name: str) -> packed.PackedSpec | None:
        """How the parts of tensor `name` decode; None where its format is not `packed`. Raises as `record`."""
        return self._specs.get(self.record(name).name)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Parts of tensor `name` (of its twin, for an alias) in the serving layout (codecs.packed), as CPU tensors.

        Raises:
            InputError: no such tensor.
            IntegrityError: a part is damaged.
            BackendError: this machine cannot decode its lossless codec.
        """
        record = self.record(name)
        codec = self.manifest.lossless
        return decoding.serving_parts(
            record,
            codec,
            lambda part: self.stored_part(record.name, part),
            where=f"{self.path}: ",
            device=self._device,
        )

    def stored_part(self, name: str, part: PartRecord) -> bytes:
        """The bytes of one part as they lie in their shard, unchecked but for their number.

        Raises:
            TruncatedFileError: the shard is shorter than it was.
        """
        path, span = self.where(name, part)
        with path.open("rb") as file:
            file.seek(span.begin)
            raw = file.read(span.info.nbytes)
        if len(raw) != span.info.nbytes:
            raise TruncatedFileError(f"{path}: cut short at {name}.{part.name}; {_AGAIN}")
        return raw

    def where(self, name: str, part: PartRecord) -> tuple[Path, TensorSpan]:
        """The shard that one part lies in, and its bytes there."""
        return self._spans[f"{name}.{part.name}"]

    def restored(self, name: str, base: Tensor | None) -> Tensor:
        """The restored tensor `name`, checked against its recorded hash.

        base: what `read_base` gives for it.

        Raises:
            IntegrityError: damaged parts, or a result that differs from what was compressed.
        """
        return decoding.restored_tensor(self.record(name), self.parts(name), base, where=f"{self.path}: ")

    def read_base(self, name: str, base: Checkpoint) -> Tensor | None:
        """What tensor `name` is a delta against, from an opened base: as planning.Plan.reference gives it."""
        record = self.record(name)
        if record.base_name is None:
            return None
        if record.base_name not in base.tensors:
            raise FormatError(
                f"{self.path}: {name} is a delta of {record.base_name}, which its own base does not have; {_AGAIN}"
            )
        tensor = base.read(record.base_name)
        if record.base_rows is not None:
            tensor = tensor[: record.base_rows]
        if record.status in ("exact", "identical"):
            return tensor
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16, torch.float64) else tensor

    def check_base(self, base: Checkpoint) -> None:
        """Make sure that `base` is the one this delta was made from.

        Raises:
            BaseMismatchError: shows both hashes and names the first tensor that differs.
        """
        if self.manifest.scope == "full":  # it decodes on its own
            return
        wanted, found = self.manifest.base.content_hash, base.fingerprint()
        if found == wanted:
            return
        told = (
            f"{base.path}: not the base of this delta ({self.manifest.base.name} {wanted[:12]}, this is {found[:12]})"
        )
        for record in self.manifest.tensors:
            if record.base_name is None or record.base_sha256 is None:
                continue
            if record.base_name not in base.tensors:
                raise BaseMismatchError(f"{told}: it has no tensor {record.base_name}; give the original base")
            if base.sha256(record.base_name) != record.base_sha256:
                raise BaseMismatchError(f"{told}: tensor {record.base_name} differs; give the original base")
        raise BaseMismatchError(f"{told}: its list of tensors differs; give the original base")

    def summary(self) -> dict[str, Any]:
        """Plain data about the artifact: sizes, ratio, recipe, and a row per tensor (what `inspect --json` prints)."""
        return summarize(self.manifest, artifact=self.path, artifact_bytes=self.artifact_bytes)


def load_delta(path: str | Path, *, device: str = "auto") -> Delta:
    """Open the artifact at `path`; checks manifest, file sizes and headers, reads no tensor.

    device: where the lossless stage is decoded ("auto", "cpu" or "cuda"); the tensors come back on the CPU.

    Raises:
        InputError: no such directory.
        TruncatedFileError: a file is missing, or its size differs from the recorded one.
        CheckpointError: a shard that may not be read.
        ChecksumError, SchemaVersionError, FormatError: as manifest.read_manifest; headers that do not fit the manifest.
    """
    root = Path(path)
    if not root.is_dir():
        raise InputError(
            f"{root}: no such artifact directory; give one that `compress` published, "
            "or the name of a zoo's entry and the zoo (--zoo or DELTACOMPRESS_ZOO)"
        )
    manifest = read_manifest(root)
    for record in (*manifest.shards, *manifest.files):
        _check_size(root / record.file, record)
    for file in manifest.files:
        if not is_side_file(file.file):
            raise FormatError(
                f"{root}: {file.file} is no config or tokenizer file, and an artifact holds no other; {_AGAIN}"
            )
    specs = {
        tensor.name: packed.PackedSpec.from_json(dict(tensor.params), tensor.name)
        for tensor in manifest.tensors
        if tensor.format == "packed"
    }
    return Delta(root, manifest, specs, _spans(root, manifest), device=device)


def verify(path: str | Path, *, base: str | Path | None = None, reporter: Reporter | None = None) -> Delta:
    """Check every byte of an artifact; with `base`, also restore every tensor and check it.

    Raises:
        IntegrityError: the artifact is damaged, or `base` is not its base.
        BackendError: with `base`, if this machine cannot decode the lossless codec.
    """
    reporter = reporter or SILENT
    delta = load_delta(path)
    files = (*delta.manifest.shards, *delta.manifest.files)
    reporter.phase("checking files", len(files))
    for file in files:
        check_file(delta.path / file.file, file)
        reporter.step(file.file)
    checkpoint = None
    if base is not None:
        checkpoint = Checkpoint.open(base)
        delta.check_base(checkpoint)
    reporter.phase("checking tensors", len(delta.tensors))
    for name, record in delta.tensors.items():
        for part in record.parts:
            decoding.check_part(part, delta.stored_part(name, part), where=f"{delta.path}: {name}.{part.name}")
        if record.status != "alias":
            if checkpoint is not None:
                delta.restored(name, delta.read_base(name, checkpoint))
            else:
                _check_streams(delta, record)
        reporter.step(name)
    return delta


def _check_streams(delta: Delta, record: TensorRecord) -> None:
    """Without a base: every stream is intact and, where this machine can decode it, decodes."""
    codec = delta.manifest.lossless
    if codec in ("none", "zstd"):
        parts = delta.parts(record.name)
        if (spec := delta.spec(record.name)) is not None:
            try:
                packed.decode(spec, parts)
            except (KeyError, ValueError, RuntimeError) as error:
                raise FormatError(f"{record.name}: the parts do not decode ({error}); {_AGAIN}") from error
        return
    for part in record.parts:
        where = f"{delta.path}: {record.name}.{part.name}"
        stored = delta.stored_part(record.name, part)
        found = lossless.stream_codec(stored, raw_bytes=decoding.raw_bytes(part), name=where)
        if found != codec:
            raise FormatError(f"{where}: coded with {found}, the manifest says {codec}; {_AGAIN}")


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TruncatedFileError(f"{path}: missing; {_AGAIN}") from error
    if size != record.bytes:
        raise TruncatedFileError(f"{path}: {size} bytes, {record.bytes} recorded; {_AGAIN}")


def check_file(path: Path, record: FileRecord) -> None:
    """Compare a whole file with its recorded hash.

    Raises:
        ChecksumError: they differ.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != record.sha256:
        raise ChecksumError(f"{path}: its bytes differ from their recorded hash; {_AGAIN}")


def _spans(root: Path, manifest: Manifest) -> dict[str, tuple[Path, TensorSpan]]:
    """Where each part lies; parts of manifest and shards must be the same, one for one."""
    spans: dict[str, tuple[Path, TensorSpan]] = {}
    for shard in manifest.shards:
        path = root / shard.file
        try:
            header = read_header(path)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # no permission: no word on the bytes
                raise
            raise ChecksumError(str(error)) from error
        for name, span in header.tensors.items():
            if name in spans:
                raise FormatError(f"{root}: part {name} stands in two shards; {_AGAIN}")
            spans[name] = (path, span)
    wanted = dict(_stored_parts(manifest))
    if spans.keys() != wanted.keys():
        odd = min(spans.keys() ^ wanted.keys())
        raise FormatError(f"{root}: part {odd} is not in both manifest and shards; {_AGAIN}")
    for key, size in wanted.items():
        if spans[key][1].info.nbytes != size:
            found = spans[key][1].info.nbytes
            raise FormatError(f"{root}: part {key} has {found} bytes, the manifest says {size}; {_AGAIN}")
    return spans


def _stored_parts(manifest: Manifest) -> Iterator[tuple[str, int]]:
    for record in manifest.tensors:
        for part in record.parts:
            yield f"{record.name}.{part.name}", part.bytes
