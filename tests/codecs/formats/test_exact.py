from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.checkpoints.rows import InMemory
from deltacompress.codecs.formats import exact
from deltacompress.errors import FormatError

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
OTHERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.complex64]
ODD_BITS = {
    torch.bfloat16: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x3F80],
    torch.float16: [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7C01, 0xFE01, 0x7FFF, 0xFFFF, 0x0001, 0x8001, 0x03FF, 0x3C00],
    torch.float32: [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00001, 0xFFFFFFFF, 1, 0x80000001, 0x7FFFFF],
}  # fmt: skip


def from_bytes(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def round_trip(finetuned: torch.Tensor, base: torch.Tensor | None) -> dict[str, torch.Tensor]:
    params, parts = exact.encode(InMemory(finetuned), None if base is None else InMemory(base))
    like = torch.empty(finetuned.shape, dtype=finetuned.dtype, device="meta")
    restored = exact.decode(params, parts, base, like, "t")
    assert restored.dtype == finetuned.dtype
    assert restored.shape == finetuned.shape
    assert raw(restored) == raw(finetuned)
    return parts


@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_bits_come_back_against_any_base(dtype: torch.dtype, data: st.DataObject) -> None:
    item = torch.empty((), dtype=dtype).element_size()
    count = data.draw(st.integers(0, 12))
    one = from_bytes(data.draw(st.binary(min_size=item * count, max_size=item * count)), dtype) if count else None
    two = from_bytes(data.draw(st.binary(min_size=item * count, max_size=item * count)), dtype) if count else None
    empty = torch.empty(0, dtype=dtype)
    round_trip(one if one is not None else empty, two if two is not None else empty)
    round_trip(one if one is not None else empty, None)


@pytest.mark.parametrize("dtype", list(ODD_BITS))
def test_every_pair_of_odd_values_comes_back(dtype: torch.dtype) -> None:
    bits, width = ODD_BITS[dtype], torch.empty((), dtype=dtype).element_size()
    ours = from_bytes(b"".join(b.to_bytes(width, "little") for b in bits for _ in bits), dtype)
    base = from_bytes(b"".join(b.to_bytes(width, "little") for _ in bits for b in bits), dtype)
    round_trip(ours, base)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("base_dtype", FLOATS)
def test_the_base_may_have_another_float_type_and_fewer_rows(dtype: torch.dtype, base_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    finetuned = torch.randn(5, 3, generator=generator).to(dtype)
    for rows in (0, 1, 4, 5):
        round_trip(finetuned, torch.randn(rows, 3, generator=generator).to(base_dtype))


def test_bools_scalars_and_strided_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    yes = torch.rand(3, 4, generator=generator) < 0.5
    round_trip(yes, ~yes)
    round_trip(yes, None)
    round_trip(torch.tensor(1.5), torch.tensor(-0.0))
    round_trip(torch.tensor(7), None)
    wide = torch.randn(6, 8, generator=generator).bfloat16()
    round_trip(wide.T, wide.reshape(8, 6))
    round_trip(wide[:, ::2], wide[:, 1::2])


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS, torch.bool])
def test_identical_tensors_give_zero_planes(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (4, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    planes = round_trip(tensor, tensor)["planes"]
    assert planes.shape == (tensor.element_size(), 24)
    assert not planes.any()


def test_neighbouring_values_differ_by_small_numbers_across_zero() -> None:
    base = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0**-126], dtype=torch.bfloat16)
    step = torch.tensor([1, 1, 1, 1, -1], dtype=torch.int16)
    finetuned = (base.view(torch.int16) + step).view(torch.bfloat16)
    planes = round_trip(finetuned, base)["planes"]
    assert not planes[1].any()
    # away from zero is up for positive values and down for negative ones: zigzag 2 and 1
    assert planes[0].tolist() == [2, 1, 2, 1, 1]


LIKE = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    "planes",
    [None, torch.zeros(2, 23, dtype=torch.uint8), torch.zeros(1, 24, dtype=torch.uint8), torch.zeros(48).byte(),
     torch.zeros(2, 24, dtype=torch.int8), torch.zeros(2, 24)],
)  # fmt: skip
def test_planes_that_do_not_fit_are_a_format_error(planes: torch.Tensor | None) -> None:
    parts = {} if planes is None else {"planes": planes}
    with pytest.raises(FormatError, match=r"^t: "):
        exact.decode({"transform": "ordered"}, parts, None, LIKE, "t")


@pytest.mark.parametrize("params", [{}, {"transform": "xor"}, {"transform": 3}])
def test_another_transform_is_a_format_error(params: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=r"^t: transform"):
        exact.decode(params, {"planes": torch.zeros(2, 24, dtype=torch.uint8)}, None, LIKE, "t")


@pytest.mark.parametrize("shape", [(5, 6), (4, 5), (24,), ()])
def test_a_base_that_does_not_fit_is_a_format_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=r"^t: a base of"):
        exact.decode({"transform": "ordered"}, {"planes": torch.zeros(2, 24).byte()}, torch.zeros(shape), LIKE, "t")
