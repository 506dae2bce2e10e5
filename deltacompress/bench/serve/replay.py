"""The open loop: a thread submits at the trace's times whatever the engine does, the caller's thread steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event, Thread

from deltacompress.bench.serve.calls import Asked, call_of
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.records import Record, Recorder, Step
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits

_WAIT_S = 0.05


def replay(models: Models, asked: Sequence[Asked], limits: EngineLimits, seed: int) -> tuple[list[Record], list[Step]]:
    """Serve these in real time; what became of each, in their order, and the steps that did nothing but decode.

    limits: max_queue at least as many as are asked, so that none is refused.

    Raises:
        InputError: a request cannot be served: it is longer than the context, say.
    """
    runtime, loads = models.runtime, dict[str, int]()

    def load_s(record: Record) -> float:
        name = record.asked.variant
        if name is None or runtime.variants[name].counters.loads == loads[record.asked.id]:
            return 0.0
        return runtime.variants[name].brought_s

    start = time.monotonic()
    recorder = Recorder(asked, lambda: time.monotonic() - start, load_s)
    engine, steps = runtime.engine(recorder.emit, limits), list[Step]()
    thread = _Submitting(engine, models, recorder, loads, start, seed)
    thread.start()
    try:
        while recorder.left and thread.error is None:
            begun = time.perf_counter()
            if not engine.step():
                engine.wait(_WAIT_S)
                continue
            step = recorder.step(time.perf_counter() - begun, engine.counts.running)
            if step is not None:
                steps.append(step)
    finally:
        thread.stop()
        engine.close()
    if thread.error is not None:
        raise thread.error
    return list(recorder.records.values()), steps


class _Submitting(Thread):
    """Submits every request at its time. error: what ended it before the last one."""

    def __init__(
        self, engine: Engine, models: Models, recorder: Recorder, loads: dict[str, int], start: float, seed: int
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
                if (name := record.asked.variant) is not None:
                    loaded = self._models.runtime.variants[name]
                    record.hit, self._loads[record.asked.id] = loaded.installed, loaded.counters.loads
                record.submitted_s = time.monotonic() - self._start
                self._engine.submit(call)
        except BaseException as error:  # noqa: BLE001 - whoever steps raises it
            self.error = error

    def stop(self) -> None:
        """Submit no more."""
        self._stopped.set()
        self.join()
