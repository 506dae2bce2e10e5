"""From the files of an artifact to the GPU as fast as the bus allows: parts that are stored plainly.

Threads read pieces of parts straight into pinned blocks (from the page cache, mostly), hash them there while they are
warm, and queue their copies on the copy stream; the kernel layout is made on the device. A block is used again when its
copy is done. So what a load needs on the host is the ring, however large the variant is, and the page cache serves as
the second tier: variants that left come back the same way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from deltacompress.checkpoint import tensor_bytes
from deltacompress.errors import ChecksumError, FormatError, TruncatedFileError
from deltacompress.kernels import Backend
from deltacompress.kernels.tiling import BAD_SCALE, FAULTS
from deltacompress.runtime.operands import Packed, PackedRows, Stored, StoredPart

BLOCK_BYTES = 2 << 20
THREADS = 16
_BLOCKS = 3 * THREADS
_ALIGN = 256


class _Block:
    """Pinned bytes, and the copy that last used them."""

    def __init__(self) -> None:
        self.tensor = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.view = tensor_bytes(self.tensor)
        self.copied = torch.cuda.Event()


class Loader:
    """Brings stored parts to one GPU; made once, its blocks and threads at first use."""

    def __init__(self, kernels: Backend, stream: torch.cuda.Stream) -> None:
        """stream: on which copies and packing run."""
        self._kernels, self._stream = kernels, stream
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "deltacompress-load")
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
            for _ in range(_BLOCKS):
                self._free.put(_Block())
        order = sorted(stored.items(), key=lambda item: -item[1].nbytes)
        sizes = [-(-self._kernels.nbytes(one.spec) // _ALIGN) * _ALIGN if one.dtype is None else 0 for _, one in order]
        device = self._kernels.device
        files = _Files({part.file for _, one in order for part in one.parts.values()})
        try:
            with torch.cuda.stream(self._stream):
                # one allocation: hundreds would take longer than the copies
                buffers = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
                faults = torch.zeros(len(order), dtype=torch.int32, device=device)
            jobs = [
                self._pool.submit(self._one, one, buffers[i], faults[i : i + 1], files, verify)
                for i, (_, one) in enumerate(order)
            ]
            wait(jobs)  # all of them: they use the files
            made = [job.result() for job in jobs]
        finally:
            files.close()
        with torch.cuda.stream(self._stream):
            told: list[int] = faults.tolist()
        for (_, one), fault in zip(order, told, strict=True):
            if fault:
                raise FormatError(f"{next(iter(one.parts.values())).file}: {one.name}: {FAULTS[fault]}")
        return {path: one for (path, _), one in zip(order, made, strict=True)}

    def _one(self, one: Stored, into: Tensor, faults: Tensor, files: _Files, verify: bool) -> Packed | PackedRows:
        with torch.cuda.device(self._kernels.device), torch.cuda.stream(self._stream):
            if one.dtype is None:
                parts = {name: self._part(part, files, verify) for name, part in one.parts.items()}
                buffer = into[: self._kernels.nbytes(one.spec)]
                self._kernels.pack(one.spec, parts, into=buffer, faults=faults)
                return Packed({"buffer": buffer}, one.spec, one.spec.rows)
            parts = {name: self._part(part, files, verify) for name, part in one.parts.items()}
            faults.masked_fill_(~torch.isfinite(parts["scales"]).all(), BAD_SCALE)
            rank = torch.arange(one.spec.rows, dtype=torch.int32, device=into.device)
            return PackedRows(parts | {"rank": rank}, one.spec, one.dtype)

    def _part(self, part: StoredPart, files: _Files, verify: bool) -> Tensor:
        """One part on the device."""
        out = torch.empty(part.nbytes, dtype=torch.uint8, device=self._kernels.device)
        digest = hashlib.sha256() if verify else None
        for at in range(0, part.nbytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, part.nbytes - at)
            block = self._free.get()
            try:
                block.copied.synchronize()
                files.read(part.file, part.begin + at, block.view[:size])
                if digest is not None:
                    digest.update(block.view[:size])
                out[at : at + size].copy_(block.tensor[:size], non_blocking=True)
                block.copied.record(self._stream)
            finally:
                self._free.put(block)
        if digest is not None and digest.hexdigest() != part.sha256:
            raise ChecksumError(f"{part.file}: bytes {part.begin} to {part.begin + part.nbytes} differ from their hash")
        return out.view(part.dtype).view(part.shape)


class _Files:
    """Open files, read at any place by any thread."""

    def __init__(self, paths: set[Path]) -> None:
        self._open = {path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths}

    def read(self, path: Path, at: int, into: memoryview) -> None:
        if os.preadv(self._open[path], [into], at) != len(into):
            raise TruncatedFileError(f"{path}: cut short at byte {at}; copy the artifact again")

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def check_stored(stored: Mapping[str, Stored]) -> None:
    """Compare the parts with their hashes without loading them; raises as Loader.load."""
    files = _Files({part.file for one in stored.values() for part in one.parts.values()})

    def check(part: StoredPart) -> None:
        raw = bytearray(part.nbytes)
        files.read(part.file, part.begin, memoryview(raw))
        if hashlib.sha256(raw).hexdigest() != part.sha256:
            raise ChecksumError(f"{part.file}: bytes {part.begin} to {part.begin + part.nbytes} differ from their hash")

    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(check, (part for one in stored.values() for part in one.parts.values())))
    finally:
        files.close()
