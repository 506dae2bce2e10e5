"""Lazy reader of Hugging Face checkpoints: a directory of safetensors and its side files.

Opening reads headers only (checked by `safetensors_header`); `read` and `sha256` then seek to one tensor's bytes in the
same file, so a model is never held whole, and no second parser can see another model than the one that was checked.
Plain reads rather than a memory map: a file cut short meanwhile is an error here, and would be a bus error there.

What counts as one checkpoint:
- `model.safetensors`, or `model.safetensors.index.json` plus the shards it names; both at once is refused, because one
  of them would have to be ignored. The index must agree with the shards tensor by tensor, both ways.
- `config.json`, plus tokenizer and generation files (`side_files`). Never code, never pickles: a directory with only
  *.bin, *.pt or *.pth is refused, because loading those runs whatever they contain.
- a name such as `org/model` that is no local path is fetched with huggingface_hub (safetensors and side files only).

Hashes are over raw little-endian bytes, so the fingerprint does not see sharding, order of tensors or header metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from deltacompress.errors import CheckpointError
from deltacompress.numerics.finite import all_finite
from deltacompress.safetensors_header import INDEX, TensorSpan, find_weights, load_json_object
from deltacompress.types import TensorInfo

# fmt: off
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
})
# fmt: on
"""safetensors dtype name -> torch dtype."""

_SIDE_FILES = (
    *("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template.json", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_READABLE = "make it readable, or get the checkpoint again"
PINNED_AT_MOST = 2**29
"""Bytes of a tensor that is worth pinned memory, which torch never gives back: most linears, few embeddings."""
_CHUNK = 4 * 2**20  # bytes hashed at a time


class Checkpoint:
    """One checkpoint, opened lazily; make it with `Checkpoint.open`.

    path: its directory; config: the parsed config.json; tensors: name -> TensorInfo, sorted by name; nbytes: bytes of
    weight files, index and side files together, which is what a user copies.
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

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the checkpoint directory `path`, or fetch it if it is a hub id; reads headers, no weights.

        Raises:
            CheckpointError: not a checkpoint, damaged, unsafe, or a hub id that cannot be fetched.
        """
        try:
            root = _resolve(path)
            if not (root / "config.json").is_file():
                raise CheckpointError(f"{root}: no config.json; give a Hugging Face model directory")
            config = load_json_object((root / "config.json").read_bytes(), str(root / "config.json"))
            spans, files = find_weights(root)
            return cls(root, config, spans, files)
        except OSError as error:
            told = f"{error.filename or path}: cannot be read ({error.strerror or error})"
            raise CheckpointError(f"{told}; {_READABLE}") from error

    def read(self, name: str, *, pinned: bool = False) -> torch.Tensor:
        """Tensor `name` in its own dtype and shape, on the CPU, owning its memory; nothing else is loaded.

        pinned: in memory that a GPU copies from at full speed, which torch keeps for the next such read.

        Raises:
            CheckpointError: no such tensor, or its file changed or got shorter since it was opened.
        """
        info = self._span(name)[1].info
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], pin_memory=pinned and info.nbytes <= PINNED_AT_MOST)
        with self._at(name) as file:
            got = file.readinto(tensor_bytes(tensor))
        self._check_length(name, got)
        return tensor

    def sha256(self, name: str) -> str:
        """Hex sha256 of the raw little-endian bytes of tensor `name`; read in chunks, remembered by this instance.

        Raises:
            CheckpointError: as `read`.
        """
        if name not in self._hashes:
            digest, left = hashlib.sha256(), self._span(name)[1].info.nbytes
            with self._at(name) as file:
                while left and (chunk := file.read(min(left, _CHUNK))):
                    digest.update(chunk)
                    left -= len(chunk)
            self._check_length(name, self.tensors[name].nbytes - left)
            self._hashes[name] = digest.hexdigest()
        return self._hashes[name]

    def fingerprint(self) -> str:
        """`content_hash` of all tensors: what identifies the weights, however they are sharded."""
        if missing := self.tensors.keys() - self._hashes.keys():
            # hashlib lets other threads run while it works; each holds one chunk.
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                list(pool.map(self.sha256, missing))
        hashes = [self.sha256(name) for name in self.tensors]
        return content_hash(
            (info.name, info.dtype, info.shape, digest)
            for info, digest in zip(self.tensors.values(), hashes, strict=True)
        )

    def side_files(self) -> tuple[Path, ...]:
        """Config, generation, tokenizer and chat-template files, sorted by name; never weights, never code."""
        return tuple(sorted(file for file in self.path.iterdir() if is_side_file(file.name) and file.is_file()))

    def _span(self, name: str) -> tuple[Path, TensorSpan]:
        if name not in self._spans:
            raise CheckpointError(f"{self.path}: no tensor named {name}; get the checkpoint again")
        return self._spans[name]

    @contextmanager
    def _at(self, name: str) -> Iterator[BufferedReader]:
        """The file of tensor `name`, positioned at its first byte, and still the file whose header was checked."""
        path, span = self._span(name)
        try:
            with path.open("rb") as file:
                if _stamp(os.fstat(file.fileno())) != self._stamps[path]:
                    raise CheckpointError(f"{path}: changed since it was opened; start again on a settled checkpoint")
                file.seek(span.begin)
                yield file
        except OSError as error:
            told = f"{path}: tensor {name} cannot be read ({error.strerror or error})"
            raise CheckpointError(f"{told}; {_READABLE}") from error

    def _check_length(self, name: str, got: int) -> None:
        path, span = self._span(name)
        if got != span.info.nbytes:
            raise CheckpointError(f"{path}: truncated while tensor {name} was read; copy or download it again")


def is_side_file(name: str) -> bool:
    """Whether a file name is that of a config, tokenizer or chat-template file."""
    return any(fnmatchcase(name, pattern) for pattern in _SIDE_FILES)


def already_quantized(config: Mapping[str, Any]) -> str | None:
    """What to say where dense weights are needed, if config.json says that these are not."""
    if (found := config.get("quantization_config")) is None:
        return None
    gptq = isinstance(found, dict) and found.get("quant_method") == "gptq"
    other = ", or from what `deltacompress dequantize` makes of this one" if gptq else ""
    return f"the weights are quantized already; start from the unquantized checkpoint{other}"


def content_hash(entries: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Hex sha256 over the canonical JSON (RFC 8785) of the sorted list of [name, dtype, shape, sha256]."""
    rows = sorted([name, dtype, list(shape), digest] for name, dtype, shape, digest in entries)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def tensor_bytes(t: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor of any dtype, as a flat uint8 view that shares its memory.

    Raises:
        ValueError: the tensor is not contiguous or not on the CPU.
    """
    if not t.is_contiguous() or t.device.type != "cpu":
        raise ValueError(f"tensor_bytes needs a contiguous CPU tensor, got {t.device}, strides {t.stride()}")
    view: memoryview = t.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def check_finite(name: str, t: torch.Tensor, *, of_base: bool = False) -> None:
    """Refuse NaN and Inf in tensor `name` (integers and booleans pass); of_base: whether it is the base's.

    Raises:
        CheckpointError: names the tensor and counts its NaN and Inf.
    """
    if not (t.is_floating_point() or t.is_complex()):
        return
    values = t.float() if t.element_size() == 1 else t  # torch tests no 8-bit float for NaN
    if values.numel() == 0 or all_finite(torch.view_as_real(values) if t.is_complex() else values):
        return
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    way_out = "get the base again" if of_base else "the training run broke: take an earlier checkpoint"
    raise CheckpointError(
        f"tensor {name}: {nan} NaN and {inf} Inf among {t.numel()} values; {way_out}, or use --recipe lossless, which "
        "keeps any bits"
    )


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _resolve(path: str | Path) -> Path:
    """The local directory that `path` means, fetched from the hub if it is an id and no such path exists."""
    root = Path(path)
    if root.is_dir():
        return root
    if root.exists():
        raise CheckpointError(f"{root}: not a directory; give the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(
            f"{root}: no such directory; give one with config.json and the weights, or a hub id: org/name"
        )
    from huggingface_hub import snapshot_download  # only here: local work needs no hub client

    try:
        # `model*`: repositories that also carry consolidated.safetensors would be fetched twice over.
        patterns = [*_SIDE_FILES, "model*.safetensors", INDEX]
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are all one of these
        why = str(error).strip().partition("\n")[0]
        told = f"{path}: no such directory, and not fetched from the hub either ({why})"
        raise CheckpointError(f"{told}; mend the path, or download the model and give its directory") from error
