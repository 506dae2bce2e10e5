"""`deltacompress bench serve`: a trace in real time over the serving engine, or how steadily its tokens flow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deltacompress.cli.bench_pairs import without
from deltacompress.cli.bench_simulate import Popularity, Seed, SloFirst, SloToken, Trace, Variation
from deltacompress.cli.console import Console, verb
from deltacompress.cli.options import BenchBackend, BenchDevice
from deltacompress.devices import check_driver
from deltacompress.errors import InputError, option, switch

SystemOption = Annotated[
    Literal["decoupled", "swap"], typer.Option(help="Packed deltas beside one base, or whole models in turn.")
]
Rate = Annotated[
    float | None,
    typer.Option(help="Requests a second, to which a file's time is scaled.", show_default="a file's; with --steady 4"),
]
Seconds = Annotated[float | None, typer.Option(help="In which requests come.", show_default="60; with --steady 10")]
Slots = Annotated[
    int | None,
    typer.Option(min=1, max=256, help="Variants on the device at once.", show_default="16; swap: as many as fit"),
]
Variants = Annotated[int, typer.Option(min=1, max=10_000, help="That are served.")]
Scale = Annotated[float, typer.Option(help="Of all lengths, at most 1: for small models.")]
MaxBatch = Annotated[int, typer.Option(min=1, max=4096, help="Requests that run at once.")]
StepTokens = Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of prompts in a step.")]
PrefixCache = Annotated[int, typer.Option(min=0, max=2**20, help="MiB for what prompts have in common.")]
SimulateCheck = Annotated[
    bool, typer.Option("--simulate-check", help="Hold the simulator against the run, over times measured in it.")
]
Steady = Annotated[bool, typer.Option("--steady", help="No trace: how steadily tokens flow.")]
Rows = Annotated[int, typer.Option(min=1, max=4096, help="With --steady: of each variant.")]
Steps = Annotated[int, typer.Option(min=1, max=10_000, help="With --steady: timed undisturbed, twice.")]
LongTokens = Annotated[int, typer.Option(min=1, help="With --steady: of prompts that come.")]
KnownTokens = Annotated[int, typer.Option(min=1, help="With --steady: of prompts that come again.")]
Shape = Annotated[
    str | None, typer.Option(help="tiny, llama-7b, llama-13b or llama-70b.", show_default="llama-7b; on a CPU tiny")
]
Scratch = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        writable=True,
        help="Directory for the files, 16 GB for a 7B; a temporary one by default.",
    ),
]
_OF_TRACES = {"trace": "poisson", "popularity": "zipf-1.5", "scale": 1.0, "max_batch": 64, "simulate_check": False}
_OF_STEADY = {"rows": 1, "steps": 50, "long_tokens": 1000, "known_tokens": 2000}
_SPARE = ("late_s", "load_ms", "evictions", "preempted_s", "decode_s", "prefill_s", "load_s", "queue_s", "tokens_s")


@verb
def serve(
    console: Console,
    *,
    steady: Steady = False,
    system: SystemOption = "decoupled",
    trace: Trace = "poisson",
    rate: Rate = None,
    variation: Variation = 4.0,
    seconds: Seconds = None,
    popularity: Popularity = "zipf-1.5",
    variants: Variants = 16,
    seed: Seed = 0,
    scale: Scale = 1.0,
    slots: Slots = None,
    max_batch: MaxBatch = 64,
    step_tokens: StepTokens = 512,
    prefix_cache: PrefixCache = 1024,
    slo_ttft_s: SloFirst = 1.0,
    slo_token_ms: SloToken = 100.0,
    simulate_check: SimulateCheck = False,
    rows: Rows = 1,
    steps: Steps = 50,
    long_tokens: LongTokens = 1000,
    known_tokens: KnownTokens = 2000,
    shape: Shape = None,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
    scratch: Scratch = None,
) -> None:
    """Replay a trace in real time over the serving engine, on random models with many variants."""
    given = dict(locals())
    _check_together(steady, given)
    setup = (device, backend, shape, variants, system, slots, scratch)
    if steady:
        _steady(console, setup, given)
    else:
        _replay(console, setup, given)


def _check_together(steady: bool, given: dict[str, Any]) -> None:
    """Raises InputError: an option was given that the other way of running alone would heed."""
    for name, default in (_OF_TRACES if steady else _OF_STEADY).items():
        if given[name] != default:
            what = f"goes with a trace, and {switch('steady')} has none" if steady else f"needs {switch('steady')}"
            raise InputError(what, where=option(name), way_out="leave it out" if steady else "add that")


def _steady(console: Console, setup: tuple[Any, ...], given: dict[str, Any]) -> None:
    from deltacompress.cli import render

    check_driver(given["device"])
    from deltacompress.bench.serve.run import Setup, run_steady
    from deltacompress.bench.serve.steady import Steadiness

    rate, seconds = given["rate"], given["seconds"]
    asked = Steadiness(
        given["rows"],
        given["steps"],
        long_tokens=given["long_tokens"],
        rate=4.0 if rate is None else rate,
        seconds=10.0 if seconds is None else seconds,
        known_tokens=given["known_tokens"],
    )
    step_tokens, prefix_bytes = given["step_tokens"], given["prefix_cache"] << 20
    with console.progress() as reporter:
        data = run_steady(
            Setup(*setup), asked, step_tokens=step_tokens, prefix_bytes=prefix_bytes, reporter=reporter
        ).to_json()
    console.result(data, lambda: render.summary_and_rows("serve", data, table="ratios"))


def _replay(console: Console, setup: tuple[Any, ...], given: dict[str, Any]) -> None:
    from deltacompress.bench.simulate.run import Slo
    from deltacompress.bench.traffic.choice import chosen, told
    from deltacompress.cli import render

    slo = Slo(given["slo_ttft_s"], given["slo_token_ms"])
    slo.check()
    seconds = 60.0 if given["seconds"] is None else given["seconds"]
    arrivals = chosen(given["trace"], given["rate"], given["variation"], seconds, given["seed"])
    check_driver(given["device"])
    from deltacompress.bench.serve.run import Setup, run_replay
    from deltacompress.runtime.engine.live.engine import EngineLimits

    limits = EngineLimits(given["max_batch"], len(arrivals), given["step_tokens"], given["prefix_cache"] << 20)
    same = {name: given[name] for name in ("popularity", "seed", "scale", "simulate_check")}
    with console.progress() as reporter:
        data = run_replay(
            Setup(*setup), arrivals, limits, slo, trace=told(given["trace"]), reporter=reporter, **same
        ).to_json()
    shown, more = without(data, "records", "times"), "check" if "check" in data else ""
    console.result(data, lambda: render.summary_and_rows("serve", shown, table="rows", more=more, spare=_SPARE))


def register(app: typer.Typer) -> None:
    """Add this verb to those of `deltacompress bench`."""
    app.command("serve")(serve)
