"""From the files of an artifact to the GPU as fast as the bus allows: parts that are stored plainly.

Threads read into pinned buffers (from the page cache, mostly), each buffer is copied at once, and from the raw copy of
a piece, which is dropped right after, the device compares the hashes and makes the kernel layout. So what a load needs
is some buffers on the host and a raw piece on the device (or the largest tensor), however large the variant is, and the
page cache serves as the second tier: variants that left come back the same way. Reads and copies are large, and the
threads do nothing but read (reading.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import torch
from blake3 import blake3

from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.kernels import Backend
from deltacompress.kernels.ingest import Ingest
from deltacompress.runtime.loading import arrangement
from deltacompress.runtime.loading.arrangement import HostCopy, Piece, Read
from deltacompress.runtime.loading.assembly import Assembly, damaged
from deltacompress.runtime.loading.reading import Files, PendingReads, Reading
from deltacompress.runtime.operands.embedding_rows import PackedRows
from deltacompress.runtime.operands.packed_delta import PackedDelta
from deltacompress.runtime.operands.stored import Stored, StoredPart

THREADS = 16
BUFFERS = 3
"""One is copied while the others are read."""


class _Buffer:
    """Pinned bytes, and the copy that last used them."""

    def __init__(self) -> None:
        self.tensor = torch.empty(arrangement.BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.view = tensor_bytes(self.tensor)
        self.copied = torch.cuda.Event()


class Loader:
    """Brings stored parts to one GPU, one load at a time; made once, its buffers at first use."""

    def __init__(self, kernels: Backend, ingest: Ingest, stream: torch.cuda.Stream) -> None:
        """ingest: of these kernels; stream: on which copies and packing run."""
        self._kernels, self._ingest, self._stream = kernels, ingest, stream
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "deltacompress-load")
        self._buffers: list[_Buffer] = []

    def load(self, stored: Mapping[str, Stored], *, verify: bool) -> dict[str, PackedDelta | PackedRows]:
        """Operands on the device, as ready as the stream is; waits until every byte was read and checked.

        verify: compare every part with its recorded hash.

        Raises:
            IntegrityError: a file is shorter than it was, a part differs from its hash, or its content is impossible.
            CheckpointError: the system does not read a file.
        """
        if not self._buffers:
            self._buffers = [_Buffer() for _ in range(BUFFERS)]
        pieces: list[Piece] = []

        def transfers() -> Iterator[HostCopy]:
            for piece in arrangement.pieces(stored):
                pieces.append(piece)
                yield from piece.transfers()

        rest: Iterator[tuple[HostCopy, _Buffer]] = zip(transfers(), cycle(self._buffers), strict=False)
        under_way: deque[tuple[HostCopy, _Buffer, PendingReads]] = deque()
        with (
            Reading(_files(stored), self._pool, self._threads) as reading,
            torch.cuda.device(self._kernels.device),
            torch.cuda.stream(self._stream),
        ):

            def start() -> None:
                for transfer, buffer in islice(rest, 1):
                    buffer.copied.synchronize()
                    under_way.append((transfer, buffer, reading.start(transfer.reads, buffer.view)))

            for _ in range(BUFFERS - 1):
                start()
            rest = iter(list(rest))  # the other pieces are arranged while the first are read
            assembly = Assembly(self._kernels, self._ingest, pieces, verify=verify)
            for piece in pieces:
                raw = torch.empty(piece.size, dtype=torch.uint8, device=self._kernels.device)
                for _ in piece.transfers():
                    transfer, buffer, batch = under_way.popleft()
                    batch.wait()
                    into = raw[transfer.begin : transfer.begin + transfer.nbytes]
                    into.copy_(buffer.tensor[: transfer.nbytes], non_blocking=True)
                    buffer.copied.record(self._stream)
                    start()
                assembly.add(raw)
                raw = into = None  # type: ignore[assignment]  # the next piece takes its memory
            return assembly.finish()


def _files(stored: Mapping[str, Stored]) -> Files:
    return Files({part.file for one in stored.values() for part in one.parts.values()})


def check_stored(stored: Mapping[str, Stored]) -> None:
    """Compare the parts with their hashes without loading them; raises as Loader.load."""
    files = _files(stored)

    def check(named: tuple[str, StoredPart]) -> None:
        name, part = named
        digest, raw = blake3(), memoryview(bytearray(min(part.nbytes, arrangement.READ_BYTES)))
        for at in range(0, part.nbytes, arrangement.READ_BYTES):
            size = min(arrangement.READ_BYTES, part.nbytes - at)
            files.read(Read(part.file, part.begin + at, 0, size), raw)
            digest.update(raw[:size])
        if digest.hexdigest() != part.blake3:
            raise damaged(name, part)

    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            parts = ((f"{one.name}.{name}", part) for one in stored.values() for name, part in one.parts.items())
            list(pool.map(check, parts))
    finally:
        files.close()
