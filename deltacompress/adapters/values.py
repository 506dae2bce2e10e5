"""What the tensors of an adapter hold: finite numbers, and entries that are where the weight is, each once.

Read in pieces, so that what it takes does not grow with the adapter. The only file of this room that imports numpy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacompress.adapters.adapter import Adapter
from deltacompress.adapters.records import Change, Sparse
from deltacompress.adapters.tensors import copied
from deltacompress.checkpoints.header import FLOATS, ITEMSIZE, TensorSpan
from deltacompress.checkpoints.side_files import link_homes
from deltacompress.errors import CheckpointError
from deltacompress.files.regular import Stamp, open_regular, stamp, unreadable

Integers = NDArray[np.int64]
_PIECE = 1 << 20  # elements
_BAND = 1 << 27  # places of a weight whose entries are told apart at once, a bit each
_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "I16": "<u2", "I32": "<i4", "I64": "<i8"}
"""BF16 as its bits. I16, which only columns are stored as, unsigned: the fork that writes them lets them overflow."""
_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
"""Bits of the exponent; all of them set: NaN or an infinity."""
_TOO_LARGE = _EXPONENTS | {"F64": (1023 + 128) << 52}
"""From which exponent on a number is none that is served: of F64 from 2^128 on, which float32 does not hold."""
_BYTES = 1 << 20  # of a piece that is looked at: a core's cache holds it
_THREADS = 4
_AGAIN = "get the adapter again"
_SHORT = "it ends before its tensors do"
_Piece = tuple[str, int, int]
"""dtype, where it begins in the file, and its bytes."""


def check_values(adapter: Adapter) -> None:
    """Read every tensor that is used.

    Raises:
        CheckpointError: a number that is not finite; an entry outside of its weight, or there twice; offsets that do
            not rise from 0 to the number of entries; a copy that differs; or the file has changed or cannot be read.
    """
    used = [adapter.tensors[name] for change in adapter.changes.values() for name in change.tensors]
    check_finite(adapter.weights, adapter.stamp, used)
    with _opened(adapter.weights, adapter.stamp) as file:
        for change in adapter.changes.values():
            if change.sparse is not None:
                _check_entries(file, adapter, change, change.sparse)
        for name in adapter.tensors:
            if (other := copied(name, adapter.tensors)) is not None:
                _check_copy(file, adapter, name, other)


def check_finite(weights: Path, expected: Stamp, spans: Iterable[TensorSpan]) -> None:
    """Read tensors of the file `weights` of the stamp `expected`; those that hold whole numbers are passed over.

    Raises:
        CheckpointError: a number that is not finite; or the file has changed or cannot be read.
    """
    floats = [span for span in spans if span.info.dtype in FLOATS]
    with _opened(weights, expected) as file:
        pieces, threads = _pieces(floats), min(_THREADS, os.cpu_count() or 1)
        parts = [pieces[first::threads] for first in range(threads) if pieces[first:]]
        if len(parts) < 2:
            fine = all(_are_finite(file, part) for part in parts)
        else:
            with ThreadPoolExecutor(threads, "deltacompress-look") as pool:
                fine = all([*pool.map(partial(_are_finite, file), parts)])
        if fine:
            return
        for span in floats:
            if not _are_finite(file, _pieces([span])):
                beyond = ", or a number beyond float32" if span.info.dtype == "F64" else ""
                what = f"tensor {span.info.name} holds NaN or an infinity{beyond}"
                raise CheckpointError(what, where=weights, way_out="train it again, or get it again")
        raise CheckpointError("changed while it was read", where=weights, way_out="run it again")


def entries(adapter: Adapter, change: Change) -> tuple[Integers, Integers]:
    """Rows and columns [count] of the entries that SHiRA or RoSA add to a weight, in the order of their values.

    Raises:
        CheckpointError: as check_values, of these entries.
    """
    assert change.sparse is not None, "a module without entries"
    with _opened(adapter.weights, adapter.stamp) as file:
        _check_entries(file, adapter, change, change.sparse)
        pieces = list(_coordinates(file, adapter, change, change.sparse))
    return np.concatenate([rows for rows, _ in pieces]), np.concatenate([columns for _, columns in pieces])


def _check_entries(file: BufferedReader, adapter: Adapter, change: Change, sparse: Sparse) -> None:
    rising, last = True, -1
    for rows, columns in _coordinates(file, adapter, change, sparse):
        if rows.min() < 0 or rows.max() >= change.outputs or columns.min() < 0 or columns.max() >= change.inputs:
            raise _wrong(adapter, f"module {change.module} has an entry outside of its weight")
        places = rows * change.inputs + columns
        rising = rising and places[0] > last and bool((np.diff(places) > 0).all())
        last = int(places[-1])
    if rising:  # as both PEFT and RoSA write them
        return
    for begin in range(0, change.outputs * change.inputs, _BAND):
        seen = np.zeros(_BAND // 8, dtype=np.uint8)
        for rows, columns in _coordinates(file, adapter, change, sparse):
            places = rows * change.inputs + columns - begin
            places = np.sort(places[(places >= 0) & (places < _BAND)])
            bits = np.left_shift(1, places & 7).astype(np.uint8)
            if (np.diff(places) == 0).any() or (seen[places >> 3] & bits).any():
                raise _wrong(adapter, f"module {change.module} has an entry twice")
            np.bitwise_or.at(seen, places >> 3, bits)


def _coordinates(
    file: BufferedReader, adapter: Adapter, change: Change, sparse: Sparse
) -> Iterator[tuple[Integers, Integers]]:
    """(rows, columns) of the entries, piece by piece, as the file has them."""
    if sparse.indices is not None:
        span = adapter.tensors[sparse.indices]
        for begin in range(0, sparse.count, _PIECE):
            count = min(_PIECE, sparse.count - begin)
            rows, columns = (_read(file, span, start + begin, count) for start in (0, sparse.count))
            yield _whole(adapter, span, rows), _whole(adapter, span, columns)
        return
    assert sparse.row_offsets is not None
    assert sparse.columns is not None
    offsets = _read(file, adapter.tensors[sparse.row_offsets], 0, change.outputs + 1).astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != sparse.count or (np.diff(offsets) < 0).any():
        raise _wrong(
            adapter,
            f"tensor {sparse.row_offsets} does not rise from 0 to the {sparse.count} entries"
            + (" (all 0: it was saved before its mask was found)" if not offsets.any() else ""),
        )
    for begin in range(0, sparse.count, _PIECE):
        count = min(_PIECE, sparse.count - begin)
        columns = _read(file, adapter.tensors[sparse.columns], begin, count).astype(np.int64)
        rows = np.searchsorted(offsets, np.arange(begin, begin + count), side="right") - 1
        yield rows.astype(np.int64), columns


def _whole(adapter: Adapter, span: TensorSpan, found: NDArray[Any]) -> Integers:
    """Indices as whole numbers: PEFT on Windows saves them as floats."""
    if found.dtype.kind == "f" and not (np.abs(found) < 2**31).all():  # NaN is not below it either
        raise _wrong(adapter, f"tensor {span.info.name} holds what is no index")
    whole = found.astype(np.int64)
    if found.dtype.kind == "f" and (whole != found).any():
        raise _wrong(adapter, f"tensor {span.info.name} holds what is no index")
    return whole


def _pieces(spans: Iterable[TensorSpan]) -> list[_Piece]:
    """These tensors in pieces of _BYTES at most; small ones that lie side by side are in one piece."""
    runs: list[_Piece] = []
    for dtype, begin, nbytes in sorted((one.info.dtype, one.begin, one.info.nbytes) for one in spans):
        if runs and runs[-1][0] == dtype and sum(runs[-1][1:]) == begin:
            runs[-1] = (dtype, runs[-1][1], runs[-1][2] + nbytes)
        else:
            runs.append((dtype, begin, nbytes))
    return [
        (dtype, begin + at, min(_BYTES, nbytes - at))
        for dtype, begin, nbytes in runs
        for at in range(0, nbytes, _BYTES)
    ]


def _are_finite(file: BufferedReader, pieces: Iterable[_Piece]) -> bool:
    """Any thread may ask."""
    buffer = memoryview(bytearray(_BYTES))
    for dtype, begin, nbytes in pieces:
        got = 0
        while got < nbytes and (more := os.preadv(file.fileno(), [buffer[got:nbytes]], begin + got)):
            got += more
        if got != nbytes:
            raise OSError(_SHORT)
        bits = np.frombuffer(buffer[:nbytes], dtype=f"<u{ITEMSIZE[dtype]}")
        np.bitwise_and(bits, _EXPONENTS[dtype], out=bits)
        if bits.max() >= _TOO_LARGE[dtype]:
            return False
    return True


def _check_copy(file: BufferedReader, adapter: Adapter, name: str, other: str) -> None:
    one, two = adapter.tensors[name], adapter.tensors[other]
    step = _PIECE * ITEMSIZE[one.info.dtype]
    for begin, end in pairwise([*range(0, one.info.nbytes, step), one.info.nbytes]):
        first, second = (_bytes(file, span.begin + begin, end - begin) for span in (one, two))
        if first != second:
            raise _wrong(adapter, f"tensors {name} and {other} differ, so which one is meant is not told")


def _read(file: BufferedReader, span: TensorSpan, begin: int, count: int) -> NDArray[Any]:
    """Elements [begin, begin + count) of a tensor, flat."""
    item = ITEMSIZE[span.info.dtype]
    return np.frombuffer(_bytes(file, span.begin + begin * item, count * item), dtype=_DTYPES[span.info.dtype])


def _bytes(file: BufferedReader, begin: int, count: int) -> bytes:
    file.seek(begin)
    raw = file.read(count)
    if len(raw) != count:
        raise OSError(_SHORT)
    return raw


@contextmanager
def _opened(weights: Path, expected: Stamp) -> Iterator[BufferedReader]:
    try:
        with open_regular(weights, links=link_homes(weights.parent)) as file:
            if stamp(os.fstat(file.fileno())) != expected:
                raise CheckpointError("changed since it was opened", where=weights, way_out="run it again")
            yield file
    except OSError as error:
        raise unreadable(CheckpointError, weights, error, _AGAIN) from error


def _wrong(adapter: Adapter, what: str) -> CheckpointError:
    return CheckpointError(what, where=adapter.weights, way_out=_AGAIN)
