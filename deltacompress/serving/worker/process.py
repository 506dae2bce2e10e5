"""`python -m deltacompress.serving.worker.process`: the engine's process. Its standard input says what to serve.

One line of JSON (messages.Start), and then nothing: when that input ends, whoever started this is gone, and this ends
too, at once. Signals are that one's affair.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deltacompress.errors import BackendError, InternalError, failure, for_the_command_line, option
from deltacompress.processes.collector import heap_spared
from deltacompress.processes.started import ORPHANED
from deltacompress.runtime.engine.live.events import Event
from deltacompress.serving.channel import Teller
from deltacompress.serving.messages import Failure, Fatal, Start
from deltacompress.serving.worker.loop import Build, Served, Worker

if TYPE_CHECKING:
    from deltacompress.runtime.face import Runtime

_LAST_WORDS_MS = 2000
"""Milliseconds that the last reports may take to leave."""


def main(make: Build | None = None) -> int:
    """Serve until told to stop; make: engine and variants (default: the real ones)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # whoever gives this process up asks where it is
    os.dup2(2, 1)  # whatever a library prints is no result of the command
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.excepthook = _end_with_thread
    teller = Teller(start.reports)
    code = 0
    try:
        with for_the_command_line(), ExitStack() as at_end:

            def made(start: Start, emit: Callable[[Event], None]) -> Served:
                served = (make or build)(start, emit)
                at_end.callback(served.close)  # nothing else does: this process ends past all that Python does then
                at_end.enter_context(heap_spared())  # variants come and go after this, and no stream waits meanwhile
                return served

            Worker(start, made, teller).run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and ends this process
        told = failure(error, debug=True, again="")
        teller.tell(Fatal(Failure.of(told), told.exit_code))
        code = told.exit_code
    teller.close(_LAST_WORDS_MS)
    return code


def _end_with_thread(told: threading.ExceptHookArgs) -> None:
    traceback.print_exception(told.exc_value)
    os._exit(InternalError.exit_code)  # no half of an engine


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(ORPHANED)


def build(start: Start, emit: Callable[[Event], None]) -> Served:
    """The base's runtime, and an engine over it; raises as Runtime.from_base and Profile.check."""
    from deltacompress.devices import resolve_device
    from deltacompress.runtime.engine.live.engine import EngineLimits, QueueFullError
    from deltacompress.runtime.face import Runtime
    from deltacompress.runtime.parallel.others import ALONE

    if start.profile is not None:
        _check_profile(Path(start.profile), start)
    runtime = Runtime.from_base(
        start.base,
        device=start.device,
        dtype=start.dtype,
        backend=start.backend,
        budget_bytes=start.budget_bytes,
        cuda_graphs=resolve_device(start.device).type == "cuda",
        tp=start.tp,
    )
    limited = _limit_variants(runtime) if start.budget_bytes is None and runtime.device.type == "cuda" else None
    runtime.notes.insert(0, runtime.describe())
    limits = EngineLimits(start.max_batch, start.max_queue, start.step_tokens, start.prefix_bytes, start.swap_bytes)
    engine = runtime.engine(emit, limits)

    def context(variant: str | None) -> int | None:
        layout = runtime.model.base.layout if variant is None else runtime.variants[variant].variant.layout
        return layout.context

    def warm() -> None:
        if limited is not None and runtime.model.others is ALONE:  # beside others, keys and values do not look at it
            _keep_to_whole(runtime, limited)
        try:
            engine.warm()
        except BackendError as error:
            runtime.notes.append(f"forwards are not captured before the first call: {error.what}")

    return Served(engine, runtime, QueueFullError, context, runtime.model.others.check, warm, runtime.close)


def _limit_variants(runtime: Runtime) -> str:
    """Leave room for keys and values, which take what this and steps leave; the note that says so."""
    from deltacompress.devices import free_bytes
    from deltacompress.serving.profile import OF_FREE, VARIANTS_SHARE

    free = free_bytes(runtime.device)
    runtime.cache.residents.budget_bytes = budget = int(free * OF_FREE * VARIANTS_SHARE)
    told = f"variants take at most {budget / 1e9:.1f} of the {free / 1e9:.1f} GB beside the base"
    runtime.notes.insert(0, note := f"{told}: {option('budget')} changes that")
    return note


def _keep_to_whole(runtime: Runtime, limited: str) -> None:
    """Once those to begin with are loaded: what of that limit no variant can use is for keys and values, too."""
    sizes = [one.nbytes for one in runtime.cache.variants.values()]
    if (kept := runtime.cache.residents.keep_to_whole(sizes)) is not None:
        count, budget = kept
        told = f"variants take at most {budget / 1e9:.1f} GB, {count} like those that are loaded"
        runtime.notes[runtime.notes.index(limited)] = f"{told}: {option('budget')} changes that"


def _check_profile(path: Path, start: Start) -> None:
    """Before the base is loaded."""
    from deltacompress.checkpoints.reader import Checkpoint
    from deltacompress.devices import device_name, resolve_device
    from deltacompress.serving.profile import read_profile

    device = device_name(resolve_device(start.device))
    read_profile(path).check(path, device=device, config=Checkpoint.open(start.base).config)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for orders, or load, hold nothing up
