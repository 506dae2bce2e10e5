"""What /metrics tells, in Prometheus' text format. Names of variants are labels only while they are few."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deltacompress._version import __version__
from deltacompress.serving.messages import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_NAMES = 100
_OTHER = "other"
_PLACES = ("device", "arriving", "host", "disk")
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_PREFIX = "deltacompress_"


class Metrics:
    """Everything that is counted of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._names: set[str] = set()
        self._requests = Counter(
            f"{_PREFIX}requests", "Calls that ended, by how.", ["model", "outcome"], registry=self._registry
        )
        self._responses = Counter(
            f"{_PREFIX}http_responses", "Answers over HTTP, by status.", ["route", "status"], registry=self._registry
        )
        self._tokens = Counter(f"{_PREFIX}generated_tokens", "Tokens that came out.", registry=self._registry)
        self._opened = Counter(f"{_PREFIX}opened", "Loads of entries that requests named.", registry=self._registry)
        self._queue = self._histogram("queue_seconds", "From submission to the end of the prompt's forward.", _LONG)
        self._first = self._histogram("time_to_first_token_seconds", "From submission to the first token.", _LONG)
        self._between = self._histogram("inter_token_seconds", "Between two tokens of a call.", _SHORT)
        self._whole = self._histogram("request_seconds", "From submission to the end of a call.", _LONG)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self._registry)

    def watch(self, state: Callable[[], State]) -> None:
        """Tell of the engine's state, as it is when somebody asks."""
        self._registry.register(_OfState(state))

    def opened(self) -> None:
        """An entry of the zoo was loaded because a request named it."""
        self._opened.inc()

    def queued(self, seconds: float) -> None:
        """A call left the queue."""
        self._queue.observe(seconds)

    def token(self, seconds: float, *, is_first: bool) -> None:
        """A token came, so long after the submission or the one before."""
        self._tokens.inc()
        (self._first if is_first else self._between).observe(seconds)

    def ended(self, model: str, outcome: str, seconds: float | None) -> None:
        """A call ended; model: a known one. seconds: None for one that was refused."""
        self._requests.labels(self._label(model), outcome).inc()
        if seconds is not None:
            self._whole.observe(seconds)

    def answered(self, route: str, status: int) -> None:
        """An answer over HTTP; route: one of the server's own, so that there are few."""
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)

    def _label(self, model: str) -> str:
        if len(self._names) < _MOST_NAMES:
            self._names.add(model)
        return model if model in self._names else _OTHER


class _OfState:
    """A collector of what the engine told last."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Nothing that could clash."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges of what is, counters of what was."""
        state = self._state()
        yield GaugeMetricFamily(f"{_PREFIX}requests_queued", "Calls that wait.", value=state.queued)
        yield GaugeMetricFamily(f"{_PREFIX}requests_running", "Calls that run.", value=state.running)
        places = Tally(one.place for one in state.variants)
        variants = GaugeMetricFamily(f"{_PREFIX}variants", "Loaded variants, by where they are.", labels=["place"])
        for place in _PLACES:
            variants.add_metric([place], places[place])
        yield variants
        sizes = GaugeMetricFamily(f"{_PREFIX}variant_bytes", "Taken by variants, by where.", labels=["place"])
        sizes.add_metric(["device"], state.device_bytes)
        sizes.add_metric(["host"], state.host_bytes)
        yield sizes
        kv = GaugeMetricFamily(f"{_PREFIX}kv_tokens", "Room in pages: held, and all there is.", labels=["room"])
        kv.add_metric(["held"], state.kv_tokens)
        kv.add_metric(["all"], state.kv_room)
        yield kv
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that calls began with.", state.prompt_tokens),
            ("known_prompt_tokens", "Those that earlier prompts had computed.", state.known_tokens),
            ("preemptions", "Times that a call gave way and stood in line again.", state.preempted),
            ("swapped", "Those of them whose keys and values went to the host.", state.swapped),
            ("variant_hits", "Calls that found their variant on the device.", state.hits),
            ("variant_misses", "Calls whose variant had to come first.", state.misses),
            ("variant_loads", "Times that a variant came to the device.", state.loads),
            ("variant_evictions", "Times that a variant left the device to make room.", state.evictions),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=value)
        info = GaugeMetricFamily(f"{_PREFIX}build_info", "1, with the version.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
