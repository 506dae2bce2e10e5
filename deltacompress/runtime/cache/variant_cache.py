"""Which variants are ready on the device: a byte budget, least recently used out first, nothing in use ever out.

Three tiers: device, pinned host memory (GPUs only: on a CPU the two are the same memory), disk. Pinned memory holds
what took work to decode; what an artifact stores plainly is read from its file each time, through the page cache, which
is as fast (loader.py). A variant comes over a stream of its own while other variants compute; events, not waits, put
the two in order. All decisions are taken here, on the caller's thread; workers only read and decode.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from deltacompress.errors import BackendError, InputError
from deltacompress.kernels import Backend
from deltacompress.runtime.batch import MAX_VARIANTS
from deltacompress.runtime.cache.loaded_variant import LoadedVariant, Operands, Sources
from deltacompress.runtime.cache.transfer import Transfer
from deltacompress.runtime.loading.loader import check_stored
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.variants.variant import Variant


class VariantCache:
    """The loaded variants of one model."""

    def __init__(
        self, model: DecoupledModel, kernels: Backend | None, *, budget_bytes: int | None, host_bytes: int | None
    ) -> None:
        self.variants: dict[str, LoadedVariant] = {}
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.loads = 0  # times that a variant came to the device: what a budget costs
        self._model, self._kernels = model, kernels
        self._cuda = model.device.type == "cuda"
        self._transfer = Transfer(model.device, kernels)
        self._stream = self._transfer.stream
        self._movers = ThreadPoolExecutor(1, "deltacompress-move")
        self._clock = 0

    # --- loading and unloading ---------------------------------------------------------------------------------------

    def check_free(self, name: str) -> None:
        """Make sure that a variant can have this name.

        Raises:
            InputError: the name is taken, or empty.
        """
        if not name:
            raise InputError("a variant's name is empty", way_out="leave it out to use the directory's or entry's")
        if name != str(name) or not name.isprintable():
            raise InputError(f"{name!r:.60} is no name for a variant", way_out="give one of printable characters")
        if name in self.variants:
            raise InputError(
                f"a variant named {name} is loaded already", way_out="give another name, or unload it first"
            )

    def add(self, name: str, variant: Variant, sources: Sources, *, verify: bool = True) -> LoadedVariant:
        """Keep a variant, of which `read` gave these sources, and bring it to the device if there is room.

        verify: compare what is read from files with its recorded hash, each time that it comes.

        Raises:
            BackendError: the budget is too small for it, or there are too many variants.
        """
        if len(self.variants) >= MAX_VARIANTS:
            raise BackendError(f"{MAX_VARIANTS} variants are loaded, the most there can be", way_out="unload one")
        nbytes = sources.placed_bytes(self._kernels)
        if self.budget_bytes is not None and nbytes > self.budget_bytes:
            raise BackendError(
                f"{nbytes} bytes as it is served, more than the whole budget of {self.budget_bytes}",
                where=variant.folder,
                way_out="raise budget_bytes",
            )
        taken = {loaded.slot for loaded in self.variants.values()}
        slot = next(number for number in range(1, MAX_VARIANTS + 1) if number not in taken)
        loaded = LoadedVariant(name, slot, variant, nbytes, sources=sources, verify=verify)
        self.variants[name] = loaded
        try:
            self.start(name)
        except BaseException:
            self.drop(name)
            raise
        if not self._cuda:
            loaded.sources = None  # what does not fit now is read again when it is asked for
        self._trim_host(keep=loaded)  # of which not all may have been read yet
        return loaded

    def confirm(self, name: str) -> None:
        """Wait until every byte of a new variant was read and checked; any thread may wait.

        Raises:
            IntegrityError: a part is damaged.
            BackendError: out of memory.
        """
        loaded = self.variants[name]
        if (arriving := loaded.arriving) is not None:
            try:
                arriving.result()
            finally:
                del arriving  # what it raises knows this frame, and so all that the load has made
        elif (sources := loaded.sources) is not None and not loaded.installed:
            _ = sources.host
            if loaded.verify:
                check_stored(sources.stored)

    def drop(self, name: str) -> None:
        """Forget a variant that never became usable."""
        loaded = self.variants.pop(name)
        loaded.arriving = None
        if loaded.installed:
            self._evict(loaded)

    def remove(self, name: str) -> None:
        """Forget a variant.

        Raises:
            InputError: running requests use it.
        """
        loaded = self.variants[name]
        if loaded.users:
            raise InputError(
                f"variant {name} is in use by {loaded.users} running requests", way_out="let them finish first"
            )
        self._settle(loaded)
        self._evict(loaded)
        del self.variants[name]

    # --- use ---------------------------------------------------------------------------------------------------------

    def current(self, known: LoadedVariant) -> LoadedVariant:
        """What serves a request that was checked against `known`: that, or the same artifact loaded again since then.

        Raises:
            InputError: it was unloaded, or its name is another artifact's now.
        """
        found = self.variants.get(known.name)
        if found is None:
            raise InputError(
                f"variant {known.name} was unloaded while requests for it waited", way_out="load it and ask again"
            )
        if found is not known and found.variant.identity != known.variant.identity:
            raise InputError(
                f"variant {known.name} became another one while requests for it waited", way_out="ask again"
            )
        return found

    def fits(self, names: Iterable[str]) -> bool:
        """Whether these variants fit the budget together."""
        loaded = (self.variants.get(name) for name in names)  # who acquires one that is gone is told
        return self.budget_bytes is None or sum(one.nbytes for one in loaded if one) <= self.budget_bytes

    def acquire(self, names: Iterable[str]) -> None:
        """Make these variants ready and keep them so until `release`.

        Raises:
            BackendError: they do not fit beside what running requests use.
        """
        wanted = [self.variants[name] for name in sorted(set(names))]
        for loaded in wanted:
            loaded.users += 1
        try:
            for loaded in wanted:
                if not self.start(loaded.name):
                    raise self._too_small(loaded)
            for loaded in wanted:
                self._settle(loaded)
        except BaseException:
            self.release(loaded.name for loaded in wanted)
            raise

    def release(self, names: Iterable[str]) -> None:
        """Undo one `acquire`."""
        for name in set(names):
            self.variants[name].users -= 1

    def start(self, name: str) -> bool:
        """Begin to bring a variant to the device, if there is or can be made room for it; False if there is not."""
        loaded = self.variants[name]
        self._clock += 1
        loaded.used = self._clock
        if loaded.counts:
            return True
        if not self._make_room(loaded):
            return False
        self.loads += 1
        if self._cuda:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream(self._model.device))  # evicted memory may still be read
            loaded.arriving = self._movers.submit(self._bring, loaded)
        else:
            sources = loaded.sources if loaded.sources is not None else self.read(loaded.variant)
            self._model.install(loaded.slot, self._placed(loaded, sources))
            loaded.installed = True
        return True

    def ready(self, name: str) -> bool:
        """Whether a variant can be used without waiting; what has arrived is installed."""
        loaded = self.variants[name]
        if loaded.arriving is not None and loaded.arriving.done():
            self._settle(loaded)
        return loaded.installed

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all variants on the device, those on their way included."""
        return sum(loaded.nbytes for loaded in self.variants.values() if loaded.counts)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _make_room(self, wanted: LoadedVariant) -> bool:
        if self.budget_bytes is None:
            return True
        if self.bytes_in_use + wanted.nbytes > self.budget_bytes:
            self._let_unused_arrive(wanted)
        idle = [one for one in self.variants.values() if one.installed and not one.users and one is not wanted]
        freeable = sum(one.nbytes for one in idle)
        if self.bytes_in_use - freeable + wanted.nbytes > self.budget_bytes:
            return False
        for one in sorted(idle, key=lambda one: one.used):
            if self.bytes_in_use + wanted.nbytes <= self.budget_bytes:
                break
            self._evict(one)
        return True

    def _let_unused_arrive(self, wanted: LoadedVariant) -> None:
        """Wait for what is on its way for nobody: only what has arrived can leave. An error there is its own user's."""
        for one in self.variants.values():
            if one is not wanted and one.arriving is not None and not one.users and one.arriving.exception() is None:
                self._settle(one)

    def _evict(self, loaded: LoadedVariant) -> None:
        if self._stream is not None:  # what is on its way already may get this memory, which may still be read
            self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        self._model.uninstall(loaded.slot)
        loaded.installed = False

    def _settle(self, loaded: LoadedVariant) -> None:
        """Wait for a variant on its way and install it: the compute stream waits for the copies, the host does not."""
        if loaded.arriving is None:
            return
        try:
            operands, event = loaded.arriving.result()
        finally:
            loaded.arriving = None
        if event is not None:
            torch.cuda.current_stream(self._model.device).wait_event(event)
        self._model.install(loaded.slot, operands)
        loaded.installed = True
        self._trim_host(keep=loaded)

    def _bring(self, loaded: LoadedVariant) -> tuple[Operands, torch.cuda.Event | None]:
        """On the mover's thread: host or disk -> device, on the copy stream."""
        sources = loaded.sources if loaded.sources is not None else self.read(loaded.variant)
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):
            operands = self._placed(loaded, sources)
            event = torch.cuda.Event()
            event.record(self._stream)
        event.synchronize()
        loaded.brought_s, loaded.sources = time.perf_counter() - started, sources
        return operands, event

    def _placed(self, loaded: LoadedVariant, sources: Sources) -> Operands:
        return self._transfer.place(sources, verify=loaded.verify, resident=self.describe)

    def describe(self) -> str:
        """What is resident, for messages."""
        held = ", ".join(f"{one.name} {one.nbytes}" for one in self.variants.values() if one.counts) or "none"
        return f"resident, in bytes: {held}"

    def read(self, variant: Variant) -> Sources:
        """Every operand of a variant, decoded and checked; see Transfer.read."""
        return self._transfer.read(variant, lambda operands: self._model.check(operands, variant.folder))

    def _trim_host(self, keep: LoadedVariant | None = None) -> None:
        """Drop pinned copies, least recently used first, until they fit the host's budget."""
        if self.host_bytes is None or not self._cuda:
            return
        holders = [one for one in self.variants.values() if one.sources is not None]
        total = sum(one.pinned_bytes for one in holders)
        for one in sorted(holders, key=lambda one: one.used):
            if total <= self.host_bytes:
                return
            if one is not keep and one.arriving is None:
                total -= one.pinned_bytes
                one.sources = None

    def _too_small(self, wanted: LoadedVariant) -> BackendError:
        used = {one.name: one.nbytes for one in self.variants.values() if one.users}
        return BackendError(
            f"the variants in use ({', '.join(sorted(used))}) take {sum(used.values())} bytes, the budget is "
            f"{self.budget_bytes}: no room for {wanted.name}",
            way_out="raise budget_bytes or use fewer at once",
        )
