"""A tensor from the bytes of its parts, piece by piece: memory holds one piece, however large the tensor is.

The same functions decode a piece that decode a whole tensor (packed.decode), so both give the same bits. (A transposed
packed tensor alone is held whole, in fp32.) A piece of a
packed tensor is some whole rows; of a matrix whose rows are longer than a piece, some columns of one row,
beginning where every part begins a byte. Parts whose length depends on the data are read on from where the piece
before it ended, so pieces come in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deltacompress.checkpoints import rows as checkpoint_rows
from deltacompress.checkpoints.rows import Elements, ranges
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import Parts, part_shapes
from deltacompress.codecs.formats.spec import FREE, PackedSpec
from deltacompress.errors import FormatError
from deltacompress.numerics.bits import packing
from deltacompress.numerics.bits.widths import STORED_BITS, packed_width


class Source(Protocol):
    """The bytes of one part before the lossless stage; PartInMemory where it is there whole."""

    nbytes: int

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes [begin, end)."""


class PartInMemory:
    """A part that is there whole, on the CPU."""

    def __init__(self, part: Tensor) -> None:
        self._bytes = part.contiguous().reshape(-1).view(torch.uint8)
        self.nbytes = part.nbytes

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes [begin, end)."""
        return bytearray(self._bytes[begin:end].numpy())


def packed_pieces(
    params: dict[str, Any],
    sources: Mapping[str, Source],
    base: Elements | None,
    like: Tensor,
    where: str,
    *,
    storage: bool,
) -> Iterator[Tensor]:
    """As encoded.restore_pieces, of the packed format."""
    spec = PackedSpec.from_json(params, where)
    added = sources.get("added_rows")
    shared = like.numel() - (added.nbytes // like.element_size() if added is not None else 0)
    at = 0
    deltas = PackedPieces(spec, sources, storage=storage, where=where).deltas(shared // spec.columns)
    for delta in _turned(deltas, spec.columns) if spec.transposed else deltas:
        if base is not None:
            delta.add_(base.read(at, at + len(delta)))
        at += len(delta)
        yield delta.to(like.dtype)
    yield from added_pieces(sources, like)


def _turned(deltas: Iterator[Tensor], columns: int) -> Iterator[Tensor]:
    """The transpose of a matrix that comes row by row, flat; its first piece needs the last row, so all are held."""
    whole = torch.cat([torch.empty(0), *deltas]).view(-1, columns).t().reshape(-1)
    for begin, end in ranges(len(whole)):
        yield whole[begin:end]


def added_pieces(sources: Mapping[str, Source], like: Tensor) -> Iterator[Tensor]:
    """The rows beyond the base's, which are stored as they are, if there are any."""
    if (added := sources.get("added_rows")) is not None:
        for begin, end in ranges(added.nbytes // like.element_size()):
            yield read_tensor(added, begin, end, like.dtype)


class PackedPieces:
    """The values of a packed tensor's shared rows, in order; parts as spec.check_shapes takes them.

    storage: whether they are in the storage layout; where: how messages call the tensor.
    """

    def __init__(self, spec: PackedSpec, sources: Mapping[str, Source], *, storage: bool, where: str) -> None:
        self._spec, self._sources, self._storage, self._where = spec, sources, storage, where
        self._shapes = part_shapes(spec, storage=storage)
        self._row = 0  # stored rows so far
        self._free = 0  # of a part of free length: codes of `nonzero`, bytes of `codes`, elements of `values`
        self._in_row = 0  # codes of `codes` in a row that is not over

    def deltas(self, rows: int) -> Iterator[Tensor]:
        """f32, flat; zeros where no row is stored. rows: of the tensor, stored or not.

        Raises:
            FormatError: the parts do not fit each other.
        """
        step = max(checkpoint_rows.PIECE // self._spec.padded, 1)
        try:
            for begin in range(0, rows, step):
                stored = self._stored(begin, min(step, rows - begin))
                if self._spec.columns > checkpoint_rows.PIECE:
                    yield from self._long_row() if bool(stored) else _zeros(self._spec.columns)
                else:
                    yield self._spread(stored)
            self._check_end()
        except (ValueError, RuntimeError, IndexError) as error:
            raise FormatError(f"the parts do not decode ({error})", where=self._where) from error

    def check(self, rows: int) -> None:
        """Make sure that the parts decode, without the values; of a fresh instance. rows: as `deltas`; raises alike."""
        if "row_mask" in self._sources:
            named = sum(int(self._stored(begin, end - begin).sum()) for begin, end in ranges(rows))
            if named != self._spec.rows:
                raise FormatError(f"row_mask names {named} rows, {self._spec.rows} are stored", where=self._where)
        if self._spec.sparsity.kind not in ("dense", "drawn") or "nonzero" in self._shapes:  # any bytes are their codes
            sources = {name: one for name, one in self._sources.items() if name != "row_mask"}
            whole = PackedPieces(self._spec, sources, storage=self._storage, where=self._where)
            for _ in whole.deltas(self._spec.rows):
                pass

    def _stored(self, begin: int, count: int) -> Tensor:
        """bool [count]: which rows from `begin` on are stored."""
        if "row_mask" not in self._sources:
            return torch.ones(count, dtype=torch.bool)
        first = begin // 8
        raw = self._take("row_mask", first, packed_width(begin + count, 1))
        return packing.unpack_codes(raw.unsqueeze(0), 1, 8 * len(raw))[0, begin - 8 * first :][:count].bool()

    def _spread(self, stored: Tensor) -> Tensor:
        """The next rows, as many as are stored, in their places among zeros."""
        count, columns = int(stored.sum()), self._spec.columns
        out = torch.zeros(len(stored), columns)
        if count:
            self._check_rows(count)
            spec = replace(self._spec, rows=count, first=(self._row, 0))
            parts = {
                name: self._elements(name, self._row * shape[1], count * shape[1]).view(count, shape[1])
                for name, (_, shape) in self._shapes.items()
                if shape != (FREE,)
            }
            self._add_free(spec, parts, last=True)
            self._row += count
            out[stored] = self._decoded(spec, parts)
        return out.reshape(-1)

    def _long_row(self) -> Iterator[Tensor]:
        """The next stored row, some columns at a time."""
        self._check_rows(1)
        whole = self._spec
        unit = 8 * max(whole.sparsity.m, 1)
        for begin in range(0, whole.columns, step := max(checkpoint_rows.PIECE // unit, 1) * unit):
            size = min(step, whole.columns - begin)
            group = size if whole.groups == 1 else 1
            spec = replace(whole, rows=1, columns=size, group=group, first=(self._row, begin))
            before, inside = (part_shapes(one, storage=self._storage) for one in (replace(spec, columns=begin), spec))
            parts = {}
            for name, (_, shape) in self._shapes.items():
                if name in ("scales", "zeros"):
                    parts[name] = self._grid(name, begin, size)
                elif shape != (FREE,):
                    first = self._row * shape[1] + before[name][1][1]
                    parts[name] = self._elements(name, first, inside[name][1][1]).unsqueeze(0)
            self._add_free(spec, parts, last=begin + size == whole.columns)
            yield self._decoded(spec, parts).reshape(-1)
        self._row += 1

    def _grid(self, name: str, begin: int, size: int) -> Tensor:
        """Scales or zeros of some columns of this row: [1, 1] where the row has one, else [1, size]."""
        whole = self._spec
        if whole.groups == 1:
            return self._elements(name, self._row, 1).unsqueeze(0)
        first, last = begin // whole.group, (begin + size - 1) // whole.group
        found = self._elements(name, self._row * whole.groups + first, last + 1 - first)
        return found[(torch.arange(begin, begin + size) // whole.group) - first].unsqueeze(0)

    def _add_free(self, spec: PackedSpec, parts: Parts, *, last: bool) -> None:
        """What of a part of free length belongs to a piece. last: whether the piece ends its rows."""
        if "nonzero" in self._shapes:
            count = int(packing.unpack_codes(parts["groups"], 1, spec.padded).sum())
            codes = self._codes("nonzero", 0, self._free, count, STORED_BITS[spec.bits])
            parts["nonzero"] = packing.pack_codes(codes.unsqueeze(0), STORED_BITS[spec.bits]).squeeze(0)
            self._free += count
        elif spec.sparsity.kind == "unstructured":
            counts = packing.unpack_codes(parts["pattern"], 1, spec.columns).sum(1)
            if spec.bits == 16:
                parts["values"] = self._elements("values", self._free, int(counts.sum()))
                self._free += int(counts.sum())
            elif last and not self._in_row:
                size = int(((counts * spec.bits + 7) // 8).sum())
                parts["codes"] = self._elements("codes", self._free, size)
                self._free += size
            else:
                codes = self._codes("codes", self._free, self._in_row, int(counts.sum()), spec.bits)
                parts["codes"] = packing.pack_codes(codes.unsqueeze(0), spec.bits).squeeze(0)
                self._in_row += len(codes)
                if last:
                    self._free += packed_width(self._in_row, spec.bits)
                    self._in_row = 0

    def _codes(self, name: str, base: int, first: int, count: int, bits: int) -> Tensor:
        """Codes [first, first + count) of a bit string that begins at byte `base` of a part."""
        octet, skip = divmod(first, 8)
        at = base + octet * bits
        raw = self._take(name, at, at + packed_width(skip + count, bits))
        return packing.unpack_codes(raw.unsqueeze(0), bits, skip + count)[0, skip:]

    def _elements(self, name: str, first: int, count: int) -> Tensor:
        """Elements of a part, flat, in its dtype."""
        dtype = self._shapes[name][0]
        return self._take(name, first * dtype.itemsize, (first + count) * dtype.itemsize).view(dtype)

    def _take(self, name: str, begin: int, end: int) -> Tensor:
        if end > self._sources[name].nbytes:
            raise ValueError(f"part {name} is shorter than the others say")
        return _tensor(self._sources[name].read(begin, end), torch.uint8)

    def _decoded(self, spec: PackedSpec, parts: Parts) -> Tensor:
        return packed.decode(spec, packed.to_serving(spec, parts, self._where) if self._storage else parts)

    def _check_rows(self, count: int) -> None:
        if self._row + count > self._spec.rows:
            raise ValueError(f"row_mask names more rows than the {self._spec.rows} that are stored")

    def _check_end(self) -> None:
        if self._row != self._spec.rows:
            raise ValueError(f"row_mask names {self._row} rows, {self._spec.rows} are stored")
        for name, (dtype, shape) in self._shapes.items():
            if shape == (FREE,):
                size = self._free * dtype.itemsize
                if name == "nonzero":
                    size = packed_width(self._free, STORED_BITS[self._spec.bits])
                if size != self._sources[name].nbytes:
                    raise ValueError(f"part {name} is longer than the others say")


def check_packed(
    params: dict[str, Any], sources: Mapping[str, Source], rows: int, where: str, *, storage: bool
) -> None:
    """As encoded.check_pieces, of the packed format."""
    PackedPieces(PackedSpec.from_json(params, where), sources, storage=storage, where=where).check(rows)


def base_pieces(
    params: dict[str, Any],
    sources: Mapping[str, Source],
    base: Elements | None,
    like: Tensor,
    where: str,
    *,
    storage: bool,
) -> Iterator[Tensor]:
    """As encoded.restore_pieces, of a tensor without parts: the base's."""
    assert base is not None
    for begin, end in ranges(like.numel()):
        yield base.read(begin, end).to(like.dtype)


def read_tensor(source: Source, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Elements [begin, end) of a part of this dtype, flat."""
    return _tensor(source.read(begin * dtype.itemsize, end * dtype.itemsize), dtype)


def _zeros(count: int) -> Iterator[Tensor]:
    return (torch.zeros(end - begin) for begin, end in ranges(count))


def _tensor(raw: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
