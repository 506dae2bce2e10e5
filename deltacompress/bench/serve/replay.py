"""The open loop: a thread submits at the trace's times whatever the engine does, the caller's thread steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from threading import Event, Thread

from deltacompress.bench.serve.calls import Asked, call_of
from deltacompress.bench.serve.models import Models, evict_all
from deltacompress.bench.serve.records import Record, Recorder, Step
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits

_WAIT_S = 0.05


def replay(
    models: Models, asked: Sequence[Asked], limits: EngineLimits, seed: int, stop_s: float = float("inf")
) -> tuple[list[Record], list[Step]]:
    """Serve these in real time; what became of each, in their order, and the steps.

    limits: max_queue at least as many as are asked, so that none is refused. stop_s: after which all are cancelled.

    Raises:
        InputError: a request cannot be served: it is longer than the context, say.
    """
    runtime, loads, start = models.runtime, Loads(models.runtime), time.monotonic()
    recorder = Recorder(asked, lambda: time.monotonic() - start, loads.seconds)
    engine, counters = runtime.engine(recorder.emit, limits), runtime.cache.counters
    with closing(engine):
        _warm(engine, models)
        start = time.monotonic()
        thread = _Submitting(engine, models, recorder, loads, start, seed)
        thread.start()
        try:
            while recorder.left and thread.error is None and time.monotonic() - start < stop_s:
                begun, before, computed = time.perf_counter(), counters.loads, engine.computed_tokens
                if not engine.step():
                    engine.wait(_WAIT_S)
                    continue
                seconds = time.perf_counter() - begun
                recorder.step(seconds, counters.loads - before, engine.computed_tokens - computed)
        finally:
            thread.stop()
    if thread.error is not None:
        raise thread.error
    return list(recorder.records.values()), recorder.steps


def _warm(engine: Engine, models: Models) -> None:
    """As a server that has its variants; afterwards there are on the device, and counted, those that were before."""
    cache = models.runtime.cache
    is_empty, before = not cache.residents.by_slot, dict(vars(cache.counters))
    if models.runtime.device.type == "cuda" and is_empty:
        cache.acquire(models.names[:1])
        cache.release(models.names[:1])
    engine.warm()
    if is_empty:
        evict_all(models)
        vars(cache.counters).update(before)


class Loads:
    """Which requests found their variant on the device, and how long those that did not waited for it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._before: dict[str, int] = {}

    def note(self, record: Record) -> None:
        """Of a request that is about to be submitted."""
        if (name := record.asked.variant) is not None:
            loaded = self._runtime.variants[name]
            record.hit, self._before[record.asked.id] = loaded.installed, loaded.counters.loads

    def seconds(self, record: Record) -> float:
        """That its variant took to come since then; 0 where it was there."""
        name = record.asked.variant
        if name is None or self._runtime.variants[name].counters.loads == self._before[record.asked.id]:
            return 0.0
        return self._runtime.variants[name].brought_s


class _Submitting(Thread):
    """Submits every request at its time. error: what ended it before the last one."""

    def __init__(
        self, engine: Engine, models: Models, recorder: Recorder, loads: Loads, start: float, seed: int
    ) -> None:
        super().__init__(name="deltacompress-submit", daemon=True)
        self.error: BaseException | None = None
        self._engine, self._models, self._recorder = engine, models, recorder
        self._loads, self._start, self._stopped, self._seed = loads, start, Event(), seed

    def run(self) -> None:
        """Until all are submitted."""
        try:
            for record in self._recorder.records.values():
                call = call_of(record.asked, self._models.shape.vocabulary, self._seed)
                left = self._start + record.asked.arrival.at_s - time.monotonic()
                if self._stopped.wait(max(0.0, left)):
                    return
                self._loads.note(record)
                record.submitted_s = time.monotonic() - self._start
                self._engine.submit(call)
        except BaseException as error:  # noqa: BLE001 - whoever steps raises it
            self.error = error

    def stop(self) -> None:
        """Submit no more."""
        self._stopped.set()
        self.join()
