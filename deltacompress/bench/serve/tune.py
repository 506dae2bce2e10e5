"""`bench serve --tune`: slots, rows and tokens a step for this device, from a few short runs and the simulator.

A run of a piece of a trace tells what steps, loads and prompts take; the simulator chooses for these times; the next
run is of that choice, and its steps count, too. Of all that ran and were as fast as the fastest, but for noise, the one
that the simulator prefers is kept.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deltacompress._version import __version__
from deltacompress.bench.serve import models
from deltacompress.bench.serve.calls import CONTEXT, Asked, scaled
from deltacompress.bench.serve.check import measured_times
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.records import Step
from deltacompress.bench.serve.run import Setup, made_for, served
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.simulate.sweep import Choice, Problem, Room
from deltacompress.bench.simulate.times import Times
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.devices import device_name, free_bytes
from deltacompress.errors import switch
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.serving.profile import OF_FREE, Profile, Run, Traffic, sizes

RECIPE = "int2-24"
"""Whose formats the variants have; see bench/synthetic.py."""
NOISE = 0.1
"""By how much two runs of the same choice may differ."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """rows: a mapping for each run."""

    profile: Profile
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        told = self.profile.model_dump()
        return {"rows": list(self.rows), **{key: value for key, value in told.items() if key != "runs"}}


def run_tune(
    setup: Setup,
    arrivals: Sequence[Arrival],
    limits: EngineLimits,
    traffic: Traffic,
    *,
    runs: int = 3,
    reporter: Reporter | None = None,
) -> Tuning:
    """Choose by at most so many runs of these arrivals, which `traffic` describes; limits: of the first one.

    Raises:
        InputError: a number cannot be; a run has too few steps to tell.
        BackendError: the models do not fit, or no request was served.
    """
    reporter = reporter or SILENT
    lengths, _ = scaled(arrivals, traffic.scale, CONTEXT)
    numbers = assigned(len(lengths), setup.variants, traffic.popularity, traffic.seed)
    reporter.phase("tune", runs + 1)
    with made_for(setup) as made:
        reporter.step("models written and loaded")
        asked = [Asked(at, made.names[n], one) for at, (n, one) in enumerate(zip(numbers, lengths, strict=True))]
        search = _Search(made, asked, limits, traffic.seed)
        choice = Choice(made.slots, limits.max_batch, limits.step_tokens)
        while len(search.measured) < runs and choice not in search.measured:
            told = search.run(choice)
            reporter.step(told)
            choice = search.problem.climbed(choice)
        best = search.best
        rows = tuple(search.row(one, best) for one in search.measured)
        return Tuning(_profile(made, search, best, traffic), rows)


class _Search:
    """measured: mean whole time in seconds of each choice that ran; times: of all of their steps."""

    def __init__(self, made: Models, asked: Sequence[Asked], limits: EngineLimits, seed: int) -> None:
        self.measured: dict[Choice, float] = {}
        self._made, self._asked, self._limits, self._seed = made, asked, limits, seed
        self._steps, self._loads, self._load_ms = list[Step](), 0, 0.0
        models.start(made)
        device = made.runtime.device
        free = int(free_bytes(device) * OF_FREE) if device.type == "cuda" else None
        self.room = Room(free, made.variant_bytes)

    def run(self, choice: Choice) -> str:
        """Replay with it; returns what to tell of it."""
        made = models.with_slots(self._made, choice.slots)
        limits = replace(self._limits, max_batch=choice.rows, step_tokens=choice.chunk)
        found, _, steps = served(made, self._asked, limits, Slo(), self._seed)
        self._steps += steps
        self._loads += found["loads"]
        self._load_ms += found["loads"] * found["load_ms"]
        self.measured[choice] = found["e2e_mean"]
        return f"{choice.slots} slots, {choice.rows} rows, {choice.chunk} tokens: {found['e2e_mean']:.3f} s"

    @property
    def times(self) -> Times:
        """Of all steps so far."""
        load_ms = self._load_ms / self._loads if self._loads else 0.0
        return measured_times(self._made, self._limits, self._steps, load_ms, switch("tune"))

    @property
    def problem(self) -> Problem:
        """With these times."""
        asked = [(one.arrival, str(one.variant)) for one in self._asked]
        return Problem(asked, self.times, self.room, len(self._made.names))

    @property
    def best(self) -> Choice:
        """Of those that ran."""
        most = min(self.measured.values()) * (1 + NOISE)
        return min((one for one in self.measured if self.measured[one] <= most), key=self.problem.mean_s)

    def row(self, choice: Choice, best: Choice) -> dict[str, Any]:
        """Of the table."""
        measured, simulated = self.measured[choice], self.problem.mean_s(choice)
        return {
            "slots": choice.slots,
            "max_batch": choice.rows,
            "step_tokens": choice.chunk,
            "measured_s": measured,
            "simulated_s": simulated,
            "ratio": simulated / measured,
            "chosen": choice == best,
        }


def _profile(made: Models, search: _Search, best: Choice, traffic: Traffic) -> Profile:
    times = search.times
    kv_tokens = search.room.kv_tokens(best.slots, times.kv_token_bytes)
    runs = (search.row(one, best) for one in search.measured)
    return Profile(
        version=__version__,
        device=device_name(made.runtime.device),
        backend=made.runtime.backend,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        base=sizes(made.shape.config()),
        recipe=RECIPE,
        slots=best.slots,
        max_batch=best.rows,
        step_tokens=best.chunk,
        variant_bytes=made.variant_bytes,
        room_bytes=search.room.nbytes,
        times=asdict(replace(times, kv_tokens=kv_tokens)),
        traffic=traffic,
        runs=tuple(Run(**{name: row[name] for name in Run.model_fields}) for row in runs),
    )
