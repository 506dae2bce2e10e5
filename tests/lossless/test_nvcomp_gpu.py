"""nvCOMP on a real GPU: round trips, the two GDeflate implementations against each other, and damage.

Run with `pytest -m gpu tests/lossless`.
"""

from __future__ import annotations

import random

import pytest

from deltacompress import lossless
from deltacompress.errors import BackendError, FormatError, IntegrityError
from deltacompress.lossless import gdeflate_cpu, nvcomp
from deltacompress.lossless.stream import HEADER_BYTES, chunk_sizes, pack

pytestmark = pytest.mark.gpu

CODECS = ["gdeflate", "ans"]
SIZES = [0, 1, 2, 31, 4095, 65535, 65536, 65537, 262143, 262144, 262145, 3_000_001]
KINDS = ["zeros", "random", "symbols"]


@pytest.fixture(autouse=True)
def _need_gpu() -> None:
    problem = nvcomp.problem()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture
def _need_cpu_library() -> None:
    problem = gdeflate_cpu.problem()
    if problem is not None:
        pytest.skip(problem)


def sample(kind: str, size: int) -> bytes:
    rng = random.Random(size)
    if kind == "zeros":
        return bytes(size)
    if kind == "random":
        return rng.randbytes(size)
    return bytes(rng.choices(range(67), weights=[200] + [3] * 66, k=size))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(codec: str, kind: str, size: int) -> None:
    raw = sample(kind, size)
    data = lossless.encode(raw, codec, device="cuda")
    assert lossless.decode(data, raw_bytes=size, device="cuda") == raw
    if kind != "random" and size > 60_000:
        assert len(data) < HEADER_BYTES + 0.6 * size


@pytest.mark.parametrize("codec", CODECS)
def test_round_trip_in_several_batches(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = sample("symbols", 3_000_001)
    whole = lossless.encode(raw, codec, device="cuda")
    monkeypatch.setattr(nvcomp, "_BATCH_BYTES", 600_000)
    split = lossless.encode(raw, codec, device="cuda")  # its bytes may differ: nvCOMP does not promise them
    assert lossless.decode(split, raw_bytes=len(raw), device="cuda") == raw
    assert lossless.decode(whole, raw_bytes=len(raw), device="cuda") == raw


@pytest.mark.usefixtures("_need_cpu_library")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_gdeflate_made_on_either_side_decodes_on_the_other(kind: str, size: int) -> None:
    raw = sample(kind, size)
    assert lossless.decode(lossless.encode(raw, "gdeflate", device="cpu"), raw_bytes=size, device="cuda") == raw
    assert lossless.decode(lossless.encode(raw, "gdeflate", device="cuda"), raw_bytes=size, device="cpu") == raw


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_detected_before_the_gpu_sees_it(codec: str) -> None:
    raw = sample("symbols", 300_000)
    data = lossless.encode(raw, codec, device="cuda")
    rng = random.Random(1)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(IntegrityError):
            lossless.decode(damaged, raw_bytes=len(raw), device="cuda")


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_wants_more_room_than_promised_is_refused(codec: str) -> None:
    """Right digests around a bitstream of 60,000 bytes where 1,000 were promised; and the GPU still works after it."""
    big = sample("symbols", 60_000)
    [coded] = nvcomp.encode_chunks(codec, memoryview(big), chunk_sizes(len(big), 1 << 16))
    data = pack(codec, memoryview(bytes(1000)), 1 << 16, [coded])
    with pytest.raises((FormatError, BackendError, IntegrityError)):
        lossless.decode(data, raw_bytes=1000, device="cuda")
    again = lossless.encode(big, codec, device="cuda")
    assert lossless.decode(again, raw_bytes=len(big), device="cuda") == big
