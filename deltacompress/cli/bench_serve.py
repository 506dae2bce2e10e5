"""`deltacompress bench serve`: a trace in real time over the serving engine, or how steadily its tokens flow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deltacompress.cli.bench_pairs import without
from deltacompress.cli.bench_simulate import Popularity, Rate, Seed, SloFirst, SloToken, Trace, Variation
from deltacompress.cli.console import Console, verb
from deltacompress.cli.options import BenchBackend, BenchDevice
from deltacompress.devices import check_driver

_SPARE = ("queue_s", "load_s", "prefill_s", "decode_s", "preempted_s", "late_s", "loads", "evictions", "load_ms")


@verb
def serve(
    console: Console,
    *,
    steady: Annotated[bool, typer.Option("--steady", help="No trace: how steadily tokens flow.")] = False,
    system: Annotated[
        Literal["decoupled", "swap"], typer.Option(help="Packed deltas beside one base, or whole models in turn.")
    ] = "decoupled",
    trace: Trace = "poisson",
    rate: Rate = None,
    variation: Variation = 4.0,
    seconds: Annotated[
        float | None, typer.Option(help="In which requests come.", show_default="60; with --steady 10")
    ] = None,
    popularity: Popularity = "zipf-1.5",
    variants: Annotated[int, typer.Option(min=1, max=10_000, help="That are served.")] = 16,
    seed: Seed = 0,
    scale: Annotated[float, typer.Option(help="Of all lengths, at most 1: for small models.")] = 1.0,
    slots: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Variants on the device at once.", show_default="16; swap: what fits"),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="Requests that run at once.")] = 64,
    step_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of prompts in a step.")] = 512,
    prefix_cache: Annotated[int, typer.Option(min=0, max=2**20, help="MiB for what prompts have in common.")] = 1024,
    slo_ttft_s: SloFirst = 1.0,
    slo_token_ms: SloToken = 100.0,
    simulate_check: Annotated[
        bool, typer.Option("--simulate-check", help="Hold the simulator against the run, over times measured in it.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, max=4096, help="With --steady: of each variant.")] = 1,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="With --steady: timed undisturbed, twice.")] = 50,
    long_tokens: Annotated[
        int, typer.Option(min=1, help="With --steady: of prompts that come 4 times a second.")
    ] = 1000,
    known_tokens: Annotated[int, typer.Option(min=64, help="With --steady: of prompts that come again.")] = 2000,
    shape: Annotated[
        str | None,
        typer.Option(help="tiny, llama-7b, llama-13b or llama-70b.", show_default="llama-7b; on a CPU tiny"),
    ] = None,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
    scratch: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            writable=True,
            help="Directory for the files, 16 GB for a 7B; a temporary one by default.",
        ),
    ] = None,
) -> None:
    """Replay a trace in real time over the serving engine, on random models with many variants."""
    from deltacompress.bench.simulate.run import Slo
    from deltacompress.bench.traffic.choice import chosen, told

    slo = Slo(slo_ttft_s, slo_token_ms)
    slo.check()
    arrivals = [] if steady else chosen(trace, rate, variation, 60.0 if seconds is None else seconds, seed)
    check_driver(device)
    from deltacompress.bench.serve.run import Setup, run_replay, run_steady
    from deltacompress.bench.serve.steady import Steadiness
    from deltacompress.runtime.engine.live.engine import EngineLimits

    setup = Setup(device, backend, shape, variants, system, slots, scratch)
    prefix_bytes = prefix_cache << 20
    with console.progress() as reporter:
        if steady:
            asked = Steadiness(
                rows,
                steps,
                long_tokens=long_tokens,
                seconds=10.0 if seconds is None else seconds,
                known_tokens=known_tokens,
            )
            found = run_steady(setup, asked, step_tokens=step_tokens, prefix_bytes=prefix_bytes, reporter=reporter)
        else:
            limits = EngineLimits(max_batch, max(1, len(arrivals)), step_tokens, prefix_bytes)
            found = run_replay(
                setup,
                arrivals,
                limits,
                slo,
                trace=told(trace),
                popularity=popularity,
                seed=seed,
                scale=scale,
                simulate_check=simulate_check,
                reporter=reporter,
            )
    _print(console, found.to_json(), steady=steady)


def _print(console: Console, data: dict[str, Any], *, steady: bool) -> None:
    """Ratios before times; the rows of single requests are for --json."""
    from deltacompress.cli import render

    shown = without(data, "records", "times")
    table, more = ("ratios", "") if steady else ("rows", "check" if "check" in data else "")
    console.result(data, lambda: render.summary_and_rows("serve", shown, table=table, more=more, spare=_SPARE))


def register(app: typer.Typer) -> None:
    """Add this verb to those of `deltacompress bench`."""
    app.command("serve")(serve)
