"""A variant's way to the device: from its files, or from pinned host memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from deltacompress.errors import BackendError
from deltacompress.kernels import Backend
from deltacompress.runtime.cache.loaded_variant import Operands, Sources
from deltacompress.runtime.loading.loader import Loader
from deltacompress.runtime.operands.operand import Operand
from deltacompress.runtime.variants.variant import Variant


class Transfer:
    """Reads and places operands on one device. stream: the copy stream, None on a CPU."""

    def __init__(self, device: torch.device, kernels: Backend | None) -> None:
        self._device, self._kernels = device, kernels
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loader: Loader | None = None
        if kernels is not None and kernels.ingest is not None and self.stream is not None:
            self._loader = Loader(kernels, kernels.ingest, self.stream)
        self._readers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "deltacompress-read")

    def read(self, variant: Variant) -> Sources:
        """Decode and check every part of a variant: its operands in host memory, pinned where copies follow; parts that
        a GPU takes as they are stored stay where they are.

        Any thread may call this, also while requests run.

        Raises:
            IntegrityError: a part is damaged or not finite.
            BackendError: this machine cannot decode the lossless codec.
        """
        paths, stored = variant.paths(), {}
        if self._loader is not None:
            stored = {path: one for path in paths if (one := variant.stored(path)) is not None}
        rest = [path for path in paths if path not in stored]

        def operand(path: str) -> Operand | None:
            found = variant.operand(path)
            return found if found is None or self.stream is None else found.pinned()

        # threads help where there is something to decode; small tensors only wait for each other's Python
        shared = self.stream is not None and variant.decodes
        found = self._readers.map(operand, rest) if shared else map(operand, rest)
        return Sources({path: one for path, one in zip(rest, found, strict=True) if one is not None}, stored)

    def place(self, sources: Sources, *, verify: bool, resident: Callable[[], str]) -> Operands:
        """Operands on the device, laid out as its kernels want them.

        verify: compare what is read from files with its recorded hash. resident: what is on the device, in words.

        Raises:
            IntegrityError: a part is damaged.
            BackendError: out of memory.
        """
        try:
            found: Operands = {}
            if sources.stored:
                assert self._loader is not None
                found |= self._loader.load(sources.stored, verify=verify)
            return found | {path: one.placed(self._device, self._kernels) for path, one in sources.host.items()}
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{self._device} is out of memory while a variant is loaded ({resident()})",
                way_out="lower budget_bytes, max_batch or the number of variants in use",
            ) from error
