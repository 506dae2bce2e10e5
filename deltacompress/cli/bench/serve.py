"""`deltacompress bench serve`: a trace over the serving engine, how steadily its tokens flow, or what HTTP costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from deltacompress.cli.bench import serve_options as of
from deltacompress.cli.bench.pairs import names, numbers, without
from deltacompress.cli.bench.simulate import Popularity, Seed, SloFirst, SloToken, Trace, Variation
from deltacompress.cli.given.options import BenchBackend, BenchDevice, Tp
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import check_driver
from deltacompress.errors import InputError, option
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS

if TYPE_CHECKING:
    from deltacompress.serving.profile import Profile

_SPARE = ("late_s", "load_ms", "evictions", "preempted_s", "decode_s", "prefill_s", "load_s", "queue_s", "tokens_s")
_WAIT_S = 30.0
"""With --parts: after the last request may have come, until those that are left are cancelled."""


@verb
def serve(
    console: Console,
    *,
    steady: of.Steady = False,
    tune: of.Tune = False,
    capacity: of.Capacity = False,
    http: of.Http = False,
    parts: of.Parts = None,
    system: of.SystemOption = "decoupled",
    trace: Trace = "poisson",
    rate: of.Rate = None,
    variation: Variation = 4.0,
    seconds: of.Seconds = None,
    popularity: Popularity = "zipf-1.5",
    variants: of.Variants = 16,
    seed: Seed = 0,
    scale: of.Scale = 1.0,
    slots: of.Slots = None,
    max_batch: of.MaxBatch = None,
    step_tokens: of.StepTokens = None,
    profile: of.ProfileIn = None,
    prefix_cache: of.PrefixCache = 1024,
    slo_ttft_s: SloFirst = 1.0,
    slo_token_ms: SloToken = 100.0,
    simulate_check: of.SimulateCheck = False,
    rows: of.Rows = 1,
    steps: of.Steps = 50,
    long_tokens: of.LongTokens = 1000,
    known_tokens: of.KnownTokens = 2000,
    runs: of.Runs = 3,
    profile_out: of.ProfileOut = None,
    part: of.Part = None,
    systems: of.Systems = "decoupled,swap",
    popularities: of.Popularities = "zipf-1.5,uniform",
    rates: of.Rates = None,
    shape: of.Shape = None,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
    tp: Tp = 1,
    scratch: of.Scratch = None,
) -> None:
    """Replay a trace in real time over the serving engine, on random models with many variants."""
    given = dict(locals())
    ways = {"steady": _steady, "tune": _tune, "capacity": _capacity, "parts": _parts, "http": _http, of.TRACE: _replay}
    ways[of.mode_of(given)](console, given)


def _setup(given: Mapping[str, Any], profile: Profile | None = None) -> Any:
    from deltacompress.bench.serve.run import Setup

    slots = profile.slots if profile is not None and given["slots"] is None else given["slots"]
    names = ("device", "backend", "shape", "variants", "system", "scratch", "tp")
    return Setup(slots=slots, **{name: given[name] for name in names})


def _limits(given: Mapping[str, Any], requests: int, profile: Profile | None = None) -> Any:
    """What is given counts, then what the profile says."""
    from deltacompress.runtime.engine.live.engine import EngineLimits

    usual = (MAX_BATCH, STEP_TOKENS) if profile is None else (profile.max_batch, profile.step_tokens)
    max_batch, step_tokens = (
        value if (own := given[name]) is None else own
        for name, value in zip(("max_batch", "step_tokens"), usual, strict=True)
    )
    return EngineLimits(max_batch, requests, step_tokens, given["prefix_cache"] << 20)


def _steady(console: Console, given: Mapping[str, Any]) -> None:
    from deltacompress.cli.shown import render

    check_driver(given["device"])
    from deltacompress.bench.serve.run import run_steady
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
    limits = _limits(given, 1)
    with console.progress() as reporter:
        data = run_steady(
            _setup(given), asked, step_tokens=limits.step_tokens, prefix_bytes=limits.prefix_bytes, reporter=reporter
        ).to_json()
    console.result(data, lambda: render.summary_and_rows("serve", data, table="ratios"))


def _http(console: Console, given: Mapping[str, Any]) -> None:
    from deltacompress.cli.shown import render

    check_driver(given["device"])
    from deltacompress.bench.http.over_http import Load
    from deltacompress.bench.http.run import run_http

    streams = given["max_batch"] or Load().streams
    given = {**given, "max_batch": streams}
    load = Load(streams=streams, calls=4 * streams, connections=4 * streams).scaled(given["scale"])
    limits = _limits(given, load.calls)
    with console.progress() as reporter:
        data = run_http(_setup(given), load, limits, reporter=reporter).to_json()
    console.result(data, lambda: render.summary_and_rows("serve", data, table="rows"))


def _replay(console: Console, given: Mapping[str, Any]) -> None:
    from deltacompress.bench.simulate.run import Slo
    from deltacompress.bench.traffic.choice import chosen, told
    from deltacompress.cli.shown import render
    from deltacompress.serving.profile import read_profile

    slo = Slo(given["slo_ttft_s"], given["slo_token_ms"])
    slo.check()
    profile = None if given["profile"] is None else read_profile(given["profile"])
    arrivals = chosen(given["trace"], given["rate"], given["variation"], _seconds(given, 60.0), given["seed"])
    check_driver(given["device"])
    from deltacompress.bench.serve.run import run_replay

    setup = _setup(given, profile)
    if profile is not None:
        setup.check_profile(given["profile"], profile)
    same = {name: given[name] for name in ("popularity", "seed", "scale", "simulate_check")}
    with console.progress() as reporter:
        limits, trace = _limits(given, len(arrivals), profile), told(given["trace"])
        data = run_replay(setup, arrivals, limits, slo, trace=trace, reporter=reporter, **same).to_json()
    shown, more = without(data, "records", "times"), "check" if "check" in data else ""
    console.result(data, lambda: render.summary_and_rows("serve", shown, table="rows", more=more, spare=_SPARE))


def _tune(console: Console, given: Mapping[str, Any]) -> None:
    from deltacompress.bench.traffic.choice import chosen, told
    from deltacompress.cli.shown import render
    from deltacompress.serving.profile import Traffic

    seconds = _seconds(given, 25.0)
    arrivals = chosen(given["trace"], given["rate"], given["variation"], seconds, given["seed"])
    same = {name: given[name] for name in ("rate", "variation", "popularity", "variants", "seed", "scale")}
    check_driver(given["device"])
    from deltacompress.bench.serve.tune import run_tune

    with console.progress() as reporter:
        traffic = Traffic(trace=told(given["trace"]), seconds=seconds, **same)
        limits = _limits(given, len(arrivals))
        found = run_tune(_setup(given), arrivals, limits, traffic, runs=given["runs"], reporter=reporter)
    found.profile.write(given["profile_out"])
    data = {**found.to_json(), "profile": str(given["profile_out"])}
    shown = without(data, "times", "traffic", "base")
    console.result(data, lambda: render.summary_and_rows("runs", shown, table="rows"))


def _capacity(console: Console, given: Mapping[str, Any]) -> None:
    from deltacompress.cli.shown import render

    check_driver(given["device"])
    from deltacompress.bench.serve.capacity import run_capacity

    with console.progress() as reporter:
        data = run_capacity(_setup(given), reporter)
    console.result(data, lambda: render.summary_and_rows("tokens that fit beside so many variants", data, table="rows"))


def _parts(console: Console, given: Mapping[str, Any]) -> None:
    from deltacompress.bench.matrix.cells import cells, part_of
    from deltacompress.bench.simulate.run import Slo
    from deltacompress.cli.shown import render

    if given["rate"] is not None:
        raise InputError(f"is not for {option('parts')}", where=option("rate"), way_out=f"give {option('rates')}")
    check_driver(given["device"])
    from deltacompress.bench.matrix.run import Matrix, run, summary

    if given["rates"] is None:
        if given["part"] is not None:
            raise InputError(f"needs {option('rates')}", where=option("part"), way_out="add that")
        data = summary(given["parts"])
    else:
        rates = numbers("rates", given["rates"], float)
        todo = part_of(cells(names(given["systems"]), names(given["popularities"]), rates), given["part"])
        slo, seconds = Slo(given["slo_ttft_s"], given["slo_token_ms"]), _seconds(given, 30.0)
        slo.check()
        same = {name: given[name] for name in ("trace", "variation", "seed", "scale")}
        matrix = Matrix(_setup(given), _limits(given, 1), slo, seconds=seconds, wait_s=_WAIT_S, **same)
        with console.progress() as reporter:
            data = run(matrix, todo, given["parts"], reporter)
    console.result(data, lambda: render.summary_and_rows("highest rate", data, table="highest", more="rows"))


def _seconds(given: Mapping[str, Any], usual: float) -> float:
    found: float = usual if given["seconds"] is None else given["seconds"]
    return found


def register(app: typer.Typer) -> None:
    """Add this verb to those of `deltacompress bench`."""
    app.command("serve")(serve)
