"""The benchmark runs anywhere and gives the rows that scripts depend on."""

from __future__ import annotations

from deltacompress.bench.kernels import Shape, run


def test_rows_have_the_promised_keys() -> None:
    shapes = (Shape(4, "2:4", 32, 16, 2, 2), Shape(2, "dense", 32, 16, 2, 128))
    found = run(device="cpu", shapes=shapes, repeats=2).to_json()
    assert found["backend"] == "reference"
    assert [row["op"] for row in found["rows"]] == ["decode", "prefill"]
    for row in found["rows"]:
        assert {"format", "in", "out", "variants", "rows", "us", "floor_us", "share_of_copy_bandwidth"} <= row.keys()
        assert row["baselines"].keys() == {"fp16_loop", "fp16_bmm", "dequant_matmul", "base_gemm"}
        assert row["spread"][0] <= row["us"]
