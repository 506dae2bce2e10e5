"""`deltacompress bench simulate`, `bench sweep`: the serving engine's policy over given times, or over a profile's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from deltacompress.cli.shown.console import Console, verb
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS

Trace = Annotated[str, typer.Option(help="poisson, gamma, or a file: Azure's CSV of 2023, or JSON lines.")]
Rate = Annotated[
    float | None, typer.Option(help="Requests a second, to which a file's time is scaled.", show_default="a file's")
]
Variation = Annotated[float, typer.Option(help="Of gamma's gaps: standard deviation over mean.")]
Popularity = Annotated[str, typer.Option(help="uniform, zipf-1.5 (or another), bursts, distinct, one.")]
Seed = Annotated[int, typer.Option(min=0, max=2**50, help="Of arrivals and assignment.")]
SloFirst = Annotated[float, typer.Option(help="Seconds to the first token that are good enough.")]
SloToken = Annotated[float, typer.Option(help="Milliseconds for each other token.")]


@verb
def simulate(
    console: Console,
    *,
    trace: Trace = "poisson",
    rate: Rate = None,
    variation: Variation = 4.0,
    seconds: Annotated[float, typer.Option(help="In which requests come.")] = 60.0,
    popularity: Popularity = "zipf-1.5",
    variants: Annotated[int, typer.Option(min=1, max=100_000, help="That are asked for.")] = 32,
    seed: Seed = 0,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Variants on the device at once.")] = 16,
    rows: Annotated[int, typer.Option(min=1, max=4096, help="Requests that run at once.")] = MAX_BATCH,
    chunk: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of prompts in a step.")] = STEP_TOKENS,
    max_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="That each request asks for.")] = 1024,
    grace: Annotated[int, typer.Option(min=0, max=10**6, help="Tokens before its end that nobody gives way.")] = 8,
    slo_ttft_s: SloFirst = 1.0,
    slo_token_ms: SloToken = 100.0,
    times: Annotated[str, typer.Option(metavar="NAME=N,...", help="Others than of a 7B shape on an H100.")] = "",
) -> None:
    """Say how the engine's policies would serve a trace, from given times of steps, loads and copies."""
    from deltacompress.bench.simulate.run import Slo, run
    from deltacompress.bench.simulate.times import parsed
    from deltacompress.bench.simulate.world import Setting
    from deltacompress.bench.traffic.choice import chosen, told
    from deltacompress.cli.shown import render

    setting = Setting(parsed(times), rows, slots, chunk, max_tokens, grace)
    arrivals = chosen(trace, rate, variation, seconds, seed)
    found = run(
        arrivals,
        setting,
        Slo(slo_ttft_s, slo_token_ms),
        trace=told(trace),
        popularity=popularity,
        variants=variants,
        seed=seed,
    )
    data = found.to_json()
    spare = ("steps", "recomputed", "e2e_p50", "tokens_s", "out_of_kv", "loads", "evictions", "requests_s")
    console.result(data, lambda: render.summary_and_rows("simulated", data, table="rows", spare=spare))


@verb
def sweep(
    console: Console,
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A file of `bench serve --tune`.")],
    *,
    trace: Annotated[str | None, typer.Option(help="The file, if it was tuned with one.")] = None,
    seconds: Annotated[float, typer.Option(help="Of the trace, after the piece that was tuned with.")] = 120.0,
) -> None:
    """Say how near a profile's choice is to the best of a full sweep of the simulator, over the rest of the trace."""
    from deltacompress.bench.simulate.rest import run
    from deltacompress.cli.shown import render
    from deltacompress.serving.profile import read_profile

    with console.progress() as reporter:

        def begin(settings: int) -> Callable[[str], None]:
            reporter.phase("sweep", settings)
            return reporter.step

        data = run(read_profile(profile), trace, seconds, begin)
    console.result(data, lambda: render.summary_and_rows("simulated, rest of the trace", data, table="rows"))


def register(app: typer.Typer) -> None:
    """Add these verbs to those of `deltacompress bench`."""
    app.command("simulate")(simulate)
    app.command("sweep")(sweep)
