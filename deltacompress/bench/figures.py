"""The arithmetic of the benchmarks: from times and bytes that were measured to the figures that are printed.

Pure functions of plain numbers, so that each has a test by hand; what measures does nothing but measure. Times are in
the unit that their name says, sizes in bytes, bandwidths in bytes a second, a GB has 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

Times = Sequence[float]


def median(times: Times) -> float:
    """The one in the middle; of an even number the larger of the two there."""
    return sorted(times)[len(times) // 2]


def spread(times: Times) -> list[float]:
    """The smallest, and the largest but for the top tenth."""
    ordered = sorted(times)
    return [ordered[0], ordered[-1 - len(ordered) // 10]]


def bandwidth(moved: int, microseconds: Times) -> float:
    """Bytes a second, of the median time in which `moved` bytes were moved."""
    return moved / (median(microseconds) / 1e6)


def product_rate(size: int, microseconds: Times) -> float:
    """Operations a second of a product of two size x size matrices: a multiplication and an addition each."""
    return 2 * size**3 / (median(microseconds) / 1e6)


def kernel_times(one: int, variants: int, microseconds: Times, copy: float) -> dict[str, Any]:
    """A launch that reads `variants` packed deltas of `one` byte count each; copy: bandwidth of a large copy."""
    size, us = one * variants, median(microseconds)
    floor = size / copy * 1e6
    return {
        "us": us,
        "spread": spread(microseconds),
        "bytes": size,
        "floor_us": floor,
        "share_of_copy_bandwidth": floor / us,
    }


def embedding_bytes(vocabulary: int, hidden: int, *, packed: bool) -> int:
    """A variant's embedding, of which a step reads a few rows only: a table in bf16, or as it lies on a GPU.

    packed: 2 bits a weight; of each row a scale (2), a zero point (1) and where it lies (4).
    """
    return vocabulary * ((hidden // 4 + 2 + 1 + 4) if packed else 2 * hidden)


def step_bytes(products: int, itemsize: int, variants: Sequence[int]) -> int:
    """What a decode step reads: `products` weights of the base once, and the packed products of each variant."""
    return products * itemsize + sum(variants)


def step_times(rows: int, size: int, step_ms: Times, served_ms: Times, copy: float) -> dict[str, Any]:
    """A decode step of `rows` rows, a token each, that reads `size` bytes; served: with what the host does for it."""
    ms, floor = median(step_ms), size / copy * 1e3
    return {
        "ms": ms,
        "spread": spread(step_ms),
        "served_ms": median(served_ms),
        "tokens_s": rows / median(served_ms) * 1e3,
        "bytes": size,
        "floor_ms": floor,
        "times_floor": ms / floor,
        "share_of_copy_bandwidth": floor / ms,
    }


def by_bytes(mixed: dict[str, Any], base: dict[str, Any], uniform: dict[str, Any]) -> dict[str, Any]:
    """Of a step over variants in several formats: what one in the uniform format would take for as many bytes.

    Each a row of as many rows; the time beyond the base's step goes with the bytes beyond the base's.
    """
    share = (mixed["bytes"] - base["bytes"]) / (uniform["bytes"] - base["bytes"])
    by_share = base["ms"] + share * (uniform["ms"] - base["ms"])
    return {"by_bytes_ms": by_share, "times_by_bytes": mixed["ms"] / by_share}


def merged_in_turn(base: dict[str, Any], variants: int, swap_ms: float = 0.0) -> dict[str, Any]:
    """A token of each of `variants` merged models, one after another, each a step of the base alone (a row of one).

    swap_ms: what bringing a model to the device takes before its step; 0 where all are resident.
    """
    served = base["served_ms"] + swap_ms
    return {
        "variants": variants,
        "rows": variants,
        "ms": variants * (base["ms"] + swap_ms),
        "served_ms": variants * served,
        "tokens_s": 1e3 / served,
        "bytes": variants * base["bytes"],
        "floor_ms": variants * base["floor_ms"],
    }


def load_times(packed: int, ms: Times, moved_ms: Times) -> dict[str, Any]:
    """Loads of `packed` bytes; moved: without opening and checking, left out where nothing moved."""
    row: dict[str, Any] = {"times": len(ms), "bytes": packed, "ms": median(ms), "spread": spread(ms)}
    if moved := median(moved_ms):
        row |= {"moved_ms": moved, "moved_gb_s": _gb_s(packed, moved)}
    return row | {"gb_s": _gb_s(packed, median(ms))}


def cache_columns(layers: int, hidden: int, rows: int, at_least: int) -> tuple[int, int]:
    """(columns, bytes) of the smallest cache of bf16 keys and values for `rows` rows that has `at_least` bytes."""
    token = 2 * 2 * layers * hidden
    columns = -(-at_least // (token * rows))
    return columns, token * rows * columns


def obs_speedups(plain: float, ours: float, shipped: float) -> dict[str, float]:
    """Seconds of the plain baseline, of ours, and of the codec as shipped; a speedup above 1: ours is faster."""
    return {
        "baseline_seconds": plain,
        "seconds": ours,
        "speedup": plain / ours,
        "as_shipped_seconds": shipped,
        "as_shipped_speedup": plain / shipped,
    }


def layer_times(layer_seconds: Times, tflop: float, tflop_s: float) -> dict[str, float]:
    """The median layer, without the first if there are more (it waits for kernels to be compiled), against `tflop`."""
    seconds, floor = median(layer_seconds[1:] or layer_seconds), tflop / tflop_s
    return {"seconds_per_layer": seconds, "floor_seconds": floor, "over_floor": seconds / floor}


def stage_table(watched: Mapping[str, Any], forwards: float, sums: float, tflop_s: float) -> dict[str, Any]:
    """Where the seconds of one layer went, a row for each part, and the speed of those that are products.

    watched: seconds of the layer, idle_seconds of a GPU and idle_in each part (else None), and seconds by part, of the
    device and of the host. forwards, sums: TFLOP that these have to take; tflop_s: of a large product.
    """
    device, whole, idle, idle_in = (watched[name] for name in ("device", "seconds", "idle_seconds", "idle_in"))

    def row(part: str, on: str, seconds: float, waited: float | None = None) -> dict[str, Any]:
        own = {} if idle_in is None else {"idle": waited}
        return {"part": part, "on": on, "seconds": seconds, "share": seconds / whole, **own}

    rows = [row(name, "device", spent, idle_in and idle_in[name]) for name, spent in device.items()]
    rest = None if idle is None else idle - sum(idle_in.values())
    rows.append(row("between these", "device", whole - sum(device.values()), rest))
    rows += [row(name, "host, beside it", spent) for name, spent in watched["host"].items()]
    passing = sum(spent for name, spent in device.items() if name.startswith(("teacher", "student")))
    return {
        "watched_layer_seconds": whole,
        "idle_share": None if idle is None else idle / whole,
        "forwards_of_product_speed": forwards / passing / tflop_s if passing else None,
        "sums_of_product_speed": sums / device["sums"] / tflop_s if "sums" in device else None,
        "stages": rows,
    }


def accuracy(right: int, samples: int) -> dict[str, float]:
    """Accuracy and its standard error, in percent."""
    share = right / samples
    return {"accuracy": 100 * share, "stderr": 100 * sqrt(share * (1 - share) / samples)}


def flips(right: Sequence[bool], reference: Sequence[bool]) -> tuple[int, int]:
    """(gained, lost): samples that only the first got right, and only the reference."""
    pairs = list(zip(right, reference, strict=True))
    return pairs.count((True, False)), pairs.count((False, True))


def _gb_s(size: int, ms: float) -> float:
    return size / ms / 1e6
