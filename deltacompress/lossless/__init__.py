"""The lossless stage: bytes of a packed tensor to a framed, checksummed stream and back.

Four codecs behind two functions. `none` stores, `zstd` is portable and the default, `gdeflate` and `ans` are nvCOMP's.
The frame (stream.py), the choice of what runs a codec (backends.py) and the codecs themselves know nothing of each
other's insides; this page is the order in which they are called. Nothing heavier than the standard library is
imported until a codec is used. Layout and measurements: docs/lossless.md; design: the paper's lossless step
(DeltaZip section 4.2).
"""

from __future__ import annotations

from deltacompress.errors import BackendError, FormatError
from deltacompress.lossless import stream as _stream
from deltacompress.lossless.backends import CODECS, DEVICES, resolve

__all__ = ["CODECS", "DEVICES", "BytesLike", "backend_for", "check_available", "decode", "encode", "stream_codec"]

BytesLike = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview may have any shape and item size, its raw bytes count."""


def encode(raw: BytesLike, codec: str, *, device: str = "auto") -> bytes:
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
    sizes = _stream.chunk_sizes(view.nbytes, backend.chunk_bytes)
    return _stream.pack(codec, view, backend.chunk_bytes, backend.encode(view, sizes))


def decode(data: BytesLike, *, raw_bytes: int, device: str = "auto", name: str = "lossless stream") -> bytearray:
    """Decode one framed stream, bit-exactly.

    raw_bytes: the length that the manifest promised. Nothing is allocated before the whole stream matched its digest
    and its declared length this one; then one buffer of that length is, plus at most one chunk for each thread.
    device: as in `encode`; the codec is the stream's own. name: how error messages call the stream.

    Raises:
        TruncatedFileError: too short or too long.
        SchemaVersionError: written by a newer version of the format.
        FormatError: impossible framing, another raw length, or a payload that does not decode.
        ChecksumError: bytes differ, before or after decoding.
        BackendError: this machine cannot run the codec; raised only for a stream that is intact.
    """
    stream = _stream.parse(_flat(data), raw_bytes=raw_bytes, name=name)
    raw = bytearray(raw_bytes)
    views = []
    at = 0
    whole = memoryview(raw)
    for size in stream.sizes():
        views.append(whole[at : at + size])
        at += size
    try:
        resolve(stream.codec, encode=False, device=device).decode(stream.chunks, views)
    except (FormatError, BackendError) as error:
        raise type(error)(f"{name}: {error}") from error
    _stream.check_raw(stream, raw, name=name)
    return raw


def stream_codec(data: BytesLike, *, raw_bytes: int, name: str = "lossless stream") -> str:
    """Check a stream without decoding it (framing, length, digest of the coded bytes) and return its codec.

    Needs no backend, so any machine can verify any artifact. Raises as `decode` does, never BackendError.
    """
    return _stream.parse(_flat(data), raw_bytes=raw_bytes, name=name).codec


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
