"""A framed stream that lies in a file, decoded window by window: memory holds a few, however long the stream is.

What `Coder.decode` checks at once is checked in the same order: the framing and the digest of the coded bytes before a
decoder runs, the digest of the raw bytes when all of them have passed (`check_raw`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate

from deltacompress.errors import BackendError, FormatError
from deltacompress.lossless import stream

Read = Callable[[int, int], bytes | memoryview]
"""(offset, length) -> exactly so many bytes of the coded stream."""
Decode = Callable[[Sequence[memoryview], Sequence[memoryview]], None]
"""(coded chunks, one writable view for each): decodes into them."""

WINDOW_BYTES = {"none": 1 << 22, "zstd": 1 << 22, "gdeflate": 1 << 26, "ans": 1 << 26}
"""Raw bytes that are decoded at once. A GPU, or the child process that GDeflate takes, is worth its start for many."""
_CHUNK = 1 << 22


class Windows:
    """The raw bytes of one stream."""

    def __init__(
        self,
        read: Read,
        coded_bytes: int,
        *,
        raw_bytes: int,
        codec: str,
        decode: Decode,
        name: str,
        keep: int,
        scale: int,
    ) -> None:
        """Check the framing and the digest of the coded bytes, which are read once for it.

        read: of the coded stream; raw_bytes, codec: what the manifest promised; decode: chunks of that codec; name: how
        error messages call the stream; keep: windows in memory, as many as there are places that are read in turn;
        scale: windows so much larger.

        Raises:
            IntegrityError: as `Coder.decode`.
        """
        self._read, self._decode_chunks, self._name, self._keep = read, decode, name, keep
        head = read(0, min(coded_bytes, stream.HEADER_BYTES))
        self.frame = stream.parse_frame(head, coded_bytes, raw_bytes=raw_bytes, name=name)
        if codec != self.frame.codec:
            raise FormatError(
                f"coded with {self.frame.codec}, the manifest says {codec}",
                where=name,
                way_out="copy the artifact again",
            )
        table = read(stream.HEADER_BYTES, 4 * self.frame.count)
        lengths = stream.parse_table(self.frame, table, coded_bytes, name=name)
        self._check_coded(coded_bytes)
        self._starts = array("Q", accumulate(lengths, initial=self.frame.payload_at))
        self._chunks = max(scale * WINDOW_BYTES[self.frame.codec] // self.frame.chunk_bytes, 1)  # of each window
        self._window_bytes = self._chunks * self.frame.chunk_bytes
        self._known: OrderedDict[int, bytearray] = OrderedDict()
        self._seen, self._next = hashlib.sha256(), 0  # of the windows before it

    def read(self, begin: int, end: int) -> bytearray:
        """Raw bytes [begin, end).

        Raises:
            FormatError, BackendError: as `Coder.decode`.
        """
        out = bytearray()
        while begin < end:
            index, at = divmod(begin, self._window_bytes)
            piece = self._window(index)[at : at + end - begin]
            out += piece
            begin += len(piece)
        return out

    def read_all(self) -> bytearray:
        """All raw bytes, their digest compared; raises as `check_raw`."""
        raw = bytearray(self.frame.raw_bytes)
        for index, begin in enumerate(range(0, len(raw), self._window_bytes)):
            self._decode(index, memoryview(raw)[begin : begin + self._window_bytes])
        if stream.digest(raw) != self.frame.raw_digest:
            raise stream.wrong(self.frame.codec, self._name)
        return raw

    def check_raw(self) -> None:
        """Decode what has not been yet, in order, and compare the digest of all.

        Raises:
            ChecksumError: they differ.
            FormatError, BackendError: as `Coder.decode`.
        """
        while self._next * self._window_bytes < self.frame.raw_bytes:
            self._window(self._next)
        if self._seen.digest()[: stream.DIGEST_BYTES] != self.frame.raw_digest:
            raise stream.wrong(self.frame.codec, self._name)

    def _check_coded(self, coded_bytes: int) -> None:
        seen = hashlib.sha256(self._read(0, stream.DIGEST_AT))
        for at in range(stream.HEADER_BYTES, coded_bytes, _CHUNK):
            seen.update(self._read(at, min(_CHUNK, coded_bytes - at)))
        if seen.digest()[: stream.DIGEST_BYTES] != self.frame.coded_digest:
            raise stream.damaged(self._name)

    def _window(self, index: int) -> bytearray:
        if index in self._known:
            self._known.move_to_end(index)
            return self._known[index]
        while len(self._known) >= self._keep:
            self._known.popitem(last=False)
        raw = bytearray(min(self._window_bytes, self.frame.raw_bytes - index * self._window_bytes))
        self._decode(index, memoryview(raw))
        self._known[index] = raw
        if index == self._next:
            self._seen.update(raw)
            self._next += 1
        return raw

    def _decode(self, index: int, raw: memoryview) -> None:
        """Decode one window into `raw`, which has its size."""
        first = index * self._chunks
        last = min(first + self._chunks, self.frame.count)
        coded = memoryview(self._read(self._starts[first], self._starts[last] - self._starts[first]))
        chunks, views, size = [], [], self.frame.chunk_bytes
        for k in range(first, last):
            chunks.append(coded[self._starts[k] - self._starts[first] : self._starts[k + 1] - self._starts[first]])
            views.append(raw[(k - first) * size : (k - first + 1) * size])
        try:
            self._decode_chunks(chunks, views)
        except (FormatError, BackendError) as error:
            place = f"from byte {index * self._window_bytes} on: " if index else ""
            raise error.retold(type(error), within=self._name, what=f"{place}{error.what}") from error
