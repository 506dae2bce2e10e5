"""The arithmetic of the benchmarks, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from deltacompress.bench import figures


def test_the_median_is_the_one_in_the_middle() -> None:
    assert figures.median([5.0]) == 5
    assert figures.median([9.0, 1.0, 2.0]) == 2
    assert figures.median([4.0, 1.0, 3.0, 2.0]) == 3


def test_the_spread_leaves_out_the_top_tenth() -> None:
    assert figures.spread([3.0, 1.0, 2.0]) == [1, 3]
    assert figures.spread([float(n) for n in range(10, 0, -1)]) == [1, 9]
    assert figures.spread([float(n) for n in range(20)]) == [0, 17]


def test_bandwidth_is_bytes_a_second() -> None:
    assert figures.bandwidth(3_000, [2.0, 1.0, 3.0]) == pytest.approx(1.5e9)  # 3 kB in 2 us


def test_a_product_multiplies_and_adds() -> None:
    assert figures.product_rate(10, [4.0]) == pytest.approx(5e8)  # 2 x 10^3 operations in 4 us


def test_a_launch_against_the_copy_of_what_it_reads() -> None:
    """4 deltas of 1000 bytes at 1 GB/s are 4 us; 10 us were taken."""
    found = figures.kernel_times(1000, 4, [10.0, 8.0, 30.0], 1e9)
    assert found == {
        "us": 10,
        "spread": [8, 30],
        "bytes": 4000,
        "floor_us": pytest.approx(4),
        "share_of_copy_bandwidth": pytest.approx(0.4),
    }


def test_what_a_step_reads() -> None:
    assert figures.step_bytes(100, 2, []) == 200
    assert figures.step_bytes(100, 2, [30, 40]) == 270
    # 10 rows of 16 weights: two bytes a weight; or in 2 bits 4 bytes of codes, 2 of a scale, 1 of a zero and 4 more
    assert figures.embedding_bytes(10, 16, packed=False) == 320
    assert figures.embedding_bytes(10, 16, packed=True) == 110


def test_a_step_against_the_copy_of_what_it_reads() -> None:
    """8 rows; 6 MB at 2 GB/s are 3 ms; the step took 4 ms, with the host's work 5 ms: 1600 tokens a second."""
    found = figures.step_times(8, 6_000_000, [4.0], [5.0], 2e9)
    assert found == {
        "ms": 4,
        "spread": [4, 4],
        "served_ms": 5,
        "tokens_s": pytest.approx(1600),
        "bytes": 6_000_000,
        "floor_ms": pytest.approx(3),
        "times_floor": pytest.approx(4 / 3),
        "share_of_copy_bandwidth": pytest.approx(0.75),
    }


def test_merged_models_take_turns() -> None:
    """A step of the base takes 4 ms, 5 with the host's work: 16 models take 80 ms for 16 tokens, 200 a second."""
    base = {"ms": 4.0, "served_ms": 5.0, "bytes": 100, "floor_ms": 2.0}
    resident = figures.merged_in_turn(base, 16)
    assert resident == {
        "variants": 16, "rows": 16, "ms": 64, "served_ms": 80, "tokens_s": 200, "bytes": 1600, "floor_ms": 32,
    }  # fmt: skip
    swapped = figures.merged_in_turn(base, 16, swap_ms=20.0)
    assert swapped == resident | {"ms": 384, "served_ms": 400, "tokens_s": 40}


def test_loads_are_told_in_gigabytes_a_second() -> None:
    """3 GB in 1.5 s are 2 GB/s; a second of it moved bytes."""
    found = figures.load_times(3_000_000_000, [1500.0, 1400.0, 2000.0], [1000.0])
    assert found == {
        "times": 3,
        "bytes": 3_000_000_000,
        "ms": 1500,
        "spread": [1400, 2000],
        "moved_ms": 1000,
        "moved_gb_s": pytest.approx(3),
        "gb_s": pytest.approx(2),
    }
    assert "moved_ms" not in figures.load_times(1, [1.0], [0.0])


def test_a_step_over_mixed_formats_by_its_bytes() -> None:
    """Twice the deltas' bytes take twice the time beyond the base's 4 ms."""
    base, uniform = {"ms": 4.0, "bytes": 100}, {"ms": 10.0, "bytes": 400}
    found = figures.by_bytes({"ms": 20.0, "bytes": 700}, base, uniform)
    assert found == {"by_bytes_ms": 16.0, "times_by_bytes": 1.25}


def test_the_cache_is_the_smallest_that_is_large_enough() -> None:
    """2 layers of 8: keys and values of 2 x 8 bf16 numbers each, 64 bytes a token; 3 rows: 192 a column."""
    assert figures.cache_columns(2, 8, 3, 1920) == (10, 1920)
    assert figures.cache_columns(2, 8, 3, 1921) == (11, 2112)


def test_a_speedup_is_the_baselines_time_over_ours() -> None:
    assert figures.obs_speedups(12.0, 3.0, 4.0) == {
        "baseline_seconds": 12, "seconds": 3, "speedup": 4, "as_shipped_seconds": 4, "as_shipped_speedup": 3,
    }  # fmt: skip


def test_a_layer_against_its_arithmetic() -> None:
    """6 TFLOP at 4 TFLOP/s are 1.5 s; the median layer takes 3 s, the first apart."""
    for layers in ([9.0, 3.0, 2.0], [9.0, 3.0], [1.0, 9.0, 3.0, 2.0], [3.0]):
        found = figures.layer_times(layers, 6.0, 4.0)
        assert found == {"seconds_per_layer": 3, "floor_seconds": 1.5, "over_floor": 2}


def test_accuracy_in_percent() -> None:
    assert figures.accuracy(20, 100) == {"accuracy": pytest.approx(20), "stderr": pytest.approx(4)}
    assert figures.accuracy(7, 7) == {"accuracy": 100, "stderr": 0}


def test_flips_are_those_of_one_model_alone() -> None:
    assert figures.flips([True, True, False, False, True], [True, False, True, True, False]) == (2, 2)
    assert figures.flips([True, True], [True, False]) == (1, 0)
    with pytest.raises(ValueError, match="zip"):
        figures.flips([True], [True, False])
