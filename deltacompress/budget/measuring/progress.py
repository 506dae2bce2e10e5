"""How far a walk has come, as OUT.budget.safetensors, until all is measured: for a run that is resumed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltacompress.budget.measuring.kept import check_begins
from deltacompress.budget.measuring.ladder import Step
from deltacompress.budget.measuring.measured import Measured, Walk
from deltacompress.budget.measuring.probes import Probe
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.writer import shard_chunks, write_file
from deltacompress.compression.run_identity import start_over
from deltacompress.errors import InputError, OutputError, first_line, switch
from deltacompress.files.output import output_errors, sync
from deltacompress.types import TensorInfo

_MADE_BY = {"made_by": "deltacompress budget"}
_BEGIN = b'{"__metadata__":{"made_by":"deltacompress budget"'
_LENGTH = 8
"""Bytes before the header of a safetensors file: how long it is."""
_TIMES = 50
"""Seconds of measuring for each of writing, about."""


class Reached(NamedTuple):
    """layers: that are measured; data: what came of them, plain; streams: hidden states [B, T, H] after them."""

    layers: int
    data: Any
    streams: dict[str, list[Tensor]]


class Progress:
    """What is kept at `path` of a walk. identity: all that what is measured depends on; asked: what it is measured for;
    resume: whether what is there is used.
    """

    def __init__(self, path: Path, identity: str, *, asked: str, resume: bool) -> None:
        self.path, self._resume = path, resume
        self._metadata = _MADE_BY | {"of": hashlib.sha256(identity.encode()).hexdigest(), "asked": asked}
        self._temporary = path.with_name(f".{path.name}.partial")  # nobody else writes here: OUT is locked
        self._last, self._took_a_byte = time.monotonic(), 0.0

    def keep(self, layers: int, data: Any, streams: Mapping[str, Sequence[Tensor]]) -> None:
        """As Reached, in place of what was kept before; not so often that it takes long.

        Raises:
            OutputError: it cannot be written.
        """
        begun, nbytes = time.monotonic(), sum(one.nbytes for some in streams.values() for one in some)
        if begun - self._last < _TIMES * self._took_a_byte * nbytes:
            return
        tensors = {f"{name}/{k}": one.cpu() for name, some in streams.items() for k, one in enumerate(some)}
        told = json.dumps({"layers": layers, "data": data})
        metadata = self._metadata | {"reached": told, "sha256": _checksum(told, tensors)}
        infos = (TensorInfo(name, "F32", tuple(one.shape), one.nbytes) for name, one in tensors.items())
        makers = [(info, partial(tensors.__getitem__, info.name)) for info in infos]
        try:
            with output_errors(self._temporary, "name"):
                self._temporary.unlink(missing_ok=True)  # of a run that was killed
            write_file(self._temporary, shard_chunks(self.path, makers, metadata))
            with output_errors(self.path, "name"):
                self._temporary.replace(self.path)
                sync(self.path.parent)
        finally:
            self._drop_temporary()
        self._last = time.monotonic()
        self._took_a_byte = (self._last - begun) / nbytes

    def read(self) -> Reached | None:
        """What an interrupted run has kept, in host memory; None if there is nothing that is to be used.

        Raises:
            InputError: it is damaged, of other input, or of another version.
        """
        return self._read() if self._resume and self.path.exists() else None

    def _read(self) -> Reached:
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                same, told = metadata["of"] == self._metadata["of"], metadata["reached"]
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()} if same else {}  # noqa: SIM118 it is no dictionary
        except (SafetensorError, OSError, KeyError) as error:
            raise self._wrong(f"damaged ({first_line(error)})") from error
        if not same:
            wrong = "the unfinished run was started with other input, or by another version of deltacompress"
            raise self._wrong(wrong, first="give the same again, ")
        if metadata.get("sha256") != _checksum(told, tensors):
            raise self._wrong("damaged (its checksum is another)")
        reached = json.loads(told)
        streams: dict[str, list[Tensor]] = {}
        for name in sorted(tensors, key=_place):
            streams.setdefault(_place(name)[0], []).append(tensors[name])
        return Reached(reached["layers"], reached["data"], streams)

    def fits(self) -> bool:
        """Whether a run that is resumed would go on with it."""
        try:
            self._read()
        except InputError:
            return False
        return True

    def remove(self) -> None:
        """It is of no more use."""
        remove_progress(self.path)
        self._drop_temporary()

    def _drop_temporary(self) -> None:
        with suppress(OSError):
            self._temporary.unlink()

    def _wrong(self, what: str, first: str = "") -> InputError:
        return InputError(what, where=self.path, way_out=first + start_over())


def _streams(walk: Walk) -> dict[str, list[Tensor]]:
    """All hidden states that go from layer to layer."""
    probes = [probe for one in walk.found for probe in one.probes]
    found = {"calibration": list(walk.stream), "held": walk.held.clean}
    found |= {f"probe {number}": probe.hidden for number, probe in enumerate(probes)}
    return found | {f"whole {rung}": whole.hidden for rung, whole in walk.whole.items()}


def _plain(walk: Walk) -> dict[str, Any]:
    """What came of layers, as `go_on` takes it."""
    fields = ("names", "kind", "steps", "reference", "experts")
    groups = [{name: getattr(one, name) for name in fields} for one in walk.found if one.kind == "linear"]
    for group in groups:
        group["steps"] = [asdict(step) for step in group["steps"]]
    return {"groups": groups, "norms": walk.norms}


def keep(walk: Walk, layers: int, progress: Progress | None) -> Progress | None:
    """How far it has come; None where nothing is to be kept, or can be any more."""
    if progress is None:
        return None
    try:
        progress.keep(layers, _plain(walk), _streams(walk))
    except OutputError as error:
        walk.reporter.note(f"{progress.path}: what is measured is not kept for {switch('resume')}: {error.what}")
        return None
    return progress


def go_on(walk: Walk, reached: Reached) -> None:
    """After the embedding, as an earlier run was after some layers; uses up the streams."""

    def taken(name: str) -> list[Tensor]:
        return [one.to(walk.skeleton.device) for one in reached.streams.pop(name)]

    for group in reached.data["groups"]:
        steps = [Step(**step) for step in group["steps"]]
        walk.found.append(Measured(**group | {"names": tuple(group["names"]), "steps": steps, "probe": Probe([])}))
    walk.norms[:] = reached.data["norms"]
    for k, hidden in enumerate(taken("calibration")):
        walk.stream[k] = hidden
    walk.held.clean = taken("held")
    for number, probe in enumerate(probe for one in walk.found for probe in one.probes):
        probe.hidden = taken(f"probe {number}")
    for rung, whole in walk.whole.items():
        whole.hidden = taken(f"whole {rung}")


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


def remove_progress(path: Path) -> None:
    """What is kept there, if anything, is of no more use."""
    with output_errors(path):
        path.unlink(missing_ok=True)


def asked_so_far(path: Path) -> str | None:
    """As kept.asked_before, of a run that has measured some layers."""
    with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("asked")
    return None


def progress_path(out: Path) -> Path:
    """Where it lies for an artifact `out`, until all is measured."""
    return out.with_name(f"{out.name}.budget.safetensors")
