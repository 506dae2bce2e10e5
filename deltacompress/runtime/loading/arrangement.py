"""How a load takes the files of an artifact: pieces of neighbouring tensors, and how they are read and copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deltacompress.kernels.parts import ALIGN
from deltacompress.runtime.operands.stored import Stored, StoredPart

READ_BYTES = 8 << 20
"""Of one read, by one thread."""
PIECE_BYTES = 112 << 20
"""Of a raw piece on the device: of its parts."""
BUFFER_BYTES = 128 << 20
"""Of what is copied at once: a piece with what lies between its parts, or some of a larger one."""
GAP_BYTES = 1 << 16
"""What lies between two parts is read along, if it is no more."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a file, and where they go in a buffer."""

    file: str
    begin: int
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Bytes [begin, begin + nbytes) of a raw piece, and what of files they are made of."""

    begin: int
    nbytes: int
    reads: list[Read]


@dataclass(slots=True)
class Run:
    """Neighbouring parts of one file. at: where they start in the raw piece."""

    parts: list[StoredPart]
    at: int

    @property
    def file(self) -> str:
        return self.parts[0].file

    @property
    def begin(self) -> int:
        """The first byte in the file."""
        return self.parts[0].begin

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.parts[-1].begin + self.parts[-1].nbytes


@dataclass(slots=True)
class Piece:
    """Tensors that are loaded together. places: by (file, begin) of a part, where it starts in the raw piece."""

    members: list[tuple[str, Stored]]
    runs: list[Run] = field(default_factory=list)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    size: int = 0

    def arrange(self) -> None:
        """Lay out the parts of its members as they lie in their files."""
        parts = [part for _, one in self.members for part in one.parts.values()]
        parts.sort(key=lambda part: (part.file, part.begin, part.nbytes))  # an empty one before its neighbour
        run, end = None, 0
        for part in parts:
            if run is not None and run.file == part.file and part.begin - end <= GAP_BYTES:
                run.parts.append(part)
            else:
                # as aligned as in the file
                run = Run([part], self.size + -self.size % ALIGN + part.begin % ALIGN)
                self.runs.append(run)
            end, at = part.begin + part.nbytes, run.at + part.begin - run.begin
            self.places[place(part)], self.size = at, at + part.nbytes

    def transfers(self) -> Iterator[HostCopy]:
        """What to read and copy, in order of place; none is empty, and the last one completes the piece."""
        for begin in range(0, self.size, BUFFER_BYTES):
            end = min(begin + BUFFER_BYTES, self.size)
            reads = []
            for run in self.runs:
                low, high = max(run.at, begin), min(run.at + run.end - run.begin, end)
                for at in range(low, high, READ_BYTES):
                    size = min(READ_BYTES, high - at)
                    reads.append(Read(run.file, run.begin + at - run.at, at - begin, size))
            yield HostCopy(begin, end - begin, reads)


def pieces(stored: Mapping[str, Stored]) -> Iterator[Piece]:
    """Tensors in the order of their files, some PIECE_BYTES together."""
    order = sorted(stored.items(), key=lambda item: max(place(part) for part in item[1].parts.values()))
    piece, size = Piece([]), 0
    for path, one in order:
        if piece.members and size + one.nbytes > PIECE_BYTES:
            piece.arrange()
            yield piece
            piece, size = Piece([]), 0
        piece.members.append((path, one))
        size += one.nbytes
    if piece.members:
        piece.arrange()
        yield piece


def place(part: StoredPart) -> tuple[str, int]:
    """What names a part among all files, and orders them."""
    return part.file, part.begin
