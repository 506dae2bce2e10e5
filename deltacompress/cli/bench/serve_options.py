"""The options of `bench serve`, the ways in which it runs, and which of the options each of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deltacompress.cli.given.options import files_in
from deltacompress.errors import InputError, option, switch
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS

SystemOption = Annotated[
    Literal["decoupled", "swap"], typer.Option(help="Packed deltas beside one base, or whole models in turn.")
]
Rate = Annotated[
    float | None,
    typer.Option(help="Requests a second, to which a file's time is scaled.", show_default="a file's; with --steady 4"),
]
Seconds = Annotated[
    float | None,
    typer.Option(help="In which requests come.", show_default="60; with --steady 10, --tune 25, --parts 30"),
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1, max=256, help="Variants on the device at once.", show_default="16, --profile's; swap: as many as fit"
    ),
]
Variants = Annotated[int, typer.Option(min=1, max=10_000, help="That are served.")]
Scale = Annotated[float, typer.Option(help="Of all lengths, at most 1: for small models.")]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        min=1, max=4096, help="Requests that run at once.", show_default=f"{MAX_BATCH}, --profile's; with --http 64"
    ),
]
StepTokens = Annotated[
    int | None,
    typer.Option(min=1, max=1_000_000, help="Tokens of prompts in a step.", show_default=f"{STEP_TOKENS}, --profile's"),
]
PrefixCache = Annotated[int, typer.Option(min=0, max=2**20, help="MiB for what prompts have in common.")]
SimulateCheck = Annotated[
    bool, typer.Option("--simulate-check", help="Hold the simulator against the run, over times measured in it.")
]
Http = Annotated[
    bool, typer.Option("--http", help="No trace: what a server adds to the engine, --max-batch streams at once.")
]
Steady = Annotated[bool, typer.Option("--steady", help="No trace: how steadily tokens flow.")]
Rows = Annotated[int, typer.Option(min=1, max=4096, help="With --steady: of each variant.")]
Steps = Annotated[int, typer.Option(min=1, max=10_000, help="With --steady: timed undisturbed, twice.")]
LongTokens = Annotated[int, typer.Option(min=1, help="With --steady: of prompts that come.")]
KnownTokens = Annotated[int, typer.Option(min=1, help="With --steady: of prompts that come again.")]
Shape = Annotated[
    str | None, typer.Option(help="tiny, llama-7b, llama-13b or llama-70b.", show_default="llama-7b; on a CPU tiny")
]
Scratch = Annotated[Path | None, files_in("the files, 16 GB for a 7B")]
Tune = Annotated[bool, typer.Option("--tune", help="Choose slots, rows and tokens a step for this device.")]
Runs = Annotated[int, typer.Option(min=1, max=20, help="With --tune: measured, at most.")]
ProfileOut = Annotated[Path | None, typer.Option(help="With --tune: file for what it finds.")]
ProfileIn = Annotated[Path | None, typer.Option("--profile", help="Serve as a file of --tune says.")]
Capacity = Annotated[bool, typer.Option("--capacity", help="No trace: what fits beside how many variants.")]
Parts = Annotated[
    Path | None, typer.Option(help="Folder: systems x popularities x --rates, a file a cell; table and picture of all.")
]
Part = Annotated[str | None, typer.Option(metavar="K/N", help="With --parts: of N pieces the K-th.")]
Systems = Annotated[str, typer.Option(help="With --parts: separated by commas.")]
Popularities = Annotated[str, typer.Option(help="With --parts: separated by commas.")]
Rates = Annotated[
    str | None,
    typer.Option(help="With --parts: requests a second, separated by commas.", show_default="none: only what is there"),
]
TRACE = "trace"
_SWITCHES = ("steady", "tune", "capacity", "http")
_ON_TRACES = (TRACE, "tune", "parts")
_DEFAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "trace": ("poisson", _ON_TRACES),
    "variation": (4.0, _ON_TRACES),
    "seed": (0, _ON_TRACES),
    "slo_ttft_s": (1.0, (TRACE, "parts")),
    "slo_token_ms": (100.0, (TRACE, "parts")),
    "step_tokens": (None, (*_ON_TRACES, "steady", "http")),
    "prefix_cache": (1024, (*_ON_TRACES, "steady", "http")),
    "popularity": ("zipf-1.5", (TRACE, "tune")),
    "rate": (None, (*_ON_TRACES, "steady")),
    "seconds": (None, (*_ON_TRACES, "steady")),
    "scale": (1.0, (*_ON_TRACES, "http")),
    "max_batch": (None, (*_ON_TRACES, "http")),
    "simulate_check": (False, (TRACE,)),
    "profile": (None, (TRACE,)),
    "rows": (1, ("steady",)),
    "steps": (50, ("steady",)),
    "long_tokens": (1000, ("steady",)),
    "known_tokens": (2000, ("steady",)),
    "runs": (3, ("tune",)),
    "profile_out": (None, ("tune",)),
    "part": (None, ("parts",)),
    "systems": ("decoupled,swap", ("parts",)),
    "popularities": ("zipf-1.5,uniform", ("parts",)),
    "rates": (None, ("parts",)),
    "system": ("decoupled", (TRACE, "steady")),
    "tp": (1, (TRACE, "steady")),
}
"""Default of each option that some ways take and others do not, and the ways that do."""


def mode_of(given: Mapping[str, Any]) -> str:
    """The way that is asked for.

    Raises:
        InputError: two are, or an option was given that this one would not heed.
    """
    asked = [name for name in _SWITCHES if given[name]] + (["parts"] if given["parts"] is not None else [])
    if len(asked) > 1:
        raise InputError(f"goes without {option(asked[1])}", where=option(asked[0]), way_out="give one of the two")
    mode = asked[0] if asked else TRACE
    for name, (default, modes) in _DEFAULTS.items():
        if given[name] == default or mode in modes:
            continue
        if TRACE in modes or len(modes) > 1:
            told = "goes with a trace, and {} has none" if mode in ("steady", "capacity", "http") else "is not for {}"
            raise InputError(told.format(switch(mode)), where=option(name), way_out="leave it out")
        raise InputError(f"needs {option(modes[0])}", where=option(name), way_out="add that")
    if mode == "tune" and given["profile_out"] is None:
        raise InputError("needs a file for what it finds", where=switch("tune"), way_out=f"add {option('profile_out')}")
    return mode
