"""Round trips of every codec that can run here, the choice of backend, and what is said where none can run."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress import lossless
from deltacompress.errors import BackendError, ChecksumError, FormatError, InputError, IntegrityError, install_hint
from deltacompress.lossless import coding, gdeflate_cpu, nvcomp, stream, windows, zstd
from deltacompress.lossless.windows import Windows

SIZES = [0, 1, 2, 31, 65535, 65536, 65537, 2 * 65536, 262143, 262144, 262145, 600_001]
KINDS = ["zeros", "random", "symbols"]


def sample(kind: str, size: int) -> bytes:
    rng = random.Random(size)
    if kind == "zeros":
        return bytes(size)
    if kind == "random":
        return rng.randbytes(size)
    if kind == "sparse":  # most symbols zero, as of 2-bit codes: where a deeper search pays
        return bytes(rng.choices(range(17), weights=[300] + [3] * 16, k=size))
    return bytes(rng.choices(range(67), weights=[200] + [3] * 66, k=size))


def windows_of(data: bytes, raw_bytes: int, **options: int) -> Windows:
    """The stream as it would be read from a file."""

    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(data)
        return data[offset : offset + length]

    codec = stream.parse_frame(data, len(data), raw_bytes=raw_bytes, name="").codec
    return lossless.coder(codec, encode=False).windows(read, len(data), raw_bytes=raw_bytes, **options)


def need(codec: str) -> None:
    try:
        lossless.coder(codec)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("codec", lossless.CODECS)
@given(raw=st.binary(max_size=2000) | st.builds(lambda b, n: b * n, st.binary(max_size=40), st.integers(0, 4000)))
@settings(max_examples=15, deadline=None)
def test_identity_for_arbitrary_bytes(codec: str, raw: bytes) -> None:
    need(codec)
    assert lossless.decode(lossless.encode(raw, codec), raw_bytes=len(raw)) == raw


@pytest.mark.parametrize("codec", lossless.CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_identity_around_chunk_boundaries(codec: str, kind: str) -> None:
    need(codec)
    for size in SIZES:
        raw = sample(kind, size)
        coded = lossless.encode(raw, codec)
        assert lossless.decode(coded, raw_bytes=size) == raw
        assert lossless.coder(codec).coded_bytes(raw) == len(coded)
        assert windows_of(coded, size).frame.codec == codec
        assert len(coded) <= stream.HEADER_BYTES + 1.01 * size + 320 * (1 + size // 65536)  # never much larger


@pytest.mark.parametrize("codec", lossless.CODECS)
@pytest.mark.parametrize("keep", [1, 3])
def test_any_range_comes_out_of_windows(codec: str, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    need(codec)
    monkeypatch.setattr(windows, "WINDOW_BYTES", dict.fromkeys(lossless.CODECS, 200_000))
    rng = random.Random(codec)
    for size in (0, 1, 65537, 262145, 900_001):
        raw = sample("symbols", size)
        opened = windows_of(lossless.encode(raw, codec), size, keep=keep)
        for _ in range(20):
            begin, end = sorted(rng.randint(0, size) for _ in range(2))
            assert opened.read(begin, end) == raw[begin:end]
        assert opened.read(0, size) == raw
        opened.check_raw()
        windows_of(lossless.encode(raw, codec), size).check_raw()


def test_a_window_is_decoded_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", {"zstd": zstd.CHUNK_BYTES})
    raw = sample("symbols", 8 * zstd.CHUNK_BYTES)
    data, decoded = lossless.encode(raw, "zstd"), []
    real = Windows._decode
    monkeypatch.setattr(Windows, "_decode", lambda self, index, view: (decoded.append(index), real(self, index, view)))
    opened = windows_of(data, len(raw), keep=2)
    tracemalloc.start()
    try:
        for begin in range(0, len(raw) // 2, 1000):  # two places in turn, as of two planes
            opened.read(begin, begin + 10)
            opened.read(len(raw) // 2 + begin, len(raw) // 2 + begin + 10)
        assert tracemalloc.get_traced_memory()[1] < 5 * zstd.CHUNK_BYTES  # two are kept, one comes, as it is decoded
    finally:
        tracemalloc.stop()
    assert sorted(decoded) == list(range(8))
    decoded.clear()
    windows_of(data, len(raw)).check_raw()
    assert decoded == list(range(8))


def test_what_a_decoder_gets_wrong_is_noticed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", {"zstd": zstd.CHUNK_BYTES})
    raw = sample("symbols", 3 * zstd.CHUNK_BYTES)
    data = bytearray(lossless.encode(raw, "zstd"))
    data[24] ^= 1  # the raw digest, sealed anew
    data[40:56] = stream.digest(bytes(data[:40]), bytes(data[56:]))
    opened = windows_of(bytes(data), len(raw))
    assert opened.read(0, len(raw)) == raw
    for use in (opened.check_raw, lambda: lossless.decode(data, raw_bytes=len(raw))):
        with pytest.raises(ChecksumError, match="decoded bytes differ from their checksum; the zstd"):
            use()


def test_another_codec_than_promised() -> None:
    data = lossless.encode(b"abc" * 100, "none")
    with pytest.raises(FormatError, match="coded with none, the manifest says zstd; copy the artifact again"):
        lossless.decode(data, raw_bytes=300, codec="zstd")
    assert lossless.decode(data, raw_bytes=300, codec="none") == b"abc" * 100


@pytest.mark.parametrize("codec", lossless.CODECS)
def test_same_bytes_give_the_same_stream(codec: str) -> None:
    need(codec)
    raw = sample("symbols", 600_001)
    assert lossless.encode(raw, codec) == lossless.encode(raw, codec)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_any_contiguous_buffer_is_taken(codec: str) -> None:
    array = np.arange(600, dtype=np.float32).reshape(20, 30)
    array[3, 4] = np.float32(np.nan)
    for raw in (array.tobytes(), bytearray(array.tobytes()), memoryview(array)):
        data = lossless.encode(raw, codec)
        for held in (data, bytearray(data), memoryview(data)):
            assert lossless.decode(held, raw_bytes=array.nbytes) == array.tobytes()
    empty = memoryview(np.zeros((0, 4), np.float32))
    assert lossless.decode(lossless.encode(empty, codec), raw_bytes=0) == b""


def test_zstd_chunks_are_standard_frames_no_larger_than_a_plain_call_makes() -> None:
    for kind in (*KINDS, "sparse"):
        raw = sample(kind, 600_001)
        data = lossless.encode(raw, "zstd")
        frame = stream.parse_frame(data, len(data), raw_bytes=len(raw), name="x")
        lengths = stream.parse_table(frame, data[stream.HEADER_BYTES : frame.payload_at], len(data), name="x")
        ends = [frame.payload_at + sum(lengths[:k]) for k in range(len(lengths) + 1)]
        chunks = [data[begin:end] for begin, end in pairwise(ends)]
        assert b"".join(zstandard.ZstdDecompressor().decompress(chunk) for chunk in chunks) == raw
        for index, chunk in enumerate(chunks):
            piece = raw[index * zstd.CHUNK_BYTES :][: zstd.CHUNK_BYTES]
            plain = min(len(zstandard.ZstdCompressor(level=level).compress(piece)) for level in (1, 3, 9))
            assert len(chunk) <= plain + 8


def test_zstd_stream_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = sample("symbols", 600_001)
    many = lossless.encode(raw, "zstd")
    monkeypatch.setattr(zstd, "_MAX_THREADS", 1)
    assert lossless.encode(raw, "zstd") == many
    assert lossless.decode(many, raw_bytes=len(raw)) == raw


@pytest.mark.parametrize("codec", lossless.CODECS)
def test_random_damage_to_a_large_stream_is_detected(codec: str) -> None:
    need(codec)
    raw = sample("symbols", 300_000)
    coded = lossless.encode(raw, codec)
    rng = random.Random(1)
    for _ in range(40):
        damaged = bytearray(coded)
        damaged[rng.randrange(len(coded))] ^= 1 << rng.randrange(8)
        with pytest.raises(IntegrityError):
            lossless.decode(damaged, raw_bytes=len(raw))


def test_unknown_names_are_usage_errors() -> None:
    with pytest.raises(InputError, match="unknown lossless codec 'lz4'; choose one of none, zstd, gdeflate, ans"):
        lossless.encode(b"", "lz4")
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        lossless.coder("zstd", device="tpu")


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpu: str | None, cpu: str | None) -> None:
    monkeypatch.setattr(nvcomp, "problem", lambda: gpu)
    monkeypatch.setattr(gdeflate_cpu, "problem", lambda: cpu)


@pytest.mark.parametrize("encode", [True, False])
def test_backend_choice(monkeypatch: pytest.MonkeyPatch, encode: bool) -> None:
    def chosen(codec: str, device: str) -> str | None:
        try:
            return lossless.coder(codec, encode=encode, device=device).name
        except BackendError:
            return None

    child = "GDeflate (libnvcomp, CPU child process)"
    for device in lossless.DEVICES:
        assert chosen("none", device) == "stored (CPU)"
        assert chosen("zstd", device) == "zstd (CPU)"
    assert lossless.coder("zstd", encode=encode).name == "zstd (CPU)"
    pretend(monkeypatch, gpu=None, cpu=None)
    assert [chosen("gdeflate", device) for device in ("auto", "cpu", "cuda")] == [
        "GDeflate (nvCOMP, GPU)", child, "GDeflate (nvCOMP, GPU)",
    ]  # fmt: skip
    assert [chosen("ans", device) for device in ("auto", "cpu", "cuda")] == [
        "ANS (nvCOMP, GPU)", None, "ANS (nvCOMP, GPU)",
    ]  # fmt: skip
    pretend(monkeypatch, gpu="no GPU", cpu=None)
    assert [chosen("gdeflate", device) for device in ("auto", "cpu", "cuda")] == [child, child, None]
    assert [chosen("ans", device) for device in ("auto", "cpu", "cuda")] == [None, None, None]
    pretend(monkeypatch, gpu="no GPU", cpu="no library")
    assert [chosen("gdeflate", device) for device in ("auto", "cpu", "cuda")] == [None, None, None]


@pytest.mark.parametrize("codec", ["gdeflate", "ans"])
def test_a_machine_that_cannot_says_why_and_the_way_out(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    pretend(monkeypatch, gpu="no usable NVIDIA GPU", cpu="the library is missing")
    with pytest.raises(BackendError, match=f"cannot code {codec} here: no usable NVIDIA GPU.*use lossless zstd") as e:
        lossless.encode(b"abc", codec)
    assert "\n" not in str(e.value)
    with pytest.raises(BackendError, match=f"compress again with lossless zstd.*{re.escape(install_hint('gpu'))}"):
        assert lossless.coder(codec, encode=False).name
    with pytest.raises(BackendError, match=f"cannot code {codec} here"):
        lossless.coder(codec)


def test_a_coder_looks_for_its_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    real = coding.resolve
    monkeypatch.setattr(
        coding, "resolve", lambda codec, **options: looks.append(options["device"]) or real(codec, **options)
    )
    coder = lossless.coder("zstd", device="cpu")
    assert looks == ["cpu"]
    reader = lossless.coder("zstd", encode=False)
    assert looks == ["cpu"]  # nothing is decoded yet
    for size in (0, 1000, 1_000_000):
        raw = sample("symbols", size)
        data = coder.encode(raw)
        assert coder.decode(data, raw_bytes=size) == reader.decode(data, raw_bytes=size) == raw
    assert (coder.name, reader.name) == ("zstd (CPU)", "zstd (CPU)")
    assert looks == ["cpu", "auto"]


def test_damage_is_told_before_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu="no usable NVIDIA GPU", cpu="the library is missing")
    data = stream.pack("ans", memoryview(bytes(100)), 1 << 18, [b"coded"])
    reader = lossless.coder("ans", encode=False)
    with pytest.raises(BackendError, match=r"^part: cannot decode ans here: no usable NVIDIA GPU"):
        reader.decode(data, raw_bytes=100, name="part")
    data[-1] ^= 1
    with pytest.raises(ChecksumError, match=r"^part: coded bytes differ"):
        reader.decode(data, raw_bytes=100, name="part")
    with pytest.raises(FormatError, match=r"^part: coded with ans, the manifest says zstd"):
        lossless.coder("zstd", encode=False).decode(data, raw_bytes=100, name="part")


def test_importing_the_room_stays_light() -> None:
    code = (
        "import sys, deltacompress.lossless\n"
        "sys.exit(', '.join({'torch', 'numpy', 'zstandard', 'nvidia'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
