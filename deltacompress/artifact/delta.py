"""Reading an artifact: a directory with manifest.json, delta-*.safetensors and the fine-tuned model's side files.

`load_delta` checks the manifest and the shard headers, without torch, and reads tensors when asked; `verify` reads
every byte. Writing is publication.py's; restoring a whole checkpoint is restoration.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltacompress import lossless
from deltacompress.arguments import checked
from deltacompress.artifact.manifest import digest_told, need_directory, parse_manifest, read_manifest_bytes
from deltacompress.artifact.parts import check_file, check_hashes, check_present, open_file, open_parts, reader
from deltacompress.artifact.records import FileRecord, Manifest, PartRecord, TensorRecord
from deltacompress.artifact.shards import spans_of
from deltacompress.artifact.side_by_side import side_by_side
from deltacompress.artifact.summary import summarize
from deltacompress.checkpoints.header import TensorSpan
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.formats.spec import PackedSpec
from deltacompress.errors import BaseMismatchError, InputError
from deltacompress.files.places import MANIFEST
from deltacompress.reporter import SILENT, Reporter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from deltacompress.checkpoints.rows import Rows
    from deltacompress.codecs.formats.pieces import Source
    from deltacompress.lossless import Coder


_THREADS = 4
"""That check a file each, or a tensor: they hash, and decode, some MiB at a time."""


class Delta:
    """One opened artifact; make it with `load_delta`.

    path: its directory; manifest: the checked manifest; digest: as Manifest.digest; tensors: name -> TensorRecord.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        digest: str,
        specs: dict[str, PackedSpec],
        spans: dict[str, tuple[Path, TensorSpan]],
        coder: Coder,
    ) -> None:
        self.path, self.manifest, self.digest = path, manifest, digest
        self.tensors = {record.name: record for record in manifest.tensors}
        self._specs, self._spans, self._coder = specs, spans, coder

    @property
    def artifact_bytes(self) -> int:
        """Bytes of every file of the artifact, manifest included."""
        return (self.path / MANIFEST).stat().st_size + sum(record.bytes for record in self.manifest.stored_files)

    def record(self, name: str) -> TensorRecord:
        """The record that holds tensor `name`: its own, or that of the tensor it is an alias of.

        Raises:
            InputError: the artifact has no such tensor.
        """
        if name not in self.tensors:
            raise InputError(f"no tensor named {name}", where=self.path, way_out="`deltacompress inspect` lists them")
        record = self.tensors[name]
        return self.tensors[record.alias_of] if record.alias_of else record

    def spec(self, name: str) -> PackedSpec | None:
        """How the parts of tensor `name` decode; None where its format is not `packed`. Raises as `record`."""
        return self._specs.get(self.record(name).name)

    def parts(self, name: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """Parts of tensor `name` (of its twin, for an alias) in the serving layout; on the CPU by default.

        Raises:
            InputError: no such tensor.
            IntegrityError: a part is damaged.
            BackendError: this machine cannot decode its lossless codec.
        """
        from deltacompress.artifact import decoding

        record = self.record(name)
        decoding.check_growth(record, where=f"{self.path}: ")
        return decoding.serving_parts(
            record,
            self._coder,
            lambda part: self.stored_part(record.name, part),
            where=f"{self.path}: ",
            device=device,
        )

    def stored_part(self, name: str, part: PartRecord) -> bytes:
        """The bytes of one part as they lie in their shard, unchecked but for their number.

        Raises:
            TruncatedFileError: the shard is shorter than it was.
        """
        path, span = self.where(name, part)
        with open_file(path) as file:
            return bytes(reader(file, span, f"{path}: {name}.{part.name}")(0, part.bytes))

    def check_stored(self, name: str, part: PartRecord) -> None:
        """Compare the stored bytes of one part with their recorded hashes; raises ChecksumError."""
        path, span = self.where(name, part)
        told = f"{self.path}: {name}.{part.name}"
        with open_file(path) as file:
            check_hashes(part, reader(file, span, told), where=told)

    def where(self, name: str, part: PartRecord) -> tuple[Path, TensorSpan]:
        """The shard that one part lies in, and its bytes there."""
        return self._spans[f"{name}.{part.name}"]

    def restored(self, name: str, base: Tensor | None, device: torch.device | None = None) -> Tensor:
        """The restored tensor `name`, checked against its recorded hash.

        base: what `read_base` gives for it. device: where that is, and where it is restored: the CPU by default. Of
        coded tensors a GPU gives the bytes that a CPU gives: it is exact.

        Raises:
            IntegrityError: damaged parts, or a result that differs from what was compressed.
        """
        from deltacompress.artifact import decoding

        return decoding.restored_tensor(self.record(name), self.parts(name, device), base, where=f"{self.path}: ")

    def restored_pieces(self, name: str, base: Checkpoint | None) -> Iterator[Tensor]:
        """As `restored`, flat and piece by piece, from the opened base: memory does not grow with the tensor.

        The hash is compared after the last piece, so whoever uses the pieces before must be able to take that back.
        Raises as `restored`.
        """
        from deltacompress.artifact import decoding

        record = self.record(name)
        with self._open_parts(record) as sources:
            yield from decoding.restored_pieces(
                record,
                sources,
                self.base_rows(name, base),
                storage=self.manifest.lossless != "none",
                where=f"{self.path}: ",
            )

    def check_streams(self, name: str) -> None:
        """Without a base: every part is as it was stored and, where any machine can decode its codec, decodes.

        Raises:
            IntegrityError: a part is damaged, or parts do not fit each other.
        """
        from deltacompress.artifact import decoding

        record = self.record(name)
        with self._open_parts(record) as sources:
            decoding.check_streams(record, sources, storage=self.manifest.lossless != "none", where=f"{self.path}: ")

    def read_base(self, name: str, base: Checkpoint, device: torch.device | None = None) -> Tensor | None:
        """What tensor `name` is a delta against, from an opened base: as planning.Plan.reference gives it."""
        rows = self.base_rows(name, base, device)
        return None if rows is None else rows.read(0, math.prod(rows.shape)).reshape(rows.shape)

    def base_rows(self, name: str, base: Checkpoint | None, device: torch.device | None = None) -> Rows | None:
        """As `read_base`, to be read piece by piece.

        Raises:
            FormatError: the base has no such tensor, or one of another shape.
        """
        from deltacompress.artifact import decoding

        if base is None:
            return None
        return decoding.base_rows(self.record(name), base, where=f"{self.path}: ", device=device)

    def _open_parts(self, record: TensorRecord) -> AbstractContextManager[dict[str, Source]]:
        return open_parts(record, self.where, self._coder, where=f"{self.path}: ")

    def check_base(self, base: Checkpoint) -> None:
        """Make sure that `base` is the one this delta was made from.

        Raises:
            BaseMismatchError: shows both hashes and names the first tensor that differs.
            FormatError: a tensor is a delta of one that the base does not have.
        """
        if self.manifest.scope == "full":  # it decodes on its own
            return
        wanted, found = self.manifest.base.content_hash, base.fingerprint()
        if found == wanted:
            for name in self.tensors:
                self.base_rows(name, base)
            return
        told = f"not the base of this delta ({self.manifest.base.name} {wanted[:12]}, this is {found[:12]})"
        raise BaseMismatchError(f"{told}: {self._difference(base)}", where=base.path, way_out="give the original base")

    def _difference(self, base: Checkpoint) -> str:
        for record in self.manifest.tensors:
            if record.base_name is None or record.base_sha256 is None:
                continue
            if record.base_name not in base.tensors:
                return f"it has no tensor {record.base_name}"
            if base.sha256(record.base_name) != record.base_sha256:
                return f"tensor {record.base_name} differs"
        return "its list of tensors differs"

    def entropy(self, name: str) -> float:
        """Bytes that the parts of tensor `name`, which there must be, take at their order-0 entropies."""
        from deltacompress.lossless.entropy import order_zero

        with self._open_parts(self.tensors[name]) as sources:
            return sum(order_zero(source) for source in sources.values())

    def summary(self, *, entropy: bool = False) -> dict[str, Any]:
        """Plain data, a row per tensor too (what `inspect --json` prints). entropy: that of all parts, all read."""
        found = {name: self.entropy(name) for name in self.tensors} if entropy else None
        return summarize(self.manifest, artifact=self.path, artifact_bytes=self.artifact_bytes, entropy=found)


@checked
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
    need_directory(root)
    raw = read_manifest_bytes(root)
    manifest = parse_manifest(raw, str(root / MANIFEST))
    check_present(root, manifest)
    specs = {
        tensor.name: PackedSpec.from_json(dict(tensor.params), tensor.name)
        for tensor in manifest.tensors
        if tensor.format == "packed"
    }
    coder = lossless.coder(manifest.lossless, device=device, encode=False)
    return Delta(root, manifest, digest_told(raw), specs, spans_of(root, manifest), coder)


@checked
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
    with closing(side_by_side(partial(_checked_file, delta.path), files, _THREADS)) as checked_files:
        for file in checked_files:
            reporter.step(file.file)
    checkpoint = None
    if base is not None:
        checkpoint = Checkpoint.open(base)
        delta.check_base(checkpoint)
    reporter.phase("checking tensors", len(delta.tensors))
    large = checkpoint is not None or delta.manifest.lossless not in ("none", "zstd")  # what one of them holds
    check = partial(_checked_tensor, delta, checkpoint)
    with closing(side_by_side(check, delta.tensors, 1 if large else _THREADS)) as names:
        for name in names:
            reporter.step(name)
    return delta


def _checked_file(root: Path, file: FileRecord) -> FileRecord:
    check_file(root, file)
    return file


def _checked_tensor(delta: Delta, base: Checkpoint | None, name: str) -> str:
    record = delta.tensors[name]
    if delta.manifest.lossless != "none":  # else it is compared as the parts are opened
        for part in record.parts:
            delta.check_stored(name, part)
    if record.status != "alias":
        if base is None:
            delta.check_streams(name)
        else:
            for _ in delta.restored_pieces(name, base):
                pass
    return name
