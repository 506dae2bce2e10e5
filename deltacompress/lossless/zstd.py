"""Codec `zstd`: independent standard frames, one per chunk, on the CPU; any zstd decoder reads them.

What was measured on packed 2:4 symbols (docs/lossless.md has the table): where symbols carry 4 bits or more there is
nothing to match, level 1 codes them as small as any level (it leaves literals to Huffman, deeper searches spend bits
on matches that are not worth it) and runs at 800 MB/s. Where most symbols are zero, level 9 is 8 to 13 % smaller. So
every chunk is coded at both levels and the smaller frame is kept: a rule without a knob, a function of the chunk alone.

Chunks of 256 KiB: zstd builds a Huffman table per 128 KiB block anyway, and small chunks are what lets threads here,
or a GPU elsewhere, work side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import zstandard

from deltacompress.errors import FormatError

CHUNK_BYTES = 1 << 18
LEVELS = (1, 9)
_MAX_THREADS = 16


def encode_chunks(raw: memoryview, sizes: Sequence[int]) -> list[bytes]:
    """Code each chunk as one frame that declares its content size. raw: flat bytes; sizes: raw bytes of each chunk."""
    starts = _starts(sizes)
    frames = [b""] * len(sizes)

    def work(indices: range) -> None:
        compressors = [zstandard.ZstdCompressor(compression_params=_parameters(level)) for level in LEVELS]
        for index in indices:
            chunk = raw[starts[index] : starts[index] + sizes[index]]
            frames[index] = min((compressor.compress(chunk) for compressor in compressors), key=len)

    _side_by_side(work, len(sizes))
    return frames


def decode_chunks(chunks: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    """Decode each frame into its writable view.

    A frame that declares its size is decoded into a buffer of that size, which `max_output_size` does not limit:
    the declared size is compared with the view first, and then it is the limit. Of such a frame the buffer is the
    window too, so a window that it declares costs nothing.

    Raises:
        FormatError: a frame that declares another size than its chunk, does not decode, or is followed by more bytes.
    """

    def work(indices: range) -> None:
        decompressor = zstandard.ZstdDecompressor()
        for index in indices:
            frame, view = chunks[index], out[index]
            try:
                declared = zstandard.get_frame_parameters(frame).content_size
                if declared != view.nbytes:
                    raise FormatError(f"zstd frame {index} declares {declared} bytes where {view.nbytes} belong")
                view[:] = decompressor.decompress(frame, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise FormatError(f"zstd frame {index} does not decode: {error}") from error

    _side_by_side(work, len(chunks))


def _parameters(level: int) -> zstandard.ZstdCompressionParameters:
    """Parameters of a level as zstd has them for large inputs.

    A plain `level=1` takes other ones for inputs of a chunk's size, which look for shorter matches: made for text, and
    0.2 % larger on symbols.
    """
    return zstandard.ZstdCompressionParameters.from_level(
        level, write_content_size=1, write_checksum=0, write_dict_id=0
    )


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = []
    at = 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts


def _side_by_side(work: Callable[[range], None], count: int) -> None:
    """Share `count` chunks among threads (zstandard releases the GIL). The result does not depend on their number."""
    threads = min(os.cpu_count() or 1, _MAX_THREADS, count)
    if threads <= 1:
        work(range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, range(first, count, threads)) for first in range(threads)]:
            done.result()
