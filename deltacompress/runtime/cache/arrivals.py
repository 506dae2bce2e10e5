"""How variants come to the device and leave it: over a stream of their own, while other variants compute.

Events, not waits, put the two in order. All decisions are taken on the caller's thread; workers only read and decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from deltacompress.errors import BackendError, InputError, IntegrityError
from deltacompress.kernels import Backend
from deltacompress.runtime.cache.loaded_variant import Counters, LoadedVariant, Operands, Sources
from deltacompress.runtime.cache.residents import Residents
from deltacompress.runtime.cache.transfer import Transfer, no_memory
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.variants.variant import Variant


class Arrivals:
    """Brings variants to the device of one model, and makes room there.

    stream: the copy stream, None on a CPU, where a variant has come when `start` returns.
    """

    def __init__(
        self,
        model: DecoupledModel,
        kernels: Backend | None,
        residents: Residents,
        total: Counters,
        arrived: Callable[[LoadedVariant], None],
    ) -> None:
        """total: counts for all variants together; arrived: called when one has come over the stream."""
        self._model, self._residents, self._total, self._arrived = model, residents, total, arrived
        self.transfer = Transfer(model.device, kernels)
        self.stream = self.transfer.stream
        self._movers = ThreadPoolExecutor(1, "deltacompress-move")

    def read(self, variant: Variant) -> Sources:
        """Every operand of a variant, decoded and checked; see Transfer.read."""
        return self.transfer.read(variant, lambda operands: self._model.check(operands, variant.folder))

    def start(self, loaded: LoadedVariant) -> bool:
        """Begin to bring a variant to the device, if there is or can be made room for it; False if there is not."""
        if loaded.slot is not None:
            return True
        if not self._make_room(loaded):
            return False
        self._residents.enter(loaded)
        try:
            others_have_read = self._model.others.prepare(loaded.variant)
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(self._model.device))  # evicted memory may be read
                loaded.arriving = self._movers.submit(self._bring, loaded, others_have_read)
            else:
                started = time.perf_counter()
                operands = self._brought(loaded, others_have_read)
                loaded.brought_s = time.perf_counter() - started
                self._install(loaded, operands)
        except BaseException:
            self.leave(loaded)
            raise
        return True

    def _make_room(self, wanted: LoadedVariant) -> bool:
        leaving = self._residents.leaving(wanted)
        if leaving != []:
            self.let_unused_arrive()
            leaving = self._residents.leaving(wanted)
        for one in leaving or ():
            self.evict(one)
        return leaving is not None

    def evict(self, loaded: LoadedVariant) -> None:
        """Let one leave to make room."""
        self.leave(loaded)
        for counters in (loaded.counters, self._total):
            counters.evictions += 1

    def let_unused_arrive(self, but: Collection[str | None] = (), *, wait: bool = True) -> None:
        """Install what is on its way and that nobody uses: only what has arrived can leave.

        What cannot arrive gives its slot back; its own user asks for it once more, and is told then. but: names to
        leave as they are; wait: for those that have not arrived yet.
        """
        for one in list(self._residents.by_slot.values()):
            if one.arriving is not None and not one.users and one.name not in but and (wait or one.arriving.done()):
                if one.arriving.exception() is None:
                    with suppress(InputError, IntegrityError, BackendError):  # it is let go of, too
                        self.settle(one)
                else:
                    one.arriving = None
                    self.leave(one)

    def leave(self, loaded: LoadedVariant) -> None:
        """Let go of all that it has on the device, and of its slot."""
        if loaded.installed:
            assert loaded.slot is not None
            if self.stream is not None:  # what is on its way already may get this memory, which may still be read
                self.stream.wait_stream(torch.cuda.current_stream(self._model.device))
            self._model.uninstall(loaded.slot)
            self._model.others.leave(loaded.slot)
            loaded.installed = False
        self._residents.leave(loaded)

    def settle(self, loaded: LoadedVariant) -> None:
        """Wait for a variant on its way and install it: the compute stream waits for the copies, the host does not."""
        if loaded.arriving is None:
            return
        try:
            operands, event = loaded.arriving.result()
            if event is not None:
                torch.cuda.current_stream(self._model.device).wait_event(event)
            self._install(loaded, operands)
        except BaseException:
            self.leave(loaded)
            raise
        finally:
            loaded.arriving = None
        self._arrived(loaded)

    def _install(self, loaded: LoadedVariant, operands: Operands) -> None:
        assert loaded.slot is not None
        loaded.installed = True  # from the first one on there is something to take back
        try:
            self._model.install(loaded.slot, operands)
        except torch.OutOfMemoryError as error:  # the variant's own affair, and not that of who computes meanwhile
            raise no_memory(self._model.device, self._residents.describe()) from error
        self._model.others.bring(loaded.slot, loaded.variant)
        for counters in (loaded.counters, self._total):
            counters.loads += 1
            counters.load_seconds += loaded.brought_s

    def _bring(
        self, loaded: LoadedVariant, others_have_read: Callable[[], None]
    ) -> tuple[Operands, torch.cuda.Event | None]:
        """On the mover's thread: host or disk -> device, on the copy stream."""
        started = time.perf_counter()
        with torch.cuda.stream(self.stream):
            operands = self._brought(loaded, others_have_read)
            event = torch.cuda.Event()
            event.record(self.stream)
        event.synchronize()
        loaded.brought_s = time.perf_counter() - started
        return operands, event

    def _brought(self, loaded: LoadedVariant, others_have_read: Callable[[], None]) -> Operands:
        """Its operands on the device, from wherever it is, once other ranks have read theirs."""
        sources = loaded.sources if loaded.sources is not None else self.read(loaded.variant)
        found = self.transfer.place(sources, verify=loaded.verify, resident=self._residents.describe)
        others_have_read()
        if self.stream is not None:  # on a CPU the operands themselves are all that is kept
            loaded.sources = sources
        return found
