"""How far a walk has come, as OUT.budget.safetensors, until all is measured: for a run that is resumed."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltacompress.budget.measuring.kept import check_begins
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.writer import shard_chunks, write_file
from deltacompress.compression.run_identity import start_over
from deltacompress.errors import InputError, first_line
from deltacompress.files.output import output_errors, sync
from deltacompress.types import TensorInfo

_MADE_BY = {"made_by": "deltacompress budget"}
_BEGIN = b'{"__metadata__":{"made_by":"deltacompress budget"'
_LENGTH = 8
"""Bytes before the header of a safetensors file: how long it is."""
_TIMES = 50
"""Seconds of measuring for each of writing, at least."""


class Reached(NamedTuple):
    """layers: that are measured; data: what came of them, plain; streams: hidden states [B, T, H] after them."""

    layers: int
    data: Any
    streams: dict[str, list[Tensor]]


class Progress:
    """What is kept at `path` of a walk. identity: all that what is measured depends on."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._of = hashlib.sha256(identity.encode()).hexdigest()
        self._last, self._took = time.monotonic(), 0.0

    def keep(self, layers: int, data: Any, streams: Mapping[str, Sequence[Tensor]]) -> None:
        """As Reached, in place of what was kept before; not so often that it takes long.

        Raises:
            OutputError: it cannot be written.
        """
        begun = time.monotonic()
        if begun - self._last < _TIMES * self._took:
            return
        tensors = {f"{name}/{k}": one.cpu() for name, some in streams.items() for k, one in enumerate(some)}
        told = json.dumps({"layers": layers, "data": data})
        metadata = _MADE_BY | {"of": self._of, "reached": told, "sha256": _checksum(told, tensors)}
        infos = (TensorInfo(name, "F32", tuple(one.shape), one.nbytes) for name, one in tensors.items())
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.partial")
        try:
            chunks = shard_chunks(
                self.path, [(info, partial(tensors.__getitem__, info.name)) for info in infos], metadata
            )
            write_file(temporary, chunks)
            with output_errors(self.path, "name"):
                temporary.replace(self.path)
                sync(self.path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink()
        self._last = time.monotonic()
        self._took = self._last - begun

    def read(self, device: torch.device) -> Reached | None:
        """What an interrupted run has kept, on a device; None if there is nothing.

        Raises:
            InputError: it is damaged, of other input, or of another version.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                of, told = metadata["of"], metadata["reached"]
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()} if of == self._of else {}  # noqa: SIM118 it is no dictionary
        except (SafetensorError, OSError, KeyError) as error:
            raise self._wrong(f"damaged ({first_line(error)})") from error
        if of != self._of:
            wrong = "the unfinished run was started with other input, or by another version of deltacompress"
            raise self._wrong(wrong, first="give the same again, ")
        if metadata.get("sha256") != _checksum(told, tensors):
            raise self._wrong("damaged (its checksum is another)")
        reached = json.loads(told)
        streams: dict[str, list[Tensor]] = {}
        for name in sorted(tensors, key=_place):
            streams.setdefault(_place(name)[0], []).append(tensors[name].to(device))
        return Reached(reached["layers"], reached["data"], streams)

    def fits(self) -> bool:
        """Whether there is something that `read` gives."""
        with suppress(InputError):
            return self.read(torch.device("cpu")) is not None
        return False

    def remove(self) -> None:
        """It is of no more use."""
        with output_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _wrong(self, what: str, first: str = "") -> InputError:
        return InputError(what, where=self.path, way_out=first + start_over())


def _place(name: str) -> tuple[str, int]:
    stream, _, k = name.rpartition("/")
    return stream, int(k)


def _checksum(told: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(told.encode())
    for name, one in sorted(tensors.items()):
        digest.update(f"{name} {tuple(one.shape)}".encode())
        digest.update(tensor_bytes(one.contiguous()))
    return digest.hexdigest()


def check_progress(path: Path) -> None:
    """As check_kept."""
    check_begins(path, _BEGIN, at=_LENGTH)


def progress_path(out: Path) -> Path:
    """Where it lies for an artifact `out`, until all is measured."""
    return out.with_name(f"{out.name}.budget.safetensors")
