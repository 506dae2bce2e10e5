"""What HTTP adds to the engine: the same calls put into it directly and over a server, and a server without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from deltacompress.bench.http.echo import STEP_S
from deltacompress.bench.http.over_http import Load, by_hand, echoed, over_http
from deltacompress.bench.serve.run import ServeBench, Setup, head_of, written_for
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.serving.messages import Start


def run_http(
    setup: Setup,
    load: Load,
    limits: EngineLimits,
    *,
    reporter: Reporter | None = None,
) -> ServeBench:
    """What HTTP adds to the same calls, and what a server streams without a model.

    Raises:
        BackendError: the models do not fit, or a server did not start.
    """
    reporter = reporter or SILENT
    reporter.phase("serve", 4)
    with written_for(setup) as (made, root):
        head, vocabulary, names = head_of(setup, made, limits), made.shape.vocabulary, made.names
        del made  # the device is for one engine at a time
        reporter.step("models written")
        start = _start(setup, root, names, limits)
        rows = [by_hand(start, load, vocabulary).row("engine")]
        reporter.step("calls put into the engine")
        rows.append(asyncio.run(over_http(start, load, vocabulary)).row("HTTP"))
        reporter.step("the same over HTTP")
    echo = asyncio.run(echoed(start, load)).row("HTTP, no model")
    reporter.step("streamed without a model")
    first, tokens = ([row[name] for row in rows] for name in ("ttft_ms_median", "tokens_s"))
    found = {
        "streams": load.streams,
        "calls": load.calls,
        "prompt_tokens": load.prompt_tokens,
        "tokens": load.tokens,
        "ttft_more_ms": first[1] - first[0],
        "throughput_ratio": tokens[1] / tokens[0],
        "echo_connections": load.connections,
        "echo_tokens_s": echo["tokens_s"],
        "echo_offered_tokens_s": load.connections / STEP_S,
    }
    return ServeBench({**found, **head}, {"rows": [*rows, echo]})


def _start(setup: Setup, root: Path, names: Sequence[str], limits: EngineLimits) -> Start:
    """What an engine's process of a server is told."""
    return Start(
        orders="",
        reports="",
        base=str(root / "base"),
        variants=tuple((name, str(root / "delta")) for name in names),
        zoo=None,
        device=setup.device,
        dtype="auto",
        backend=setup.backend,
        budget_bytes=None,
        max_batch=limits.max_batch,
        max_queue=limits.max_queue,
        step_tokens=limits.step_tokens,
        prefix_bytes=limits.prefix_bytes,
    )
