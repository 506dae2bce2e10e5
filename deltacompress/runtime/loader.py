"""From the files of an artifact to the GPU as fast as the bus allows: parts that are stored plainly.

Threads read neighbouring parts straight into pinned blocks (from the page cache, mostly), hash them there while they
are warm, and queue their copies on the copy stream; the kernel layout is made on the device, from a raw copy of a piece
of the file that is dropped right after. A block is used again when its copy is done. So what a load needs is the ring
on the host and a few raw pieces on the device, however large the variant is, and the page cache serves as the second
tier: variants that left come back the same way. Pieces are large, because what Python does for each of them is not.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from deltacompress.checkpoint import tensor_bytes
from deltacompress.errors import ChecksumError, FormatError, TruncatedFileError
from deltacompress.kernels import Backend
from deltacompress.kernels.tiling import BAD_SCALE, FAULTS
from deltacompress.runtime.operands import Packed, PackedRows, Stored, StoredPart

BLOCK_BYTES = 16 << 20
"""Of a pinned block: of one read and one copy."""
PIECE_BYTES = 128 << 20
"""Of a raw piece on the device."""
GAP_BYTES = 1 << 16
"""What lies between two parts is read along, if it is no more."""
THREADS = 16
_ALIGN = 256


class _Block:
    """Pinned bytes, and the copy that last used them."""

    def __init__(self) -> None:
        self.tensor = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.view = tensor_bytes(self.tensor)
        self.copied = torch.cuda.Event()


@dataclass(slots=True)
class _Run:
    """Neighbouring parts of one file, as one thread reads them. at: where they start in the raw piece."""

    parts: list[StoredPart]
    at: int

    @property
    def begin(self) -> int:
        return self.parts[0].begin

    @property
    def end(self) -> int:
        return self.parts[-1].begin + self.parts[-1].nbytes


@dataclass(slots=True)
class _Piece:
    """Tensors that are loaded together. places: by (file, begin) of a part, where it starts in the raw piece."""

    members: list[tuple[str, Stored]]
    runs: list[_Run] = field(default_factory=list)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    size: int = 0

    def arrange(self) -> None:
        """Lay out the parts of its members as they lie in their files."""
        parts = sorted((part for _, one in self.members for part in one.parts.values()), key=_place)
        for part in parts:
            run = self.runs[-1] if self.runs else None
            joins = run is not None and run.parts[-1].file == part.file and part.begin - run.end <= GAP_BYTES
            if run is not None and joins and part.begin + part.nbytes - run.begin <= BLOCK_BYTES:
                run.parts.append(part)
            else:
                # as aligned as in the file
                run = _Run([part], self.size + -self.size % _ALIGN + part.begin % _ALIGN)
                self.runs.append(run)
            at = run.at + part.begin - run.begin
            self.places[_place(part)], self.size = at, at + part.nbytes


class Loader:
    """Brings stored parts to one GPU; made once, its blocks at first use."""

    def __init__(self, kernels: Backend, stream: torch.cuda.Stream) -> None:
        """stream: on which copies and packing run."""
        self._kernels, self._stream = kernels, stream
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "deltacompress-load")
        self._free: SimpleQueue[_Block] = SimpleQueue()
        self._made = False

    def load(self, stored: Mapping[str, Stored], *, verify: bool) -> dict[str, Packed | PackedRows]:
        """Operands on the device, as ready as the stream is; waits until every byte was read and checked.

        verify: compare every part with its recorded hash.

        Raises:
            IntegrityError: a file is shorter than it was, a part differs from its hash, or its content is impossible.
        """
        if not self._made:
            self._made = True
            for _ in range(3 * self._threads // 2):
                self._free.put(_Block())
        device, pieces = self._kernels.device, list(_pieces(stored))
        order = [member for piece in pieces for member in piece.members]
        sizes = [-(-self._kernels.nbytes(one.spec) // _ALIGN) * _ALIGN if one.dtype is None else 0 for _, one in order]
        files = _Files({part.file for one in stored.values() for part in one.parts.values()})
        waiting: deque[tuple[_Piece, Tensor, list[Future[None]]]] = deque()
        made: dict[str, Packed | PackedRows] = {}
        try:
            with torch.cuda.device(device), torch.cuda.stream(self._stream):
                # one allocation: hundreds would take longer than the copies
                buffers = iter(torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes))
                faults = torch.zeros(len(order), dtype=torch.int32, device=device)
                for piece in pieces:
                    raw = torch.empty(piece.size, dtype=torch.uint8, device=device)
                    jobs = [self._pool.submit(self._read, run, raw, files, verify) for run in piece.runs]
                    waiting.append((piece, raw, jobs))
                    if len(waiting) > 2:  # two pieces are read while one is packed
                        self._finish(*waiting.popleft(), buffers, faults, made)
                while waiting:
                    self._finish(*waiting.popleft(), buffers, faults, made)
                told: list[int] = faults.tolist()
        finally:
            for _, _, jobs in waiting:
                for job in jobs:
                    job.cancel()
                    job.cancelled() or job.exception()  # they use the files
            files.close()
        for (_, one), fault in zip(order, told, strict=True):
            if fault:
                raise FormatError(f"{next(iter(one.parts.values())).file}: {one.name}: {FAULTS[fault]}")
        return made

    def _finish(
        self, piece: _Piece, raw: Tensor, jobs: list[Future[None]], buffers: Iterator[Tensor], faults: Tensor,
        made: dict[str, Packed | PackedRows],
    ) -> None:  # fmt: skip
        """Wait until a piece was read, and turn it into operands."""
        for job in jobs:
            job.exception()
        for job in jobs:
            job.result()
        for path, one in piece.members:
            parts = {}
            for name, part in one.parts.items():
                at = piece.places[_place(part)]
                parts[name] = raw[at : at + part.nbytes].view(part.dtype).view(part.shape)
            fault, buffer = faults[len(made) : len(made) + 1], next(buffers)
            if one.dtype is None:
                buffer = buffer[: self._kernels.nbytes(one.spec)]
                self._kernels.pack(one.spec, parts, into=buffer, faults=fault)
                made[path] = Packed({"buffer": buffer}, one.spec, one.spec.rows)
            else:
                fault.masked_fill_(~torch.isfinite(parts["scales"]).all(), BAD_SCALE)
                own = {name: part.clone() for name, part in parts.items()}
                rank = torch.arange(one.spec.rows, dtype=torch.int32, device=raw.device)
                made[path] = PackedRows(own | {"rank": rank}, one.spec, one.dtype)

    def _read(self, run: _Run, raw: Tensor, files: _Files, verify: bool) -> None:
        """One run to its place in the raw piece, through pinned blocks."""
        digests = _Digests(run.parts) if verify else None
        with torch.cuda.device(raw.device), torch.cuda.stream(self._stream):
            for begin in range(run.begin, run.end, BLOCK_BYTES):
                size = min(BLOCK_BYTES, run.end - begin)
                block = self._free.get()
                try:
                    block.copied.synchronize()
                    files.read(run.parts[0].file, begin, block.view[:size])
                    if digests is not None:
                        digests.update(begin, block.view[:size])
                    at = run.at + begin - run.begin
                    raw[at : at + size].copy_(block.tensor[:size], non_blocking=True)
                    block.copied.record(self._stream)
                finally:
                    self._free.put(block)
        if digests is not None:
            digests.check()


class _Digests:
    """Hashes of neighbouring parts, from bytes that come in order."""

    def __init__(self, parts: Iterable[StoredPart]) -> None:
        self._parts = [(part, hashlib.sha256()) for part in parts]

    def update(self, begin: int, view: memoryview) -> None:
        for part, digest in self._parts:
            low, high = max(part.begin, begin), min(part.begin + part.nbytes, begin + len(view))
            if low < high:
                digest.update(view[low - begin : high - begin])

    def check(self) -> None:
        for part, digest in self._parts:
            if digest.hexdigest() != part.sha256:
                end = part.begin + part.nbytes
                raise ChecksumError(f"{part.file}: bytes {part.begin} to {end} differ from their recorded hash")


class _Files:
    """Open files, read at any place by any thread."""

    def __init__(self, paths: set[str]) -> None:
        self._open = {path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths}

    def read(self, path: str, at: int, into: memoryview) -> None:
        if os.preadv(self._open[path], [into], at) != len(into):
            raise TruncatedFileError(f"{path}: cut short at byte {at}; copy the artifact again")

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def check_stored(stored: Mapping[str, Stored]) -> None:
    """Compare the parts with their hashes without loading them; raises as Loader.load."""
    files = _Files({part.file for one in stored.values() for part in one.parts.values()})

    def check(run: _Run) -> None:
        raw = memoryview(bytearray(run.end - run.begin))
        files.read(run.parts[0].file, run.begin, raw)
        digests = _Digests(run.parts)
        digests.update(run.begin, raw)
        digests.check()

    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(check, (run for piece in _pieces(stored) for run in piece.runs)))
    finally:
        files.close()


def _pieces(stored: Mapping[str, Stored]) -> Iterator[_Piece]:
    """Tensors in the order of their files, some PIECE_BYTES together."""
    order = sorted(stored.items(), key=lambda item: max(_place(part) for part in item[1].parts.values()))
    piece, size = _Piece([]), 0
    for path, one in order:
        if piece.members and size + one.nbytes > PIECE_BYTES:
            piece.arrange()
            yield piece
            piece, size = _Piece([]), 0
        piece.members.append((path, one))
        size += one.nbytes
    if piece.members:
        piece.arrange()
        yield piece


def _place(part: StoredPart) -> tuple[str, int]:
    return part.file, part.begin
