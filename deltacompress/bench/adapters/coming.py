"""How adapters come: a thousand of them with room for a few, and each way to a first token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from deltacompress.bench import figures
from deltacompress.bench.adapters.loops import Asker, Lengths, asked_of
from deltacompress.bench.adapters.served import Stand, System
from deltacompress.bench.serve.records import Record
from deltacompress.bench.serve.replay import replay
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.runtime.engine.live.engine import EngineLimits

POPULARITY = "zipf-1.5"
KINDS = ("lora16", "boft")
"""Of which the ways to a first token are timed."""


def many(
    stand: Stand, system: System, registered: int, room: int, rate: float, seconds: float, most: int, lengths: Lengths
) -> dict[str, Any]:
    """Requests for `registered` adapters, by POPULARITY, of which `room` are on the device at once; none is at first.

    rate: requests a second, for `seconds`; most: that run at once.

    Raises:
        QueueFullError: more waited than an engine lets wait: one was refused.
    """
    models = stand.registered(system, registered, room)
    count = max(1, round(rate * seconds))
    chosen = [models.names[number] for number in assigned(count, registered, POPULARITY, lengths.seed)]
    with Asker(models, lengths) as asker:
        asker.first_token_s(models.names[0])  # what is compiled once
    for name in models.names:
        stand.away(name)
    asked = asked_of(chosen, count, lengths, rate)
    records, _ = replay(models, asked, EngineLimits(max_batch=most, prefix_bytes=0), lengths.seed)
    return {"registered": registered, "room": room, "rate": rate, **met(records)}


def met(records: Sequence[Record]) -> dict[str, Any]:
    """Medians of the time to a first token, in milliseconds, of requests that found their variant on the device and of
    those that did not; None where there are none. failed: that did not get all tokens.
    """
    whole = [one for one in records if one.is_whole]
    first = {
        hit: sorted((one.token_s[0] - one.asked.arrival.at_s) * 1e3 for one in whole if one.hit is hit)
        for hit in (True, False)
    }
    hit, miss = (figures.median(first[which]) if first[which] else None for which in (True, False))
    return {
        "requests": len(records),
        "failed": len(records) - len(whole),
        "hits": len(first[True]),
        "misses": len(first[False]),
        "hit_ms": hit,
        "miss_ms": miss,
        "added_ms": None if hit is None or miss is None else miss - hit,
        "miss_p99_ms": first[False][len(first[False]) * 99 // 100] if first[False] else None,
        "loading_ms": figures.median([one.load_s * 1e3 for one in whole if not one.hit]) if first[False] else None,
    }


def ways(stand: Stand, kind: str, times: int, lengths: Lengths) -> list[dict[str, Any]]:
    """From nothing to a first token, in milliseconds: Runtime.load of files that were read before (rotations are made
    and merged in it) and a request; a request for what has left the device; one for what is there.

    Requests are asked of one engine, which is as warm as a server's that has served one of the kind.
    """
    stand.clear()
    stand.runtime.cache.residents.slots = 1
    folder, models = stand.folder(kind), stand.bare()
    left = "from pinned host memory" if stand.on_gpu else "from files, once more"
    found: dict[str, list[float]] = {"load, from the page cache": [], left: [], "on the device": []}
    with Asker(models, lengths) as asker:
        for number in range(-1, times):
            name, began = f"{kind} {number}", time.perf_counter()
            stand.runtime.load(folder, name)
            loaded = time.perf_counter() - began
            if number < 0:
                asker.warm()  # which also compiles
            seconds = [loaded + asker.first_token_s(name)]
            stand.away(name)
            seconds += [asker.first_token_s(name) for _ in range(2)]
            for way, one in zip(found, seconds, strict=True):
                if number >= 0:
                    found[way].append(one * 1e3)
            stand.runtime.unload(name)
    there = figures.median(found["on the device"])
    return [
        {
            "kind": kind,
            "way": way,
            "times": times,
            "first_token_ms": figures.median(ms),
            "spread": figures.spread(ms),
            "over_hit_ms": figures.median(ms) - there,
        }
        for way, ms in found.items()
    ]
