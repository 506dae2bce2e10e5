"""Decode steps of many adapters beside one base, against the base's own step with as many rows; and how they come.

All of it goes through Runtime, over files that synthetic.py and directories.py write. Adapters of one kind hold
the same numbers, each at a place of its own on the device: the first ones are read from their directory, and timed; the
others are copies of what was read.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench import figures
from deltacompress.bench.adapters.copies import Copied
from deltacompress.bench.adapters.directories import KINDS, write_adapter
from deltacompress.bench.clock import clocked
from deltacompress.bench.decode import timed_steps
from deltacompress.bench.synthetic import SHAPE_7B, SHAPE_TINY, ModelShape, write_base, write_delta
from deltacompress.devices import device_name, resolve_device
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime import Runtime
from deltacompress.runtime.variants.opening import open_variant

PARTS = ("lora16", "lora32", "lora64", "boft", "mixed")
_TIMED_LOADS = 4
_MIXED = {"lora16": 3, "boft": 3, "dora16": 6}
"""Kinds of a mixed batch: of how many rows one is theirs. One row is the base's, those that are left packed deltas'."""


@dataclass(frozen=True, slots=True)
class AdapterDecodeBench:
    """rows: times of one step in milliseconds, over_base: against the base alone with as many rows, timed just before;
    over_sum, of a mixed batch: against the base's step and what each kind adds to it alone; loads: a row for each kind.
    """

    device: str
    backend: str
    shape: str
    rows: tuple[dict[str, Any], ...]
    loads: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "backend": self.backend,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "shape": self.shape,
            "rows": list(self.rows),
            "loads": list(self.loads),
        }


def run(
    *,
    device: str = "auto",
    backend: str = "auto",
    shape: ModelShape | None = None,
    parts: Sequence[str] = PARTS,
    most: int | None = None,
    steps: int = 25,
    scratch: Path | None = None,
    reporter: Reporter | None = None,
) -> AdapterDecodeBench:
    """Time the runtime on a random model: 7B-shaped on a GPU, tiny on a CPU.

    parts: of PARTS, kinds of adapters, and "mixed", all kinds and packed deltas in one batch. most: rows of a batch,
    and adapters of one kind, 96 on a GPU, 6 on a CPU by default. scratch: directory for the files, a temporary one by
    default.

    Raises:
        BackendError: the backend cannot run on the device, or it does not fit.
    """
    reporter = reporter or SILENT
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    shape = shape or (SHAPE_7B if on_gpu else SHAPE_TINY)
    reporter.phase("adapters", 1 + len(parts))
    with tempfile.TemporaryDirectory(prefix="deltacompress-bench-", dir=scratch) as root:
        base = Path(root) / "base"
        base.mkdir()
        write_base(base, shape, where)
        bench = _Bench(Path(root), shape, where, backend, most or (96 if on_gpu else 6), steps)
        reporter.step("base written and loaded")
        for part in parts:
            if part == "mixed":
                bench.mixed()
            else:
                bench.kind(part)
            reporter.step(f"{part}: {bench.rows[-1]['ms']:.2f} ms, {bench.rows[-1]['over_base']:.3f} x the base")
        return AdapterDecodeBench(
            device_name(where), bench.runtime.describe(), str(shape), tuple(bench.rows), tuple(bench.loads)
        )


class _Bench:
    """One runtime, and what was measured of it so far."""

    def __init__(
        self, root: Path, shape: ModelShape, device: torch.device, backend: str, most: int, steps: int
    ) -> None:
        self._root, self._shape, self._device, self._most, self._steps = root, shape, device, most, steps
        self._few = max(2, most // 3)
        self.rows: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []
        on_gpu = device.type == "cuda"
        self.runtime = Runtime.from_base(
            root / "base",
            device=device,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            backend=backend,
            merge_rounding=False,
            cuda_graphs=on_gpu,
        )

    def kind(self, kind: str) -> None:
        """Adapters of one kind, `most` rows on as many, and an eighth of them on one; BOFT on fewer, too; LoRA of all
        linears on a third of them.
        """
        names = self._load(kind, self._most)
        if kind == "lora16":
            base = self._base(self._few)
            self._row(f"{kind}, one adapter", names[:1] * self._few, base)
            self._row(kind, names[: self._few], base)
        base = self._base(self._most)
        if kind == "boft":
            count = 2
            while count < self._most:
                self._row(kind, [names[i % count] for i in range(self._most)], base)
                count *= 2
        if (often := max(self._most // 8, 2)) < self._most:
            self._row(f"{kind}, one on {often} rows", [*names[:1] * often, *names[often:]], base)
        self._row(kind, names, base)
        self._unload()

    def mixed(self) -> None:
        """The base and every kind, packed deltas among them, in one batch; before it each kind with the base alone."""
        counts = {kind: max(1, self._most // part) for kind, part in _MIXED.items()}
        counts["delta"] = max(1, self._most - sum(counts.values()) - 1)
        names, rows = list[str | None]([None]), 1 + sum(counts.values())
        base = summed = self._base(rows)
        for kind, count in counts.items():
            own = self._load(kind, count)
            self._row(f"{kind} of a mixed batch", [*own, *[None] * (rows - count)], base)
            summed += self.rows[-1]["ms"] - base
            names += own
        self._row("mixed", names, base)
        self.rows[-1]["over_sum"] = self.rows[-1]["ms"] / summed
        self._unload()

    def _base(self, rows: int) -> float:
        """Milliseconds of the base's own step."""
        self._row("base alone", [None] * rows, None)
        return float(self.rows[-1]["ms"])

    def _row(self, what: str, names: Sequence[str | None], base: float | None) -> None:
        times, served = timed_steps(self.runtime, self._shape.vocabulary, names, self._steps)
        ms = figures.median(times)
        self.rows.append(
            {
                "what": what,
                "variants": len({name for name in names if name is not None}),
                "rows": len(names),
                "ms": ms,
                "spread": figures.spread(times),
                "served_ms": figures.median(served),
                "over_base": 1.0 if base is None else ms / base,
                "over_sum": None,
            }
        )

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load(self, kind: str, count: int) -> list[str]:
        """`count` adapters of a kind, by name; how the first ones came, and what they take, go into a row."""
        folder = self._root / kind
        own = self._write(folder, kind)
        names = [f"{kind} {number}" for number in range(count)]
        before, times = self._allocated(), list[float]()
        read = count if kind == "delta" else min(count, _TIMED_LOADS)  # what goes straight to the device has no copy
        for name in names[:read]:
            with clocked(times):
                self.runtime.load(folder, name)
                self._settle(name)
        if names[read:]:
            copy = Copied(open_variant(folder, self.runtime.model.base), pinned=self._device.type == "cuda")
            for name in names[read:]:
                self.runtime.add(copy, name)
                self._settle(name)
        taken = (self._allocated() - before) / count
        on_device = taken or self.runtime.variants[names[0]].nbytes
        self.loads.append(
            {
                "kind": kind,
                "adapters": count,
                "bytes": own,
                "device_bytes": int(on_device),
                "device_over_own": on_device / own,
                "first_ms": times[0],
                "ms": figures.median(times[1:] or times),
            }
        )
        return names

    def _write(self, folder: Path, kind: str) -> int:
        """A directory of this kind, if there is none yet; the bytes of its tensors."""
        if folder.exists():
            return int(next(row["bytes"] for row in self.loads if row["kind"] == kind))
        folder.mkdir()
        if kind == "delta":
            manifest = write_delta(folder, self._shape, self.runtime.model.base.checkpoint, self._device)
            return sum(record.bytes for record in manifest.tensors)
        return write_adapter(folder, KINDS[kind], self._shape, self._device)

    def _settle(self, name: str) -> None:
        """Wait until a variant is where it is served."""
        self.runtime.cache.acquire([name])
        self.runtime.cache.release([name])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _allocated(self) -> int:
        """Bytes in use on the device; 0 on a CPU, where nobody counts them."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _unload(self) -> None:
        for name in [*self.runtime.variants]:
            self.runtime.unload(name)
