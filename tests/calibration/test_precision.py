"""What calibration multiplies in, and when that is too narrow."""

from __future__ import annotations

import pytest
import torch

from deltacompress.calibration.forwards.precision import Precision, calibration_precision
from deltacompress.models.relay import LayerCall
from deltacompress.numerics.finite import RangeOf

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP16 = calibration_precision(GPU, bf16_weights=True)


def test_what_each_device_takes() -> None:
    for bf16 in (True, False):
        gpu = calibration_precision(GPU, bf16_weights=bf16)
        assert (gpu.inputs, gpu.wider) == ("fp16", Precision("tf32"))
    assert calibration_precision(CPU, bf16_weights=True) == Precision("bf16")
    assert calibration_precision(CPU, bf16_weights=False) == Precision("fp32")


@pytest.mark.parametrize(("inputs", "means"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "medium")])
def test_products_set_what_torch_calls_it_and_put_it_back(inputs: str, means: str) -> None:
    before = torch.get_float32_matmul_precision()
    with Precision(inputs).products():  # type: ignore[arg-type]
        assert torch.get_float32_matmul_precision() == means
    assert torch.get_float32_matmul_precision() == before


def test_values_overflow_where_the_difference_of_two_could() -> None:
    assert not FP16.overflows(-32752.0, 32752.0)
    for bad in (32768.0, -32768.0, float("inf"), float("-inf"), float("nan")):
        assert FP16.overflows(*RangeOf(torch.tensor([0.0, bad])).get())


def test_only_fp16_rounds_inputs_and_rotary_tables() -> None:
    values = torch.tensor([1 / 3])
    tables = (values, values)
    call = LayerCall((1, 1), (), {"position_embeddings": tables, "attention_mask": values}, by_keyword=False)
    assert FP16.rounded(values).dtype == torch.float16
    rounded = FP16.rounded_positions(call)
    assert [table.dtype for table in rounded.kwargs["position_embeddings"]] == [torch.float16] * 2
    assert rounded.kwargs["attention_mask"] is values
    assert call.kwargs["position_embeddings"] is tables
    bare = LayerCall((1, 1), (), {}, by_keyword=False)
    assert FP16.rounded_positions(bare) is bare
    for precision in (Precision("tf32"), Precision("fp32")):
        assert precision.rounded(values) is values
        assert precision.rounded_positions(call) is call


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # where there is none
def test_no_partial_sums_are_of_16_bits_meanwhile() -> None:
    matmul = torch.backends.cuda.matmul
    names = ["allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"]
    before = [getattr(matmul, name) for name in names]
    with FP16.products():
        assert not any(getattr(matmul, name) for name in names)
    assert [getattr(matmul, name) for name in names] == before
    assert all(before)  # PyTorch's own, or this test says nothing


@pytest.mark.gpu
def test_on_a_gpu_products_are_of_fp16_with_fp32_sums() -> None:
    left = torch.full((8, 8192), 1.0 + 2**-10, device="cuda")
    with FP16.products():
        exact = torch.nn.functional.linear(left, left)
        assert exact.dtype == torch.float16
    assert torch.equal(exact.double(), (left.double() @ left.double().T).half().double())
