"""A random base and its adapters as the study of requests serves them: any number of names over a few directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deltacompress.bench.adapters.copies import Copied
from deltacompress.bench.adapters.directories import KINDS, write_adapter
from deltacompress.bench.serve.models import Models, write_tokenizer
from deltacompress.bench.synthetic import ModelShape, write_base
from deltacompress.runtime import Runtime
from deltacompress.runtime.variants.opening import open_variant

DIRECTORIES = 4
"""Of each kind of adapter; names take turns over them."""


@dataclass(frozen=True, slots=True)
class System:
    """kinds: of its adapters, which take turns."""

    name: str
    kinds: tuple[str, ...]


SYSTEMS = {
    one.name: one
    for one in (
        System("s1", ("boft",)),
        System("s2", ("boft64", "boft")),
        System("lora64", ("lora64",)),
        System("lora32", ("lora32",)),
    )
}


class Stand:
    """One runtime over a base that was written into the empty directory `root`. Adapters lie beside it."""

    def __init__(self, root: Path, shape: ModelShape, device: torch.device, backend: str) -> None:
        self.root, self.shape, self.device = root, shape, device
        self.on_gpu = device.type == "cuda"
        self.base = root / "base"
        self.base.mkdir()
        write_base(self.base, shape, device)
        write_tokenizer(self.base, shape.vocabulary)
        self.runtime = Runtime.from_base(
            self.base,
            device=device,
            dtype=torch.bfloat16 if self.on_gpu else torch.float32,
            backend=backend,
            merge_rounding=False,
            cuda_graphs=self.on_gpu,
        )
        self._copies: dict[Path, Copied] = {}

    def registered(self, system: System, count: int, slots: int) -> Models:
        """`count` adapters by name, loaded beside those of this system that are there; slots: on the device at once.

        Those that are there must be no more than `count`, and of no other system.
        """
        names = tuple(f"{system.name} {number}" for number in range(count))
        assert set(self.runtime.variants) <= set(names)
        self.runtime.cache.residents.slots = min(count, slots)
        for number, name in enumerate(names):
            if name not in self.runtime.variants:
                kind = system.kinds[number % len(system.kinds)]
                folder = self.folder(kind, number // len(system.kinds) % DIRECTORIES)
                self.runtime.add(self._copy(folder), name)
                self.runtime.cache.settle(name)
        nbytes = max(self.runtime.variants[name].nbytes for name in names)
        return Models(self.runtime, self.shape, names, min(count, slots), nbytes)

    def bare(self) -> Models:
        """The base, without variants."""
        return Models(self.runtime, self.shape, (), 0, 0)

    def clear(self) -> None:
        """Unload all adapters, and let go of what was read of them."""
        for name in [*self.runtime.variants]:
            self.runtime.unload(name)
        self._copies.clear()

    def folder(self, kind: str, number: int = 0) -> Path:
        """A directory with an adapter, which is written if it is not there."""
        folder = self.root / f"{kind}-{number}"
        if not folder.exists():
            folder.mkdir()
            write_adapter(folder, KINDS[kind], self.shape, self.device)
        return folder

    def away(self, name: str) -> None:
        """Let a variant that nobody uses leave the device."""
        cache = self.runtime.cache
        if self.runtime.variants[name].slot is not None:
            cache.settle(name)
            cache.evict(name)

    def share(self, system: System) -> float:
        """Parameters of one adapter over those of the base, the mean over its kinds."""
        base = 0
        for _, size in self.shape.tensors().values():
            base += size[0] * (size[1] if len(size) > 1 else 1)
        return sum(KINDS[kind].parameters(self.shape) for kind in system.kinds) / len(system.kinds) / base

    def _copy(self, folder: Path) -> Copied:
        if folder not in self._copies:
            self._copies[folder] = Copied(open_variant(folder, self.runtime.model.base), pinned=self.on_gpu)
        return self._copies[folder]
