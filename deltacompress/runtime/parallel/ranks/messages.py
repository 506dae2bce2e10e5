"""What the first rank sends to the others: a header of fixed size, integers of 64 bits, and text. Nothing is executed.

    4 bytes  "DCTP"
    u32      which message (Order)
    u32      how many integers
    u32      how many bytes of text
    i64 ...  the integers
    ...      the text, UTF-8

All of it little-endian.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

from deltacompress.errors import InternalError
from deltacompress.runtime.parallel.plan import Kind, Plan, Way

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"DCTP"
_NONE = -1
_LISTS, _FIXED = 4, 15
"""Of a plan; and integers before them, their lengths included."""


class Order(IntEnum):
    """What is to be done.

    START: text, JSON: how to begin. OPEN: number of a variant; text, JSON: where it is. PREPARE: number, turn. BRING:
    slot, number. LEAVE: slot. CLOSE: number. FORGET: number of pages. FORWARD: a plan.
    """

    START = 1
    OPEN = 2
    PREPARE = 3
    BRING = 4
    LEAVE = 5
    CLOSE = 6
    FORGET = 7
    FORWARD = 8


@dataclass(frozen=True)
class Message:
    """One order."""

    order: Order
    numbers: Sequence[int] = ()
    text: str = ""

    def packed(self) -> bytes:
        """As it is sent."""
        numbers, text = array("q", self.numbers), self.text.encode()
        if sys.byteorder == "big":
            numbers.byteswap()
        return _HEADER.pack(_MAGIC, self.order, len(numbers), len(text)) + numbers.tobytes() + text


def received(source: IO[bytes]) -> Message | None:
    """The next one; None at the end.

    Raises:
        InternalError: it is none.
    """
    raw = source.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        return None
    magic, order, count, size = _HEADER.unpack(raw)
    if magic != _MAGIC or order not in set(Order):
        raise InternalError(f"{raw!r} begins no message of the first rank")
    numbers = array("q")
    body = source.read(8 * count + size)
    if len(body) < 8 * count + size:
        return None
    numbers.frombytes(body[: 8 * count])
    text = body[8 * count :]
    if sys.byteorder == "big":
        numbers.byteswap()
    return Message(Order(order), numbers.tolist(), text.decode())


def of_plan(plan: Plan) -> Message:
    """A plan as a message."""
    keep = () if plan.keep is None else plan.keep
    lists = (plan.slots, keep, plan.kept, plan.inputs)
    sizes = [len(one) for one in lists]
    if plan.keep is None:
        sizes[1] = _NONE
    head = (plan.kind, *plan.pages, plan.rows, plan.columns, plan.width, plan.fresh)
    captured = (plan.way, plan.run, plan.variants)
    return Message(Order.FORWARD, [*head, *captured, plan.ahead, *sizes, *(number for one in lists for number in one)])


def to_plan(numbers: Sequence[int]) -> Plan:
    """The plan that `of_plan` made integers of.

    Raises:
        InternalError: they are not as many as they say.
    """
    sizes, lists, at = numbers[_FIXED - _LISTS : _FIXED], list[Sequence[int]](), _FIXED
    for size in sizes:
        lists.append(numbers[at : at + max(size, 0)])
        at += max(size, 0)
    if len(sizes) != _LISTS or at != len(numbers):
        raise InternalError("a plan of the first rank is cut short")
    kind, number, count, rows, columns, width, fresh, way, run, variants, ahead = numbers[: _FIXED - _LISTS]
    slots, keep, kept, inputs = lists
    whole = sizes[1] == _NONE
    return Plan(
        Kind(kind),
        slots,
        inputs,
        rows,
        columns,
        (number, count),
        width,
        bool(fresh),
        None if whole else keep,
        kept,
        Way(way),
        run,
        bool(variants),
        bool(ahead),
    )
