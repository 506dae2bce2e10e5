"""What serving a method's variant takes beside its base: how long it comes, and what it adds to a decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench import figures
from deltacompress.bench.clock import clocked
from deltacompress.bench.decode import timed_steps
from deltacompress.evaluation.scoring.store import AnswerStore
from deltacompress.reporter import Reporter
from deltacompress.runtime import Runtime

_STEPS, _LOADS, _NAME = 25, 3, "it"


@dataclass(frozen=True, slots=True)
class Served:
    """Milliseconds, medians. load: Runtime.load of files that were read before, until it is on the device. added: to a
    decode step of one row, over the base's own.
    """

    load_ms: float
    added_ms: float


class Times:
    """Of variants of one base, each measured once and kept in a folder; close it when done."""

    def __init__(self, base: Path, folder: Path, device: str, identity: Mapping[str, Any]) -> None:
        """identity: everything that decides on the variants but their names, and the device."""
        self._base, self._device = base, device
        self._store = AnswerStore(folder, {"serving": identity})

    def close(self) -> None:
        """Let go of the file."""
        self._store.close()

    def of(self, folders: Sequence[Path], reporter: Reporter) -> dict[Path, Served]:
        """Of artifacts and adapters whose folders have names of their own; raises as Runtime.load."""
        missing = [one for one in folders if one.name not in self._store]
        if missing:
            reporter.step("timing what serving takes")
            # as one would serve: fp32 on a CPU; 16 bits, kernels and graphs on a GPU
            on_gpu = self._device.startswith("cuda")
            runtime = Runtime.from_base(self._base, device=self._device, dtype="auto", cuda_graphs=on_gpu)
            for one in missing:
                found = measured(runtime, one)
                self._store.add([(one.name, [found.load_ms, found.added_ms])])
        return {one: Served(*self._store[one.name]) for one in folders}


def measured(runtime: Runtime, folder: Path) -> Served:
    """Load a variant a few times, the first one apart, and let it and the base decode in turn."""
    times = list[float]()
    for _ in range(1 + _LOADS):
        with clocked(times):
            runtime.load(folder, _NAME)
            runtime.cache.acquire([_NAME])
            if runtime.device.type == "cuda":
                torch.cuda.synchronize(runtime.device)
        runtime.cache.release([_NAME])
        runtime.unload(_NAME)
    runtime.load(folder, _NAME)
    vocabulary = int(runtime.model.base.layout.config.vocab_size)
    steps: dict[str | None, list[float]] = {None: [], _NAME: []}
    for _ in range(2):
        for who, found in steps.items():
            found += timed_steps(runtime, vocabulary, [who], _STEPS)[0]
    runtime.unload(_NAME)
    return Served(figures.median(times[1:]), figures.median(steps[_NAME]) - figures.median(steps[None]))
