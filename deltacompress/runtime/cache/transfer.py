"""A variant's way to the device: from its files, or from pinned host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from deltacompress.errors import BackendError, InputError, to_free_memory
from deltacompress.kernels import Backend
from deltacompress.numerics.compiled.threads import one_thread_here
from deltacompress.runtime.cache.loaded_variant import Operands, Reading, Sources
from deltacompress.runtime.loading.loader import Loader
from deltacompress.runtime.operands.operand import Operand, PinnedMemory
from deltacompress.runtime.variants.variant import Variant, plain_memory

_READERS = 16
"""Threads: what BOFT and DoRA make of a 7B's modules is a second's work."""


class Transfer:
    """Reads and places operands on one device. stream: the copy stream, None on a CPU."""

    def __init__(self, device: torch.device, kernels: Backend | None) -> None:
        self._device, self._kernels = device, kernels
        # what packs a variant is little, and would wait for room between the launches of what is served
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._loader: Loader | None = None
        if kernels is not None and kernels.ingest is not None and self.stream is not None:
            self._loader = Loader(kernels, kernels.ingest, self.stream)
        self._readers = ThreadPoolExecutor(
            min(_READERS, os.cpu_count() or 1), "deltacompress-read", one_thread_here, (torch.get_num_threads(),)
        )

    def read(self, variant: Variant, check: Callable[[Operands], None] = lambda _: None) -> Sources:
        """Decode and check every part of a variant: its operands in host memory, pinned where copies follow; parts that
        a GPU takes as they are stored stay where they are.

        Where there are such, and the variant knows what the others weigh, a thread reads these while those come, and
        `Sources.host` raises what goes wrong. Any thread may call this, also while requests run.

        Args:
            check: raises where the operands in host memory cannot serve.

        Raises:
            IntegrityError: a part is damaged or not finite.
            BackendError: this machine cannot decode the lossless codec.
        """
        paths, stored = variant.paths(), {}
        if self._loader is not None:
            stored = {path: one for path in paths if (one := variant.stored(path)) is not None}
        rest = [path for path in paths if path not in stored]

        def read(threads: ThreadPoolExecutor | None = None) -> Operands:
            operands = self._operands(variant, rest, threads)
            check(operands)
            return operands

        if stored and self.stream is not None:
            sizes = [size for path in rest if (size := variant.operand_bytes(path)) is not None]
            if len(sizes) == len(rest):
                return Sources(Reading(self._readers.submit(read), sum(sizes)), stored)
        if self.stream is None:
            return Sources(read(), stored)
        return Sources(read(self._readers), stored)

    def _operands(self, variant: Variant, paths: Sequence[str], threads: ThreadPoolExecutor | None) -> Operands:
        pinned = PinnedMemory()

        def operand(path: str) -> Operand | None:
            found = variant.operand(path)
            said = variant.operand_bytes(path)
            if said is not None and said != (0 if found is None else found.nbytes):
                raise InputError(f"brings for {path} other than the {said} bytes that it told", where=variant.folder)
            return found if found is None or self.stream is None else found.pinned(pinned)

        memory, device = (plain_memory, None) if self.stream is None else (pinned.alone, self._device)
        # without a stream torch.cuda.stream would still start CUDA, where there is a GPU beside
        on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with on_stream, variant.reading(memory, threads, device):
            if threads is None:
                found: Iterable[Operand | None] = map(operand, paths)
            elif variant.decodes:
                found = threads.map(operand, paths)
            else:
                # small tensors only wait for each other's Python, and one that is computed by all of a machine's
                # threads takes longer to give them their share than to be done with
                found = threads.submit(lambda: [*map(operand, paths)]).result()
            return {path: one for path, one in zip(paths, found, strict=True) if one is not None}

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
            try:
                host = sources.host
            except BaseException:
                found.clear()  # what is raised knows this frame, and `sources` knows it
                raise
            return found | {path: one.placed(self._device, self._kernels) for path, one in host.items()}
        except torch.OutOfMemoryError as error:
            raise no_memory(self._device, resident()) from error


def no_memory(device: torch.device, resident: str) -> BackendError:
    """What is told of a variant that finds none on its way; resident: what is on the device, in words."""
    return BackendError(
        f"{device} is out of memory while a variant is loaded ({resident})",
        way_out=to_free_memory(),
    )
