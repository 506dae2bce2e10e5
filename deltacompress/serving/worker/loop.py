"""The engine's process at work: one thread steps, one takes orders, one loads variants, two tell of it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq

from deltacompress.errors import DeltaCompressError, InputError, PromptTooLongError, failure
from deltacompress.models.chat.places import TemplateBusyError
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Counts, Event
from deltacompress.serving.channel import ORDERS, Teller, open_socket
from deltacompress.serving.messages import (
    Accepted,
    Batch,
    Beat,
    Cancel,
    Done,
    Failed,
    Failure,
    Happening,
    Load,
    Order,
    Ready,
    Refused,
    Start,
    State,
    Stop,
    Submit,
    Unload,
    Variant,
    happening,
)
from deltacompress.serving.worker.conversations import Conversations
from deltacompress.serving.worker.entries import Entries

_TOLD_EVERY = _BEATS_EVERY = 0.5
"""Seconds between two reports of the state, and between two signs of life, which wait for no lock."""
_WAITS = 0.2
"""Seconds that an idle engine waits before it looks whether it is to stop."""


class EngineLike(Protocol):
    """What is asked of an engine; runtime/engine/live has it."""

    def submit(self, call: Call) -> int:
        """Take a call; its prompt's tokens."""

    def cancel(self, call_id: str) -> None:
        """End a call."""

    def step(self) -> bool:
        """Compute; False: nothing to do."""

    def wait(self, seconds: float) -> None:
        """Until there may be something to do."""

    @property
    def counts(self) -> Counts:
        """What waits and what runs."""

    def close(self) -> None:
        """End every call that is left."""


class ModelsLike(Protocol):
    """What is asked of whoever has the variants; Runtime has it."""

    @property
    def notes(self) -> list[str]:
        """What a user should know."""

    @property
    def variants(self) -> Mapping[str, Any]:
        """The loaded ones by name."""

    def load(self, artifact: str, name: str, *, over: str | Path | None, zoo: str | None, pin: bool) -> str:
        """Load one."""

    def unload(self, name: str) -> None:
        """Forget one."""

    def residency(self) -> Any:
        """Where each is, as runtime.cache.residency has it."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the process works with.

    full: the error of `submit` that says that the queue is; context: tokens that a variant (None: the base) takes, None
    for no end; check: raises what became of a device that is lost; warm: before the first call; close: after the last.
    """

    engine: EngineLike
    models: ModelsLike
    full: type[DeltaCompressError]
    context: Callable[[str | None], int | None]
    check: Callable[[], None] = lambda: None
    warm: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


Build = Callable[[Start, Callable[[Event], None]], Served]
"""Makes all of it from what the process was told and the engine's `emit`; the variants are loaded afterwards."""


