"""A codec and what runs it here, as one value: resolved where work begins and handed to whoever codes or decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from deltacompress.lossless import stream
from deltacompress.lossless.backends import ChunkCoder, resolve
from deltacompress.lossless.windows import Read, Windows

_AT_A_TIME = 1 << 28
"""Raw bytes whose coded chunks are in memory twice: as they come, and in the stream."""

BytesLike = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview may have any shape and item size, its raw bytes count."""


@dataclass(frozen=True, slots=True)
class Coder:
    """One codec on one machine; make it with `coder`."""

    codec: str
    _backend: Callable[[], ChunkCoder]

    @property
    def name(self) -> str:
        """What runs the codec here, in words: "zstd (CPU)", "GDeflate (nvCOMP, GPU)", ... Raises as `coder`."""
        return self._backend().name

    def encode(self, raw: BytesLike) -> bytearray:
        """Code bytes as one framed stream.

        Raises:
            BackendError: running the codec failed.
        """
        view = flat(raw)
        return stream.pack(self.codec, view, self._backend().chunk_bytes, self._chunks(view))

    def coded_bytes(self, raw: BytesLike) -> int:
        """The length of what `encode` gives, without putting that together or computing digests; raises as it does."""
        return stream.packed_bytes([len(chunk) for chunk in self._chunks(flat(raw))])

    def _chunks(self, view: memoryview) -> Iterator[bytes]:
        backend = self._backend()
        step = max(_AT_A_TIME // backend.chunk_bytes, 1) * backend.chunk_bytes
        for begin in range(0, view.nbytes, step):
            part = view[begin : begin + step]
            yield from backend.encode(part, stream.chunk_sizes(part.nbytes, backend.chunk_bytes))

    def decode(self, data: BytesLike, *, raw_bytes: int, name: str = "lossless stream") -> bytearray:
        """Decode one framed stream, bit-exactly.

        raw_bytes: the length that the manifest promised. Nothing is allocated before the whole stream matched its
        digest and its declared length this one; then one buffer of that length is, plus at most one chunk for each
        thread. name: how error messages call the stream. `windows` decodes without such a buffer.

        Raises:
            TruncatedFileError: too short or too long.
            SchemaVersionError: written by a newer version of the format.
            FormatError: impossible framing, another codec or raw length, or a payload that does not decode.
            ChecksumError: bytes differ, before or after decoding.
            BackendError: this machine cannot run the codec; raised only for a stream that is intact.
        """
        view = flat(data)

        def read(offset: int, length: int) -> memoryview:
            return view[offset : offset + length]

        return self.windows(read, view.nbytes, raw_bytes=raw_bytes, name=name, scale=16).read_all()

    def windows(
        self,
        read: Read,
        coded_bytes: int,
        *,
        raw_bytes: int,
        name: str = "lossless stream",
        keep: int = 1,
        scale: int = 1,
    ) -> Windows:
        """A stream that is decoded window by window; takes and raises what `windows.Windows` does."""
        return Windows(
            read,
            coded_bytes,
            raw_bytes=raw_bytes,
            codec=self.codec,
            decode=lambda chunks, views: self._backend().decode(chunks, views),
            name=name,
            keep=keep,
            scale=scale,
        )


def coder(codec: str, *, device: str = "auto", encode: bool = True) -> Coder:
    """A codec with what runs it here, which is looked for once.

    codec: one of CODECS. device: "auto" (a GPU where the codec can use one), "cpu" or "cuda"; `none` and `zstd` run on
    the CPU whatever it is. encode: whether something is to be coded. Then what cannot run here is told at once; where
    streams are only decoded, with the first that is intact, since a damaged one is worth knowing about on any machine.

    Raises:
        InputError: no such codec or device.
        BackendError: this machine cannot run the codec; the message says why and the way out.
    """
    look = cache(partial(resolve, codec, encode=encode, device=device))
    if encode:
        look()
    return Coder(codec, look)


def flat(data: BytesLike) -> memoryview:
    """The bytes as they lie in memory, one after another."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast
