"""The lossless stage: bytes of a packed tensor to a framed, checksummed stream and back.

Four codecs behind two functions. `none` stores, `zstd` is portable and the default, `gdeflate` and `ans` are nvCOMP's.
The frame (stream.py), the choice of what runs a codec (backends.py) and the codecs themselves know nothing of each
other's insides; this page is the order in which they are called. Nothing heavier than the standard library is
imported until a codec is used. Layout and measurements: docs/lossless.md; design: the paper's lossless step
(DeltaZip section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from deltacompress.lossless import stream as _stream
from deltacompress.lossless.backends import CODECS, DEVICES, resolve
from deltacompress.lossless.windows import Windows

__all__ = ["CODECS", "DEVICES", "BytesLike", "backend_for", "check_available", "decode", "encode"]

_AT_A_TIME = 1 << 28
"""Raw bytes whose coded chunks are in memory twice: as they come, and in the stream."""

BytesLike = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview may have any shape and item size, its raw bytes count."""


def encode(raw: BytesLike, codec: str, *, device: str = "auto") -> bytearray:
    """Code bytes as one framed stream.

    codec: one of CODECS. device: "auto" (a GPU where the codec can use one), "cpu" or "cuda"; `none` and `zstd` run on
    the CPU whatever it is. `none`, `zstd` and GDeflate on a CPU give the same stream for the same bytes and library
    version; nvCOMP's encoders on a GPU do not promise that, only that the stream decodes to the same bytes.

    Raises:
        InputError: no such codec or device.
        BackendError: this machine cannot run the codec, or running it failed.
    """
    view = _flat(raw)
    backend = resolve(codec, encode=True, device=device)
    step = max(_AT_A_TIME // backend.chunk_bytes, 1) * backend.chunk_bytes

    def chunks() -> Iterator[bytes]:
        for begin in range(0, view.nbytes, step):
            part = view[begin : begin + step]
            yield from backend.encode(part, _stream.chunk_sizes(part.nbytes, backend.chunk_bytes))

    return _stream.pack(codec, view, backend.chunk_bytes, chunks())


def decode(
    data: BytesLike,
    *,
    raw_bytes: int,
    codec: str | None = None,
    device: str = "auto",
    name: str = "lossless stream",
) -> bytearray:
    """Decode one framed stream, bit-exactly.

    raw_bytes: the length that the manifest promised. Nothing is allocated before the whole stream matched its digest
    and its declared length this one; then one buffer of that length is, plus at most one chunk for each thread.
    codec: the one that was promised; None: whichever it is. device: as in `encode`. name: how error messages call the
    stream. `windows.Windows` decodes what lies in a file without such a buffer.

    Raises:
        TruncatedFileError: too short or too long.
        SchemaVersionError: written by a newer version of the format.
        FormatError: impossible framing, another raw length, or a payload that does not decode.
        ChecksumError: bytes differ, before or after decoding.
        BackendError: this machine cannot run the codec; raised only for a stream that is intact.
    """
    view = _flat(data)

    def read(offset: int, length: int) -> memoryview:
        return view[offset : offset + length]

    windows = Windows(read, view.nbytes, raw_bytes=raw_bytes, codec=codec, device=device, name=name, scale=16)
    return windows.read_all()


def check_available(codec: str, *, encode: bool, device: str = "auto") -> None:
    """Find out before the work begins whether this machine can run a codec.

    Raises:
        InputError: no such codec or device.
        BackendError: it cannot; the message says why and the way out.
    """
    resolve(codec, encode=encode, device=device)


def backend_for(codec: str, *, encode: bool, device: str = "auto") -> str:
    """What `encode` or `decode` would run here, in words: "zstd (CPU)", "GDeflate (nvCOMP, GPU)", ... Raises alike."""
    return resolve(codec, encode=encode, device=device).name


def _flat(data: BytesLike) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast
