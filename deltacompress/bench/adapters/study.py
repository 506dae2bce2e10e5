"""The published study of serving many rotated models, with requests: from what is asked for to tables.

Points are measured one by one, each kept in a folder as soon as it is there, so that the same call goes on where it
was stopped or ran out of time.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltacompress._version import __version__
from deltacompress.bench.adapters import coming, peft_rival
from deltacompress.bench.adapters.directories import KINDS
from deltacompress.bench.adapters.loops import Lengths, alone, asked_of, closed, row_of
from deltacompress.bench.adapters.rivals import rivals
from deltacompress.bench.adapters.served import SYSTEMS, Stand
from deltacompress.bench.adapters.tables import tables_of, wrong
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.replay import replay
from deltacompress.bench.synthetic import SHAPE_7B, SHAPE_TINY, ModelShape
from deltacompress.devices import device_name, resolve_device
from deltacompress.errors import InputError, install_hint, option
from deltacompress.evaluation.scoring.store import AnswerStore
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.engine.live.engine import EngineLimits

PARTS = (*SYSTEMS, "rivals", "peft", "zipf", "loads")
_WARM_TOKENS = 16
_WHICH = ("adapters", "at_once", "rates")
"""Say which points there are, and change none of them."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is asked.

    adapters: numbers of them; at_once: requests that run in a closed loop; rates: requests a second of Poisson
    processes. requests: of a point, but no more than `rounds` for each that runs at once. slots: adapters on the device
    at once. registered, room, zipf_rate, zipf_seconds: of part zipf. times: of part loads. checked: requests of a
    closed loop that are asked again, alone.
    """

    adapters: tuple[int, ...] = (2, 4, 16, 32, 64, 72, 84, 96, 256, 1000)
    at_once: tuple[int, ...] = (1, 16, 32, 64, 96)
    rates: tuple[float, ...] = (10.0,)
    requests: int = 512
    rounds: int = 16
    repeats: int = 3
    slots: int = 256
    registered: int = 1000
    room: int = 32
    zipf_rate: float = 10.0
    zipf_seconds: float = 60.0
    times: int = 5
    checked: int = 3
    lengths: Lengths = field(default_factory=Lengths)

    def check(self) -> None:
        """Raises InputError: a number is too low, there is nothing to measure, or fewer requests than run at once."""
        for name in ("adapters", "at_once"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise InputError("names none, or one below 1", where=option(name), way_out="give numbers from 1 on")
        for name in ("requests", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"is {getattr(self, name)}", where=option(name), way_out="give 1 or more")
        if self.requests < (most := max(self.at_once)):
            told, where = f"is {self.requests}, which cannot be {most} at once", option("requests")
            raise InputError(told, where=where, way_out=f"give {most} or more, or fewer {option('at_once')}")
        for rate in (None, *self.rates):
            asked_of([None], 1, self.lengths, rate)


TINY = Study(
    *((2, 4), (1, 4), (50.0,), 8),
    repeats=2,
    registered=40,
    room=4,
    zipf_rate=20.0,
    zipf_seconds=1.5,
    times=2,
    lengths=Lengths(output=20),
)
"""What a CPU does in seconds, with a tiny model."""


@dataclass(frozen=True, slots=True)
class Studied:
    """tables: rows by name; left: points that there was no time for."""

    head: dict[str, Any]
    tables: dict[str, list[dict[str, Any]]]
    notes: tuple[str, ...]
    left: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.head, **self.tables, "notes": list(self.notes), "left": list(self.left)}


def run(
    study: Study,
    *,
    device: str = "auto",
    backend: str = "auto",
    shape: ModelShape | None = None,
    parts: Sequence[str] = PARTS,
    minutes: float | None = None,
    out: Path | None = None,
    scratch: Path | None = None,
    reporter: Reporter = SILENT,
) -> Studied:
    """Measure some of PARTS: 7B-shaped on a GPU, tiny on a CPU.

    minutes: after which no point is begun. out: folder for what was measured. scratch: for models, 17 GB.

    Raises:
        InputError: a number cannot be.
        BackendError: the models do not fit, or a request fails.
    """
    study.check()
    where = resolve_device(device)
    shape = shape or (SHAPE_7B if where.type == "cuda" else SHAPE_TINY)
    ends = time.monotonic() + minutes * 60 if minutes is not None else None
    own = {name: value for name, value in asdict(study).items() if name not in _WHICH}
    identity = {"study": own, "shape": str(shape), "device": device_name(where), "backend": backend}
    identity["versions"] = [__version__, torch.__version__]
    with tempfile.TemporaryDirectory(prefix="deltacompress-bench-", dir=scratch) as root:
        store = AnswerStore(out or Path(root) / "found", identity)
        bench = _Bench(study, lambda: Stand(Path(root), shape, where, backend))
        left, keys = [], []
        reporter.phase("requests")
        try:
            for key, work in bench.points(parts):
                keys.append(key)
                if key in store:
                    continue
                if ends is not None and time.monotonic() >= ends:
                    left.append(key)
                    continue
                store.add([(key, work())])
                reporter.step(key)
            tables = tables_of({key: store[key] for key in keys if key in store})
            bench.notes += wrong(tables["rows"])
        finally:
            store.close()
        return Studied(_head(study, identity, bench), tables, tuple(bench.notes), tuple(left))


Point = tuple[str, Callable[[], Any]]


class _Bench:
    """What is measured, over a stand that is made when the first point needs it. made: it, if it was."""

    def __init__(self, study: Study, make: Callable[[], Stand]) -> None:
        self._study, self._make = study, make
        self.made: Stand | None = None
        self._system = ""
        self.notes: list[str] = []

    def points(self, parts: Sequence[str]) -> Iterator[Point]:
        """All of these parts, by key, in the order in which they are measured."""
        study, counts = self._study, sorted(set(self._study.adapters))
        systems = [part for part in SYSTEMS if part in parts]
        if systems:
            yield from self._loads("base", 0)
        for system in systems:
            for count in counts:
                yield from self._loads(system, count)
        most = max(study.at_once)
        if "rivals" in parts:
            for count in sorted({min(count, most) for count in counts}):
                yield f"rivals, {count}, {most}", partial(self._rivals, count, most)
        if "zipf" in parts:
            for system in ("s1", "lora64"):
                yield f"zipf, {system}, {most}", partial(self._zipf, system)
        if "loads" in parts:
            for kind in coming.KINDS:
                yield f"loads, {kind}", partial(self._ways, kind)
        if "peft" in parts:  # last: it takes a model of its own
            if peft_rival.is_there():
                few = [count for count in counts if count <= most]
                yield f"peft, {few}, {most}", partial(self._peft, few, most)
            else:
                self.notes.append(f"peft was left out: {install_hint('adapters')}")

    def _loads(self, system: str, count: int) -> Iterator[Point]:
        for at_once in self._study.at_once:
            yield f"{system}, {count}, closed {at_once}", partial(self._closed, system, count, at_once)
        for rate in self._study.rates:
            most = max(self._study.at_once)
            yield f"{system}, {count}, {rate:g}/s, {most} at most", partial(self._open, system, count, rate)

    @property
    def _stand(self) -> Stand:
        if self.made is None:
            self.made = self._make()
        return self.made

    def _models(self, system: str, count: int) -> Models:
        if system != self._system:
            self._stand.clear()
            self._system = system
        return self._stand.registered(SYSTEMS[system], count, self._study.slots) if count else self._stand.bare()

    def _closed(self, system: str, count: int, at_once: int) -> dict[str, Any]:
        study, models = self._study, self._models(system, count)
        names = models.names or (None,)
        limits = EngineLimits(at_once, study.requests, prefix_bytes=0)
        self._warm(models, names, at_once)
        runs, told = [], dict[str, Any]()
        for repeat in range(study.repeats):
            lengths = Lengths(study.lengths.output, study.lengths.prompt, study.lengths.seed + repeat)
            asked = asked_of(names, min(study.requests, study.rounds * at_once), lengths)
            kept = [one.id for one in asked[:: max(1, len(asked) // study.checked)][: study.checked]]
            records, tokens = closed(
                models, asked, limits, at_once, lengths.seed, kept if not repeat else (), warm=True
            )
            if not repeat:
                told = alone(models, asked, tokens, lengths.seed)
            runs.append(records)
        return self._row(models, system, count, f"closed {at_once}", runs) | told

    def _open(self, system: str, count: int, rate: float) -> dict[str, Any]:
        study, models = self._study, self._models(system, count)
        names, most = models.names or (None,), max(self._study.at_once)
        limits = EngineLimits(most, study.requests, prefix_bytes=0)
        self._warm(models, names, most)
        runs = []
        for repeat in range(study.repeats):
            lengths = Lengths(study.lengths.output, study.lengths.prompt, study.lengths.seed + repeat)
            runs.append(replay(models, asked_of(names, study.requests, lengths, rate), limits, lengths.seed)[0])
        return self._row(models, system, count, f"{rate:g}/s", runs)

    def _warm(self, models: Models, names: Sequence[str | None], at_once: int) -> None:
        """What is compiled once, and as many adapters on the device as go there."""
        lengths = Lengths(_WARM_TOKENS, self._study.lengths.prompt, -1)
        closed(models, asked_of(names, 2 * at_once, lengths), EngineLimits(at_once, prefix_bytes=0), at_once, -1)

    def _row(self, models: Models, system: str, count: int, load: str, runs: Sequence[Any]) -> dict[str, Any]:
        row = {"system": system, "adapters": count, "load": load, **row_of(runs)}
        if count:
            row |= {"adapter_bytes": models.variant_bytes, "of_base": self._stand.share(SYSTEMS[system])}
        return row

    def _zipf(self, system: str) -> dict[str, Any]:
        study = self._study
        self._stand.clear()
        self._system = ""
        given = (study.registered, study.room, study.zipf_rate, study.zipf_seconds, max(study.at_once), study.lengths)
        found = {"system": system, **coming.many(self._stand, SYSTEMS[system], *given)}
        self._stand.clear()
        return found

    def _ways(self, kind: str) -> list[dict[str, Any]]:
        self._system = ""
        return coming.ways(self._stand, kind, self._study.times, self._study.lengths)

    def _rivals(self, count: int, most: int) -> list[dict[str, Any]]:
        self._stand.clear()
        self._system = ""
        return rivals(self._stand, count, most)

    def _peft(self, counts: Sequence[int], most: int) -> list[dict[str, Any]]:
        self._stand.clear()
        self._system = ""
        return peft_rival.peft_rows(self._stand, KINDS["lora64"], counts, most)


def _head(study: Study, identity: dict[str, Any], bench: _Bench) -> dict[str, Any]:
    given = {name: value for name, value in identity["study"].items() if name != "lengths"}
    return {
        "device": identity["device"],
        "backend": identity["backend"] if bench.made is None else bench.made.runtime.describe(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "shape": identity["shape"],
        "prompt_tokens": list(study.lengths.prompt),
        "output_tokens": study.lengths.output,
        "seed": study.lengths.seed,
        **given,
    }
