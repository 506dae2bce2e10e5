"""Codecs `gdeflate` and `ans` on an NVIDIA GPU, through nvCOMP's Python codec (nvidia-nvcomp 6).

Every chunk is one RAW bitstream: nvCOMP's own framing would hide the chunks, and RAW GDeflate pages are what its CPU
routine reads and writes too. The chunk table of our stream carries what the native framing would.

Importing nvCOMP works without a GPU; constructing a codec does not, so that is the probe.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from deltacompress.errors import BackendError, FormatError, option

ALGORITHMS = {"gdeflate": "GDeflate", "ans": "ANS"}
_BATCH_BYTES = 1 << 28  # raw bytes on the GPU at once, so that a large tensor does not need its size there twice
_ONE_AT_A_TIME = threading.Lock()
"""Tensors are coded by several threads; each batch takes memory of the GPU that torch does not know of."""
_ALIGN = 16  # bytes; the most that any nvCOMP algorithm asks for


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Why nvCOMP cannot run here, or None if it can. Creates a CUDA context where it can."""
    try:
        nvcomp: Any = importlib.import_module("nvidia.nvcomp")
    except ImportError:
        return "nvCOMP is not installed"
    try:
        nvcomp.Codec(algorithm="ANS")
    except RuntimeError as error:
        return f"no usable NVIDIA GPU ({error})"
    return None


def encode_chunks(codec: str, raw: memoryview, sizes: Sequence[int]) -> list[bytes]:
    """Code each chunk as one RAW bitstream. raw: flat bytes; sizes: raw bytes of each chunk, in order.

    Raises:
        BackendError: nvCOMP or the GPU failed (out of memory, ...).
    """
    coded: list[bytes] = []
    at = 0
    for batch in _batches(sizes):
        lengths = [sizes[index] for index in batch]
        packed, starts = _lay_out(lengths)
        for length, start in zip(lengths, starts, strict=True):
            packed[start : start + length] = np.frombuffer(raw[at : at + length], np.uint8)
            at += length
        try:
            with _ONE_AT_A_TIME:
                nvcomp, worker = _codec(codec, max(lengths))
                device = nvcomp.as_array(packed).cuda()
                result = worker.encode(nvcomp.as_arrays(device, starts, lengths)).cpu()
                coded += [np.asarray(result[index]).tobytes() for index in range(len(lengths))]
        except RuntimeError as error:
            raise BackendError(
                f"nvCOMP failed while compressing with {codec} ({error})",
                way_out=f"compress again with {option('lossless')} zstd",
            ) from error
    return coded


def decode_chunks(codec: str, chunks: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    """Decode each RAW bitstream into its writable view. Call only after the coded digest matched.

    The output is allocated here, with the size that the manifest promised, before nvCOMP reads a bitstream.

    Raises:
        FormatError: a bitstream that wants more room than its chunk has.
        BackendError: nvCOMP or the GPU failed.
    """
    for batch in _batches([view.nbytes for view in out]):
        lengths = [chunks[index].nbytes for index in batch]
        room = [out[index].nbytes for index in batch]
        packed, starts = _lay_out(lengths)
        for index, start in zip(batch, starts, strict=True):
            packed[start : start + chunks[index].nbytes] = np.frombuffer(chunks[index], np.uint8)
        blank, blank_starts = _lay_out(room)
        try:
            nvcomp, worker = _codec(codec, max(room))
            source, target = nvcomp.as_array(packed).cuda(), nvcomp.as_array(blank).cuda()
            targets = nvcomp.as_arrays(target, blank_starts, room)
            result = worker.decode(nvcomp.as_arrays(source, starts, lengths), out=targets).cpu()
            for place, index in enumerate(batch):
                decoded = np.asarray(result[place]).view(np.uint8)
                if decoded.nbytes != room[place]:
                    raise FormatError(f"{codec} chunk {index} decoded to {decoded.nbytes} bytes, not {room[place]}")
                np.frombuffer(out[index], np.uint8)[:] = decoded
        except ValueError as error:
            raise FormatError(f"{codec} chunks {batch[0]} to {batch[-1]} do not fit their raw size: {error}") from error
        except RuntimeError as error:
            raise BackendError(
                f"nvCOMP failed while decoding {codec} though the checksum matches ({error})",
                way_out=f"try another GPU, or compress again with {option('lossless')} zstd",
            ) from error


def _codec(codec: str, chunk_bytes: int) -> tuple[Any, Any]:
    nvcomp: Any = importlib.import_module("nvidia.nvcomp")
    return nvcomp, nvcomp.Codec(
        algorithm=ALGORITHMS[codec],
        bitstream_kind=nvcomp.BitstreamKind.RAW,
        uncomp_chunk_size=-(-chunk_bytes // _ALIGN) * _ALIGN,
    )


def _batches(sizes: Sequence[int]) -> Iterator[range]:
    """Ranges of neighbouring chunks, each of at most _BATCH_BYTES raw bytes (at least one chunk)."""
    first = 0
    total = 0
    for index, size in enumerate(sizes):
        if total + size > _BATCH_BYTES and index > first:
            yield range(first, index)
            first, total = index, 0
        total += size
    if first < len(sizes):
        yield range(first, len(sizes))


def _lay_out(sizes: Sequence[int]) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], list[int]]:
    """A zeroed host buffer for pieces of these sizes, and where each begins: aligned as nvCOMP asks."""
    starts = []
    at = 0
    for size in sizes:
        starts.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return np.zeros(max(at, _ALIGN), np.uint8), starts
