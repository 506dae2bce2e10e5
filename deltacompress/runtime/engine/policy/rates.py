"""Token buckets: how many requests a key or a variant may send. The time is passed in."""

from __future__ import annotations

from deltacompress.errors import InputError


class Rates:
    """A bucket for each name (an API key, a variant): `burst` requests at once, `rate` more of them a second.

    Buckets that are full again are forgotten, so that names that come from outside do not pile up.
    """

    def __init__(self, rate: float, burst: int) -> None:
        """Raises InputError where rate is not above 0 (requests a second), or burst below 1."""
        if not 0 < rate < float("inf"):
            raise InputError(f"a rate of {rate} requests a second", way_out="give a number above 0")
        if burst < 1:
            raise InputError(f"a burst of {burst} requests", way_out="give 1 or more")
        self._rate, self._burst = rate, burst
        self._full_at: dict[str, float] = {}
        self._swept = float("-inf")

    def take(self, name: str, now: float) -> float:
        """0.0 if a request of this name may come at `now` (it is counted), else the seconds until it may."""
        full_at = max(self._full_at.get(name, now), now)
        wait = full_at - now - (self._burst - 1) / self._rate
        if wait > 1e-9:
            return wait
        self._full_at[name] = full_at + 1 / self._rate
        self._sweep(now)
        return 0.0

    def __len__(self) -> int:
        return len(self._full_at)

    def _sweep(self, now: float) -> None:
        """Once in the time in which a bucket fills."""
        if now - self._swept < self._burst / self._rate:
            return
        self._swept = now
        self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
