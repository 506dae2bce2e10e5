"""The half of the GPU codec that needs no GPU: layout, batches and errors, over a stand-in for nvCOMP.

The stand-in codes with zlib and checks what the real one asks of its caller: aligned pieces, a fixed output.
`test_nvcomp_gpu.py` runs the same code over the real library.
"""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from deltacompress import lossless
from deltacompress.errors import BackendError, FormatError
from deltacompress.lossless import nvcomp
from deltacompress.lossless.stream import pack


class Batch(list[np.ndarray]):
    def cpu(self) -> Batch:
        return self


class Codec:
    made: ClassVar[list[dict[str, Any]]] = []
    fails: ClassVar[Exception | None] = None

    def __init__(self, **options: Any) -> None:
        self.made.append(options)

    def encode(self, batch: Batch) -> Batch:
        if self.fails:
            raise self.fails
        assert sum(piece.nbytes for piece in batch) <= max(nvcomp._BATCH_BYTES, batch[0].nbytes)
        return Batch(np.frombuffer(zlib.compress(piece.tobytes()), np.uint8) for piece in batch)

    def decode(self, batch: Batch, *, out: Batch) -> Batch:
        if self.fails:
            raise self.fails
        results = Batch()
        for piece, room in zip(batch, out, strict=True):
            raw = zlib.decompress(piece.tobytes())
            if len(raw) > room.nbytes:
                raise ValueError("output buffer too small")
            room[: len(raw)] = np.frombuffer(raw, np.uint8)
            results.append(room[: len(raw)])
        return results


def as_arrays(buffer: Any, offsets: list[int], sizes: list[int]) -> Batch:
    assert all(offset % 16 == 0 for offset in offsets)
    assert all(
        end <= start for end, start in zip(map(sum, zip(offsets, sizes, strict=True)), offsets[1:], strict=False)
    )
    return Batch(buffer.array[at : at + size] for at, size in zip(offsets, sizes, strict=True))


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_array(array: np.ndarray) -> SimpleNamespace:
        held = SimpleNamespace(array=array)
        held.cuda = lambda: held
        return held

    fake = SimpleNamespace(
        as_array=as_array, as_arrays=as_arrays, Codec=Codec, BitstreamKind=SimpleNamespace(RAW="raw")
    )
    monkeypatch.setattr(nvcomp, "importlib", SimpleNamespace(import_module=lambda _: fake))
    monkeypatch.setattr(nvcomp, "problem", lambda: None)
    monkeypatch.setattr(Codec, "made", [])
    monkeypatch.setattr(Codec, "fails", None)


@pytest.mark.parametrize("codec", ["gdeflate", "ans"])
@pytest.mark.parametrize("batch_bytes", [1, 100_000, 1 << 28])
def test_round_trip_in_batches(codec: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcomp, "_BATCH_BYTES", batch_bytes)
    for size in (0, 1, 65535, 65537, 262144, 600_001):
        raw = random.Random(size).randbytes(size)
        data = lossless.encode(raw, codec, device="cuda")
        assert lossless.decode(data, raw_bytes=size, device="cuda") == raw
    for options in Codec.made:
        assert options["algorithm"] == {"gdeflate": "GDeflate", "ans": "ANS"}[codec]
        assert options["bitstream_kind"] == "raw"
        assert options["uncomp_chunk_size"] % 16 == 0


def test_chunks_that_decode_to_another_length_are_refused() -> None:
    for decoded in (bytes(999), bytes(1001)):
        data = pack("ans", memoryview(bytes(1000)), 1 << 18, [zlib.compress(decoded)])
        with pytest.raises(FormatError, match=r"^part: ans chunk"):
            lossless.decode(data, raw_bytes=1000, name="part")


def test_failures_of_the_library_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    data = lossless.encode(bytes(1000), "ans")
    monkeypatch.setattr(Codec, "fails", RuntimeError("out of memory"))
    with pytest.raises(BackendError, match=r"compressing with ans \(out of memory\).*lossless zstd"):
        lossless.encode(bytes(1000), "ans")
    with pytest.raises(BackendError, match=r"part: .*decoding ans.*\(out of memory\).*lossless zstd"):
        lossless.decode(data, raw_bytes=1000, name="part")
