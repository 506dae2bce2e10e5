"""`bench serve`, from options to tables: a replay of requests, how steadily tokens flow, or what HTTP costs."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench.serve import check, models, steady
from deltacompress.bench.serve.calls import CONTEXT, Asked, scaled
from deltacompress.bench.serve.models import Models, System
from deltacompress.bench.serve.records import Record, Step, told
from deltacompress.bench.serve.replay import replay
from deltacompress.bench.serve.steady import Steadiness
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.devices import device_name, resolve_device
from deltacompress.errors import InputError, option, switch
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.policy.portions import STEP_TOKENS
from deltacompress.runtime.parallel.parts.split import devices_of
from deltacompress.serving.profile import Profile

CHECKED = ("e2e_mean", "ttft_mean")
"""What the simulator is held against."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served: see models.made. slots: None for as many as are usual; scratch: directory for the files."""

    device: str = "auto"
    backend: str = "auto"
    shape: str | None = None
    variants: int = 16
    system: System = "decoupled"
    slots: int | None = None
    scratch: Path | None = None
    tp: int = 1

    def check(self) -> None:
        """Raises InputError: a count is below 1, or whole models are to be on several devices; and as devices_of."""
        for name in ("variants", "slots", "tp"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"is {value}", where=option(name), way_out="give 1 or more")
        if self.tp > 1 and self.system == "swap":
            raise InputError("is for packed deltas", where=option("tp"), way_out="leave it out")
        devices_of(resolve_device(self.device), self.tp)

    def check_profile(self, path: Path, profile: Profile) -> None:
        """Refuse one of another device or shape; raises as Profile.check. path: of its file."""
        config = models.shape_of(self.shape, self.device).config()
        profile.check(path, device=device_name(resolve_device(self.device)), config=config)


@dataclass(frozen=True, slots=True)
class ServeBench:
    """head: what was served and on what; ratios and times, or figures and records (a row for each request)."""

    head: dict[str, Any]
    body: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.body, **self.head}


def run_steady(
    setup: Setup,
    asked: Steadiness,
    *,
    step_tokens: int = STEP_TOKENS,
    prefix_bytes: int = 1 << 30,
    reporter: Reporter | None = None,
) -> ServeBench:
    """Ratios first, then times on this device; see steady.measured for what is raised."""
    reporter = reporter or SILENT
    reporter.phase("serve", 2)
    with made_for(setup) as made:
        reporter.step("models written and loaded")
        limits = steady.limits_for(made, asked, step_tokens, prefix_bytes, setup.tp)
        ratios, times = steady.measured(made, asked, limits)
        reporter.step("measured")
        return ServeBench(head_of(setup, made, limits), {"ratios": ratios, **times})


def run_replay(
    setup: Setup,
    arrivals: Sequence[Arrival],
    limits: EngineLimits,
    slo: Slo,
    *,
    trace: str,
    popularity: str,
    seed: int,
    scale: float = 1.0,
    simulate_check: bool = False,
    reporter: Reporter | None = None,
) -> ServeBench:
    """Serve these arrivals in real time. trace: its name, for whoever reads the result.

    Raises:
        InputError: a number cannot be.
        BackendError: the models do not fit, or no request was served.
    """
    slo.check()
    reporter = reporter or SILENT
    lengths, cut = scaled(arrivals, scale, CONTEXT)
    numbers = assigned(len(lengths), setup.variants, popularity, seed)
    reporter.phase("serve", 3 if simulate_check else 2)
    with made_for(setup) as made:
        reporter.step("models written and loaded")
        models.start(made)
        asked = [Asked(at, made.names[n], one) for at, (n, one) in enumerate(zip(numbers, lengths, strict=True))]
        found, records, steps = served(made, asked, limits, slo, seed)
        reporter.step(f"{len(records)} requests served")
        head = {
            "trace": trace,
            "popularity": popularity,
            "seed": seed,
            "scale": scale,
            "cut_to_context": cut,
            "requests": len(records),
            "prompt_tokens_mean": sum(one.prompt_tokens for one in lengths) / len(lengths),
            "output_tokens_mean": sum(one.output_tokens for one in lengths) / len(lengths),
            "slo_ttft_s": slo.first_s,
            "slo_token_ms": slo.token_ms,
            **head_of(setup, made, limits),
        }
        body: dict[str, Any] = {"rows": [{"system": setup.system, **found}]}
        if simulate_check:
            body["check"], body["times"] = _check(made, asked, limits, slo, found, steps)
            reporter.step("simulated")
        body["records"] = [one.to_json() for one in records]
        return ServeBench(head, body)


def served(
    made: Models, asked: Sequence[Asked], limits: EngineLimits, slo: Slo, seed: int
) -> tuple[dict[str, Any], list[Record], list[Step]]:
    """Figures of a replay of these, what became of each, and the steps; raises as replay and told."""
    counters = made.runtime.cache.counters
    loads, evictions, seconds = counters.loads, counters.evictions, counters.load_seconds
    records, steps = replay(made, asked, limits, seed)
    loads, evictions = counters.loads - loads, counters.evictions - evictions
    seconds = counters.load_seconds - seconds
    found = {**told(records, slo), "loads": loads, "evictions": evictions}
    found["load_ms"] = seconds / loads * 1e3 if loads else 0.0
    return found, records, steps


def _check(
    made: Models,
    asked: Sequence[Asked],
    limits: EngineLimits,
    slo: Slo,
    found: dict[str, Any],
    steps: Sequence[Step],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of simulated over measured, and the times that it was simulated with."""
    times = check.measured_times(made, limits, steps, found["load_ms"], switch("simulate_check"))
    simulated = check.simulated(asked, made, limits, times, slo)
    return [
        {"what": name, "ratio": simulated[name] / found[name], "simulated": simulated[name], "measured": found[name]}
        for name in CHECKED
    ], asdict(times)


@contextmanager
def made_for(setup: Setup) -> Iterator[Models]:
    """Written, loaded, and gone at the end of the block; raises as Setup.check, shape_of and made."""
    with written_for(setup) as (made, _):
        yield made


@contextmanager
def written_for(setup: Setup) -> Iterator[tuple[Models, Path]]:
    """The same, and the directory that base/ and delta/ are in."""
    setup.check()
    shape = models.shape_of(setup.shape, setup.device)
    with tempfile.TemporaryDirectory(prefix="deltacompress-bench-", dir=setup.scratch) as root:
        place = Path(root)
        asked: dict[str, Any] = {name: getattr(setup, name) for name in ("variants", "system", "slots", "tp")}
        found = models.made(place, shape, setup.device, setup.backend, **asked)
        try:
            yield found, place
        finally:
            found.runtime.close()


def head_of(setup: Setup, made: Models, limits: EngineLimits) -> dict[str, Any]:
    """What was served, and on what."""
    runtime = made.runtime
    return {
        "device": device_name(runtime.device),
        "backend": runtime.describe(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "shape": str(made.shape),
        "system": setup.system,
        "variants": len(made.names),
        "slots": made.slots,
        "variant_bytes": made.variant_bytes,
        "max_batch": limits.max_batch,
        "step_tokens": limits.step_tokens,
        "prefix_bytes": limits.prefix_bytes,
    }
