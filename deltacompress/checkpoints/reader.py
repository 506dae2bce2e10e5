"""Lazy reader of Hugging Face checkpoints: a directory of safetensors and its side files.

Opening reads headers only (checked by `safetensors_header`), without torch; `read` and `sha256` then seek to one
tensor's bytes in the same file, so a model is never held whole, and no second parser can see another one than was
checked. Plain reads rather than a memory map: a file cut short meanwhile is an error here, and would be a bus error.

What counts as one checkpoint:
- `model.safetensors`, or `model.safetensors.index.json` plus the shards it names; both at once is refused, because one
  of them would have to be ignored. The index must agree with the shards tensor by tensor, both ways.
- `config.json`, plus tokenizer and generation files (`side_files`). Never code, never pickles: a directory with only
  *.bin, *.pt or *.pth is refused, because loading those runs whatever they contain.
- a name such as `org/model` that is no local path is fetched with huggingface_hub (safetensors and side files only).

Hashes are over raw little-endian bytes, so the fingerprint does not see sharding, order of tensors or header metadata.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deltacompress.checkpoints.header import TensorSpan, load_json_object
from deltacompress.checkpoints.hub import fetched, model_directory
from deltacompress.checkpoints.side_files import MAX_CONFIG_BYTES, MAX_SIDE_FILE_BYTES, is_side_file, link_homes
from deltacompress.checkpoints.weight_files import (
    A_PEFT_ADAPTER,
    ADAPTER_CONFIG,
    USE_THE_ADAPTER,
    content_hash,
    find_weights,
)
from deltacompress.errors import CheckpointError
from deltacompress.files.hashing import hash_chunks, read_chunks
from deltacompress.files.places import CONFIG
from deltacompress.files.regular import ANYWHERE, open_regular, read_bytes, stat_regular, unreadable
from deltacompress.types import TensorInfo

if TYPE_CHECKING:
    import torch

_READABLE = "make it readable, or get the checkpoint again"
_FIRST_LOOK = 1 << 16  # bytes: most tensors that differ do so at their beginning
PINNED_AT_MOST = 2**29
"""Bytes of a tensor that is worth pinned memory, which torch never gives back: most linears, few embeddings."""


class Checkpoint:
    """One checkpoint, opened lazily; make it with `Checkpoint.open`.

    path: its directory; config: the parsed config.json; tensors: name -> TensorInfo, sorted by name; nbytes: bytes of
    weight files, index and side files together, which is what a user copies. finite: the tensors that `examine` has
    found to hold neither NaN nor Inf; known_fingerprint: what `fingerprint` gives, once somebody has found it.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        spans: Mapping[str, tuple[Path, TensorSpan]],
        weight_files: Iterable[Path],
    ) -> None:
        self.path = path
        self.config = config
        self._spans = dict(sorted(spans.items()))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: span.info for name, (_, span) in self._spans.items()}
        )
        weights = list(weight_files)
        self._stamps = {file: _stamp(file.stat()) for file in weights}
        self.nbytes = sum(file.stat().st_size for file in (*weights, *self.side_files()))
        self._hashes: dict[str, str] = {}
        self.known_fingerprint = ""
        self._examined = {name: Lock() for name in self.tensors}
        self._ahead: dict[str, Future[torch.Tensor]] = {}
        self._reader = ThreadPoolExecutor(1, "read-ahead")  # starts no thread before the first submit
        self.finite: set[str] = set()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the checkpoint directory `path`, or fetch it if it is a hub id; reads headers, no weights.

        Raises:
            CheckpointError: not a checkpoint, damaged, unsafe, or a hub id that cannot be fetched.
        """
        try:
            root = model_directory(path) or fetched(str(path))
            file = root / CONFIG
            if not file.exists():
                if (root / ADAPTER_CONFIG).exists():
                    raise CheckpointError(A_PEFT_ADAPTER, where=root, way_out=USE_THE_ADAPTER)
                raise CheckpointError(f"no {CONFIG}", where=root, way_out="give a Hugging Face model directory")
            config = load_json_object(read_bytes(file, at_most=MAX_CONFIG_BYTES, links=ANYWHERE), str(file))
            there = (*root.glob("*.safetensors"), *root.glob("*.index.json"))
            before = {one: _stamp(one.stat()) for one in there if one.exists()}
            spans, files = find_weights(root)
            made = cls(root, config, spans, files)
        except OSError as error:
            raise unreadable(CheckpointError, error.filename or path, error, _READABLE) from error
        if changed := [one for one, stamp in made._stamps.items() if before.get(one) != stamp]:
            raise CheckpointError(
                "changed while its header was read", where=changed[0], way_out="run it again when it is whole"
            )
        return made

    def read(self, name: str, *, pinned: bool = False) -> torch.Tensor:
        """Tensor `name` in its own dtype and shape, on the CPU, owning its memory; nothing else is loaded.

        pinned: in memory that a GPU copies from at full speed, which torch keeps for the next such read.

        Raises:
            CheckpointError: no such tensor, or its file changed or got shorter since it was opened.
        """
        if name in self._ahead:
            return self._ahead.pop(name).result()
        return self._read(name, pinned=pinned)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Begin to read tensors into pinned memory beside other work: the next `read` of each takes what came of it."""
        self._ahead |= {name: self._reader.submit(self._read, name, pinned=True) for name in names}

    def forget_ahead(self) -> None:
        """Drop what a run that was stopped had read ahead, and do not read the rest of it."""
        for one in self._ahead.values():
            one.cancel()
        self._ahead.clear()

    def _read(self, name: str, *, pinned: bool) -> torch.Tensor:
        import torch

        from deltacompress.checkpoints.dtypes import DTYPES

        info = self._span(name)[1].info
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], pin_memory=pinned and info.nbytes <= PINNED_AT_MOST)
        with self._at(name) as file:
            got = file.readinto(tensor_bytes(tensor))
        self._check_length(name, got, info.nbytes)
        return tensor

    def read_flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of tensor `name` in row-major order, flat; else as `read`."""
        import torch

        from deltacompress.checkpoints.dtypes import DTYPES

        info = self._span(name)[1].info
        tensor = torch.empty(end - begin, dtype=DTYPES[info.dtype])
        with self._at(name, begin * tensor.element_size()) as file:
            got = file.readinto(tensor_bytes(tensor))
        self._check_length(name, got, tensor.nbytes)
        return tensor

    def sha256(self, name: str) -> str:
        """Hex sha256 of the raw little-endian bytes of tensor `name`; read in chunks, remembered by this instance.

        Raises:
            CheckpointError: as `read`.
        """
        self._span(name)
        with self._examined[name]:  # whoever comes second takes what the first has found
            if name not in self._hashes:
                self._hashes[name], _ = hash_chunks(self.chunks(name))
        return self._hashes[name]

    def examine(self, name: str) -> bool:
        """Whether tensor `name` holds neither NaN nor Inf; it is hashed in the same read. Raises as `read`."""
        from deltacompress.checkpoints.dtypes import DTYPES
        from deltacompress.numerics.finite import FiniteBytes

        with self._examined[name]:
            if name not in self.finite or name not in self._hashes:
                look = FiniteBytes(DTYPES[self._span(name)[1].info.dtype])
                self._hashes[name], _ = hash_chunks(map(look.at, self.chunks(name)))
                if look.finite:
                    self.finite.add(name)
            return name in self.finite

    def chunks(self, name: str) -> Iterator[bytes]:
        """The raw little-endian bytes of tensor `name`, some MiB at a time, the first few before; raises as `read`."""
        nbytes, got, first = self._span(name)[1].info.nbytes, 0, _FIRST_LOOK
        with self._at(name) as file:
            for chunk in chain(read_chunks(file, min(first, nbytes)), read_chunks(file, max(nbytes - first, 0))):
                got += len(chunk)
                yield chunk
        self._check_length(name, got, nbytes)

    def equals(self, name: str, other: Checkpoint, other_name: str) -> bool:
        """Whether tensor `name` has the bytes of another one of as many; read no further than they do. As `read`."""
        if name in self._hashes and other_name in other._hashes:
            return self._hashes[name] == other._hashes[other_name]
        return all(mine == theirs for mine, theirs in zip(self.chunks(name), other.chunks(other_name), strict=True))

    def fingerprint(self) -> str:
        """`content_hash` of all tensors: what identifies the weights, however they are sharded."""
        if not self.known_fingerprint:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # hashing lets others run
                hashes = list(threads.map(self.sha256, self.tensors))
            self.known_fingerprint = content_hash(
                (info.name, info.dtype, info.shape, digest)
                for info, digest in zip(self.tensors.values(), hashes, strict=True)
            )
        return self.known_fingerprint

    @property
    def stamps(self) -> dict[str, tuple[int, int, int]]:
        """What stands for the weights until they are hashed: their files, with what changes when one does."""
        return {str(file.absolute()): stamp for file, stamp in self._stamps.items()}

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that the tensors lie in, and the index over them where there is one."""
        return tuple(self._stamps)

    def side_files(self) -> tuple[Path, ...]:
        """Config, generation, tokenizer and chat-template files, sorted by name; never weights, never code.

        Raises:
            OSError: one of them is no regular file, nor a link to one.
        """
        found = sorted(file for file in self.path.iterdir() if is_side_file(file.name) and not file.is_dir())
        for file in found:
            stat_regular(file, links=ANYWHERE)
        return tuple(found)

    def side_file_hashes(self) -> dict[str, str]:
        """Name -> SHA-256 of each side file; raises as side_files and open_side_file."""
        found = {}
        for file in self.side_files():
            with self.open_side_file(file) as opened:
                found[file.name] = hash_chunks(read_chunks(opened))[0]
        return found

    def open_side_file(self, file: Path) -> BufferedReader:
        """Open a side file that is to be copied.

        Raises:
            CheckpointError: it cannot be read, is too large, or is a link that leads elsewhere (side_files.link_homes).
        """
        try:
            opened = open_regular(file, links=link_homes(self.path))
        except OSError as error:
            raise unreadable(CheckpointError, file, error, "make it readable, or remove it") from error
        if os.fstat(opened.fileno()).st_size > MAX_SIDE_FILE_BYTES:
            opened.close()
            raise CheckpointError(
                f"over {MAX_SIDE_FILE_BYTES} bytes, as no such file is", where=file, way_out="remove it"
            )
        return opened

    def _span(self, name: str) -> tuple[Path, TensorSpan]:
        if name not in self._spans:
            raise CheckpointError(f"no tensor named {name}", where=self.path, way_out="get the checkpoint again")
        return self._spans[name]

    @contextmanager
    def _at(self, name: str, offset: int = 0) -> Iterator[BufferedReader]:
        """The file of tensor `name`, positioned at a byte of it, and still the file whose header was checked."""
        path, span = self._span(name)
        try:
            with open_regular(path, links=ANYWHERE) as file:
                if _stamp(os.fstat(file.fileno())) != self._stamps[path]:
                    raise CheckpointError(
                        "changed since it was opened", where=path, way_out="start again on a settled checkpoint"
                    )
                file.seek(span.begin + offset)
                yield file
        except OSError as error:
            raise unreadable(CheckpointError, path, error, _READABLE, what=f"tensor {name} ") from error

    def _check_length(self, name: str, got: int, wanted: int) -> None:
        if got != wanted:
            told = f"truncated while tensor {name} was read"
            raise CheckpointError(told, where=self._span(name)[0], way_out="copy or download it again")


def tensor_bytes(t: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor of any dtype, as a flat uint8 view that shares its memory.

    Raises:
        ValueError: the tensor is not contiguous or not on the CPU.
    """
    import torch

    if not t.is_contiguous() or t.device.type != "cpu":
        raise ValueError(f"tensor_bytes needs a contiguous CPU tensor, got {t.device}, strides {t.stride()}")
    view: memoryview = t.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
