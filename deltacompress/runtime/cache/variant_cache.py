"""Which variants are ready on the device: a byte budget, least recently used out first, nothing in use ever out.

Three tiers: device, pinned host memory (GPUs only: on a CPU the two are the same memory), disk. Pinned memory holds
what took work to decode; what an artifact stores plainly is read from its file each time, through the page cache, which
is as fast (loader.py). What is loaded has no slot until it starts to come to the device (residents.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from deltacompress.errors import BackendError, InputError
from deltacompress.kernels import Backend
from deltacompress.runtime.batch import MAX_VARIANTS
from deltacompress.runtime.cache.arrivals import Arrivals
from deltacompress.runtime.cache.loaded_variant import Counters, LoadedVariant, Sources
from deltacompress.runtime.cache.residency import Residency, residency
from deltacompress.runtime.cache.residents import Residents
from deltacompress.runtime.loading.loader import check_stored
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.variants.variant import Variant


class VariantCache:
    """The loaded variants of one model: those of `variants` can be used, others are still being loaded."""

    def __init__(
        self,
        model: DecoupledModel,
        kernels: Backend | None,
        *,
        budget_bytes: int | None,
        host_bytes: int | None,
        slots: int = MAX_VARIANTS,
    ) -> None:
        """slots: variants that can be on the device at once."""
        self.variants: dict[str, LoadedVariant] = {}
        self.residents = Residents(slots, budget_bytes)
        self.host_bytes = host_bytes
        self.counters = Counters()  # of all variants, those that were unloaded included
        self._new: dict[str, LoadedVariant] = {}
        self._kernels = kernels
        self.arrivals = Arrivals(model, kernels, self.residents, self.counters, self._trim_host)
        self._clock = self._number = 0

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
        if name in self.variants or name in self._new:
            raise InputError(
                f"a variant named {name} is loaded already", way_out="give another name, or unload it first"
            )

    def made(
        self, name: str, variant: Variant, sources: Sources, *, verify: bool = True, pin: bool = False
    ) -> LoadedVariant:
        """What `add` takes: a variant, of which `read` gave these sources.

        verify: compare what is read from files with its recorded hash, each time that it comes. pin: it never leaves.
        """
        nbytes = sources.placed_bytes(self._kernels)
        return LoadedVariant(name, variant, nbytes, sources=sources, verify=verify, pin=pin)

    def add(self, loaded: LoadedVariant) -> None:
        """Keep a new variant, and bring it to the device if there is room; nobody can use it before `publish`.

        Raises:
            BackendError: budget or slots are too few for it, or it is to be pinned and there is no room now.
        """
        self.residents.check(loaded, self._all())
        self._number += 1
        loaded.number = self._number
        self._new[loaded.name] = loaded
        if not self._start(loaded) and loaded.pin:
            raise self.residents.no_room(loaded)
        if self.arrivals.stream is None:
            loaded.sources = None  # what does not fit now is read again when it is asked for
        self._trim_host(keep=loaded)  # of which not all may have been read yet

    def confirm(self, loaded: LoadedVariant) -> None:
        """Wait until every byte of a new variant was read and checked; any thread may wait.

        Raises:
            IntegrityError: a part is damaged.
            BackendError: out of memory.
        """
        if (arriving := loaded.arriving) is not None:
            try:
                arriving.result()
            finally:
                del arriving  # what it raises knows this frame, and so all that the load has made
        elif (sources := loaded.sources) is not None and not loaded.installed:
            _ = sources.host
            if loaded.verify:
                check_stored(sources.stored)

    def publish(self, loaded: LoadedVariant) -> None:
        """Let requests use a new variant that was confirmed."""
        self.variants[loaded.name] = self._new.pop(loaded.name)

    def drop(self, loaded: LoadedVariant) -> bool:
        """Forget a variant whose load was given up; False if it never was added, or running requests use it already."""
        holder = next((held for held in (self._new, self.variants) if held.get(loaded.name) is loaded), None)
        if holder is None or loaded.users:
            return False
        del holder[loaded.name]
        loaded.arriving = None
        self.arrivals.leave(loaded)
        return True

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
        if loaded.arriving is not None:
            loaded.arriving.exception()  # waits; whether it could come is nobody's affair any more
            loaded.arriving = None
        self.arrivals.leave(loaded)
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
        """Whether these variants fit budget and slots together."""
        loaded = (self.variants.get(name) for name in names)  # who acquires one that is gone is told
        return self.residents.fits([one for one in loaded if one is not None])

    def acquire(self, names: Iterable[str]) -> dict[str, int]:
        """Make these variants ready and keep them so until `release`; returns their slots, which stay until then.

        Raises:
            BackendError: they do not fit beside what running requests use.
        """
        wanted = [self.variants[name] for name in sorted(set(names))]
        for loaded in wanted:
            loaded.users += 1
        found: dict[str, int] = {}
        try:
            for loaded in wanted:
                if not self.start(loaded.name):
                    raise self.residents.no_room(loaded)
            for loaded in wanted:
                self.arrivals.settle(loaded)
                assert loaded.slot is not None
                found[loaded.name] = loaded.slot
        except BaseException:
            self.release(loaded.name for loaded in wanted)
            raise
        for loaded in wanted:
            for counters in (loaded.counters, self.counters):
                counters.hits += not loaded.awaited
                counters.misses += loaded.awaited
            loaded.awaited = False
        return found

    def release(self, names: Iterable[str]) -> None:
        """Undo one `acquire`."""
        for name in set(names):
            self.variants[name].users -= 1

    def start(self, name: str) -> bool:
        """Begin to bring a variant to the device, if there is or can be made room for it; False if there is not."""
        loaded = self.variants[name]
        if not loaded.installed:
            loaded.awaited = True
        return self._start(loaded)

    def ready(self, name: str) -> bool:
        """Whether a variant can be used without waiting; what has arrived is installed."""
        loaded = self.variants[name]
        if loaded.arriving is not None and loaded.arriving.done():
            self.arrivals.settle(loaded)
        return loaded.installed

    def collect(self, waited_for: Collection[str | None]) -> None:
        """Install what has arrived though nobody waits for it, so that it can leave; of the others `ready` tells."""
        self.arrivals.let_unused_arrive(waited_for, wait=False)

    def settle(self, name: str) -> None:
        """Wait for a variant that is on its way; raises what its way raised."""
        self.arrivals.settle(self.variants[name])

    def await_all(self) -> bool:
        """Wait for all that are on their way, whatever becomes of them; False if none is."""
        arriving = [one.arriving for one in self.residents.by_slot.values() if one.arriving is not None]
        for one in arriving:
            one.exception()
        return bool(arriving)

    def evict(self, name: str) -> None:
        """Let a variant that nothing keeps leave the device."""
        [loaded] = [one for one in self.residents.by_slot.values() if one.name == name]
        self.arrivals.evict(loaded)

    def no_room(self, name: str) -> BackendError:
        """Why a variant cannot be brought."""
        return self.residents.no_room(self.variants[name])

    @property
    def budget_bytes(self) -> int | None:
        """Of all variants on the device."""
        return self.residents.budget_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all variants on the device, those on their way included."""
        return self.residents.nbytes

    def describe(self) -> str:
        """What is resident, for messages."""
        return self.residents.describe()

    def residency(self) -> Residency:
        """Where each variant is, and what was counted."""
        listed = self.variants.values()
        return residency(self.residents, listed, self.counters, host_budget_bytes=self.host_bytes)

    def read(self, variant: Variant) -> Sources:
        """Every operand of a variant, decoded and checked; see Transfer.read."""
        return self.arrivals.read(variant)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[LoadedVariant]:
        yield from self.variants.values()
        yield from self._new.values()

    def _start(self, loaded: LoadedVariant) -> bool:
        self._clock += 1
        loaded.used = self._clock
        return self.arrivals.start(loaded)

    def _trim_host(self, keep: LoadedVariant | None = None) -> None:
        """Drop pinned copies, least recently used first, until they fit the host's budget."""
        if self.host_bytes is None or self.arrivals.stream is None:
            return
        holders = [one for one in self._all() if one.sources is not None]
        total = sum(one.pinned_bytes for one in holders)
        for one in sorted(holders, key=lambda one: one.used):
            if total <= self.host_bytes:
                return
            if one is not keep and one.arriving is None and one.name not in self._new:
                total -= one.pinned_bytes
                one.sources = None


class Sizes(Mapping[str, int]):
    """Bytes of each loaded variant on the device, looked at when they are asked for."""

    def __init__(self, variants: Mapping[str, LoadedVariant]) -> None:
        self._variants = variants

    def __getitem__(self, name: str) -> int:
        return self._variants[name].nbytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._variants)

    def __len__(self) -> int:
        return len(self._variants)
