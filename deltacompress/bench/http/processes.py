"""The processes of a server that is measured: its engine over models of chance, and the server itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from deltacompress.devices import resolve_device
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.live.engine import EngineLimits, QueueFullError
from deltacompress.runtime.engine.live.events import Event
from deltacompress.serving.messages import Start
from deltacompress.serving.run import serve
from deltacompress.serving.settings import Settings
from deltacompress.serving.worker.loop import Served
from deltacompress.serving.worker.process import main

HERE = "deltacompress.bench.http.processes"
ECHO = "deltacompress.bench.http.echo"


def build(start: Start, emit: Callable[[Event], None]) -> Served:
    """As worker.process.build, with the runtime of models.made: what models of chance restore to is held to nothing."""
    device = resolve_device(start.device)
    on_gpu = device.type == "cuda"
    runtime = Runtime.from_base(
        start.base,
        device=device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        backend=start.backend,
        merge_rounding=False,
        cuda_graphs=on_gpu,
    )
    limits = EngineLimits(start.max_batch, start.max_queue, start.step_tokens, start.prefix_bytes)
    engine = runtime.engine(emit, limits)
    return Served(engine, runtime, QueueFullError, lambda _: None, warm=engine.warm)


def argv(start: Start, engine: str) -> list[str]:
    """The command of a server whose engine's process is the module `engine`."""
    limits = {"max_batch": start.max_batch, "max_queue": start.max_queue, "step_tokens": start.step_tokens}
    how = {**limits, "prefix_bytes": start.prefix_bytes, "device": start.device, "backend": start.backend}
    told = {"base": start.base, "variants": start.variants, "engine": engine, "how": how}
    return [sys.executable, "-m", HERE, json.dumps(told)]


def run_server(told: str) -> None:
    """The server's process: prints an object with its url once it takes requests, and ends at a signal."""
    given = json.loads(told)
    variants = tuple((name, source) for name, source in given["variants"])
    settings = Settings(Path(given["base"]), variants, port=0, **given["how"])
    command = [sys.executable, "-m", given["engine"]]

    def ready(url: str, notes: tuple[str, ...]) -> None:
        sys.stdout.write(json.dumps({"url": url}, indent=1) + "\n")
        sys.stdout.flush()

    serve(settings, ready, command)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_server(sys.argv[1])
    else:
        code = main(build)
        sys.stderr.flush()
        os._exit(code)