class Worker:
    """One engine between its two sockets."""

    def __init__(self, start: Start, build: Build, teller: Teller) -> None:
        self._start, self._teller = start, teller
        self._orders = open_socket(zmq.Context[Any](), zmq.PULL, start.orders, binds=False)
        self._events: list[Happening] = []
        self._stopping = threading.Event()
        self._step = 0  # the number of the one that this process is at
        self._changes = queue.Queue[Load | Unload | None]()
        self._state_lock = threading.Lock()
        served = build(start, self._emit)
        self.engine, self.models, self._served = served.engine, served.models, served
        self._entries = Entries(start.zoo, start.base)
        self._conversations = Conversations(self._submit, self._refuse_late, self.engine.cancel)
        for name, source in start.variants:
            self._load(source, name, start.entries.get(name), over=None, pin=False)

    def run(self) -> None:
        """Until it is told to stop."""
        self._served.warm()
        self._teller.tell(Ready(self._state(), tuple(self.models.notes)))
        for work in (self._listen, self._change, self._report, self._beat):
            threading.Thread(target=work, daemon=True).start()
        try:
            for self._step in itertools.count(1):
                if self._stopping.is_set():
                    break
                did = self.engine.step()
                self._flush()
                if not did:
                    self._served.check()
                    self.engine.wait(_WAITS)
        finally:
            self._stopping.set()
            self.engine.close()
            self._flush()

    def _emit(self, event: Event) -> None:
        self._events.append(happening(event))

    def _flush(self) -> None:
        if self._events:
            told, self._events = self._events, []
            self._teller.tell(Batch(tuple(told)))

    def _listen(self) -> None:
        while not self._stopping.is_set():
            order: Order = ORDERS.decode(self._orders.recv())
            match order:
                case Submit() if self._conversations.takes(order):
                    self._conversations.add(order)
                case Submit():
                    self._submit(order)
                case Cancel(id=name):
                    self._conversations.cancel(name)
                case Load() | Unload():
                    self._changes.put(order)
                case Stop():
                    self._stopping.set()

    def _submit(self, order: Submit) -> None:
        if order.variant is not None and order.variant not in self.models.variants:
            unknown = InputError(f"the model {order.variant} is not loaded", way_out="see /v1/models")
            self._teller.tell(Refused(order.id, "model", Failure.of(unknown)))
            return
        try:
            tokens = self.engine.submit(order.call())
        except TemplateBusyError:
            self._refuse_late(order)
        except Exception as error:  # noqa: BLE001 - one call fails, whatever it was, and no other
            told = failure(error, debug=True, again="")
            is_full = isinstance(told, self._served.full)
            why = "full" if is_full else "input" if isinstance(told, InputError) else "failed"
            why = "prompt" if isinstance(told, PromptTooLongError) else why
            self._teller.tell(Refused(order.id, why, Failure.of(told)))
        else:
            self._teller.tell(self._too_long(order, tokens) or Accepted(order.id, tokens))

    def _refuse_late(self, order: Submit) -> None:
        late = InputError("the model's chat template is busy with other conversations", way_out="ask again later")
        self._teller.tell(Refused(order.id, "busy", Failure.of(late)))

    def _too_long(self, order: Submit, tokens: int) -> Refused | None:
        """Refuse a call that wants more tokens than it can get; the engine would give it fewer."""
        context = self._served.context(order.variant)
        if order.max_tokens is None or context is None or tokens + order.max_tokens <= context:
            return None
        self.engine.cancel(order.id)
        told = InputError(
            f"the prompt has {tokens} tokens and max_tokens is {order.max_tokens}, but the context takes {context}",
            way_out="ask for fewer, or shorten the prompt",
        )
        return Refused(order.id, "context", Failure.of(told))

    def _change(self) -> None:
        while (order := self._changes.get()) is not None:
            try:
                if isinstance(order, Load):
                    entry = order.source if order.is_entry else self._entries.meant(order.source)
                    source = order.source if entry is None else self._entries.directory(entry)
                    self._load(source, order.name, entry, over=order.over, pin=order.pin)
                else:
                    self.models.unload(order.name)
                    self._entries.gone(order.name)
            except Exception as error:  # noqa: BLE001 - a change fails, whatever it was; those who are served stay
                self._entries.failed()
                told = failure(error, debug=True, again="")
                self._teller.tell(Failed(order.id, Failure.of(told)))
                continue
            self._tell_state()
            self._teller.tell(Done(order.id))

    def _load(self, source: str, name: str, entry: str | None, *, over: str | None, pin: bool) -> None:
        """Load a variant, and know where it came from."""
        origin = None if entry is None else self._entries.origin(entry)
        below = self._entries.beneath(entry) if entry is not None and over is None else over
        self.models.load(source, name, over=below, zoo=self._start.zoo, pin=pin)
        self._entries.loaded(name, origin)

    def _report(self) -> None:
        while not self._stopping.wait(_TOLD_EVERY):
            self._tell_state()

    def _beat(self) -> None:
        while not self._stopping.wait(_BEATS_EVERY):
            self._teller.tell(Beat(self._step))

    def _tell_state(self) -> None:
        with self._state_lock:  # so that no older state follows a newer one
            self._teller.tell(self._state())

    def _state(self) -> State:
        counts, found, origins = self.engine.counts, self.models.residency(), self._entries.origins
        loaded = dict(self.models.variants.items())  # at once, while others are loaded
        variants = tuple(
            Variant(one.name, loaded[one.name].variant.identity, one.place, one.nbytes, one.pin, origins.get(one.name))
            for one in found.variants
            if one.name in loaded
        )
        return State(
            counts.queued,
            counts.running,
            variants,
            hits=found.hits,
            misses=found.misses,
            loads=found.loads,
            evictions=found.evictions,
            device_bytes=found.device_bytes,
            host_bytes=found.host_bytes,
            prompt_tokens=counts.prompt_tokens,
            known_tokens=counts.known_tokens,
            kv_tokens=counts.kv_tokens,
            kv_room=counts.kv_room,
            preempted=counts.preempted,
            swapped=counts.swapped,
        )
