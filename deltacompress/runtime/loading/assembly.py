"""From raw pieces of files to operands, on the device: hashes are compared and layouts made as the pieces arrive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.devices import fetched, sent
from deltacompress.errors import ChecksumError, FormatError
from deltacompress.kernels import Backend
from deltacompress.kernels.cuda.tiling import BAD_SCALE, FAULTS
from deltacompress.kernels.hashing import DIGEST_BYTES, Spans
from deltacompress.kernels.ingest import Ingest, PackTask
from deltacompress.runtime.loading.arrangement import Piece, place
from deltacompress.runtime.operands.embedding_rows import PackedRows
from deltacompress.runtime.operands.packed_delta import PackedDelta
from deltacompress.runtime.operands.stored import StoredPart


@dataclass(frozen=True, slots=True)
class _Check:
    """Parts of a piece by name, where they are in it, and what they should hash to, u8 [parts, DIGEST_BYTES]."""

    parts: dict[str, StoredPart]
    spans: Spans
    wanted: Tensor

    @classmethod
    def of(cls, piece: Piece, device: torch.device) -> _Check:
        parts = {f"{one.name}.{name}": part for _, one in piece.members for name, part in one.parts.items()}
        wanted = bytearray.fromhex("".join(part.blake3 for part in parts.values()))
        spans = Spans.of([(piece.places[place(part)], part.nbytes) for part in parts.values()], device)
        return cls(parts, spans, sent(torch.frombuffer(wanted, dtype=torch.uint8).view(-1, DIGEST_BYTES), device))


class Assembly:
    """What one load makes of its pieces, on the current stream; `add` waits for nothing, `finish` for all of it."""

    def __init__(self, kernels: Backend, ingest: Ingest, pieces: list[Piece], *, verify: bool) -> None:
        self._ingest, self._pieces, device = ingest, iter(pieces), kernels.device
        self._order = [member for piece in pieces for member in piece.members]
        places, size = [], 0
        for _, one in self._order:
            places.append(size)
            size += kernels.nbytes(one.spec) if one.dtype is None else 0  # a multiple of ALIGN
        # one allocation: hundreds would take longer than the copies
        self._out = torch.empty(size, dtype=torch.uint8, device=device)
        self._faults = torch.zeros(len(self._order), dtype=torch.int32, device=device)
        self._made: dict[str, PackedDelta | PackedRows] = {}
        self._checks = [_Check.of(piece, device) for piece in pieces] if verify else []
        self._differ: list[Tensor] = []
        batches, number = [], 0
        for piece in pieces:
            items = []
            for path, one in piece.members:
                if one.dtype is None:
                    at = {name: piece.places[place(part)] for name, part in one.parts.items()}
                    items.append(PackTask(one.spec, at, places[number], number))
                    buffer = self._out[places[number] : places[number] + kernels.nbytes(one.spec)]
                    self._made[path] = PackedDelta({"buffer": buffer}, one.spec, one.spec.rows)
                number += 1
            batches.append(ingest.prepare(items))
        self._batches, self._added = iter(batches), 0

    def add(self, raw: Tensor) -> None:
        """Compare the next piece's parts with their hashes, and turn it into operands."""
        piece = next(self._pieces)
        if self._checks:
            check = self._checks[len(self._differ)]
            self._differ.append((self._ingest.digests(raw, check.spans) != check.wanted).any(dim=1))
        self._ingest.pack(next(self._batches), raw, self._out, self._faults)
        for path, one in piece.members:
            if one.dtype is not None:
                own = {}
                for name, part in one.parts.items():
                    at = piece.places[place(part)]
                    own[name] = raw[at : at + part.nbytes].clone().view(part.dtype).view(part.shape)
                fault = self._faults[self._added : self._added + 1]
                fault.masked_fill_(~torch.isfinite(own["scales"]).all(), BAD_SCALE)
                rank = torch.arange(one.spec.rows, dtype=torch.int32, device=raw.device)
                self._made[path] = PackedRows(own | {"rank": rank}, one.spec, one.dtype)
            self._added += 1

    def finish(self) -> dict[str, PackedDelta | PackedRows]:
        """All of it, once the device has found no fault; raises as Loader.load."""
        faults: list[int] = fetched(self._faults).tolist()
        differ: list[bool] = fetched(torch.cat(self._differ)).tolist() if self._differ else []
        parts = (item for check in self._checks for item in check.parts.items())
        for (name, part), differs in zip(parts, differ, strict=True):
            if differs:
                raise damaged(name, part)
        for (_, one), fault in zip(self._order, faults, strict=True):
            if fault:
                raise FormatError(f"{one.name}: {FAULTS[fault]}", where=next(iter(one.parts.values())).file)
        return self._made


def damaged(name: str, part: StoredPart) -> ChecksumError:
    """What to raise for a part (its name with the tensor's) that differs from its hash."""
    return ChecksumError(
        f"{name}: its bytes differ from their recorded hash", where=part.file, way_out="copy the artifact again"
    )
