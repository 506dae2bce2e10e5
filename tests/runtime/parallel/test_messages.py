"""What goes between ranks is read back as it was, and nothing else is taken for it."""

from __future__ import annotations

import io
import struct

import pytest

from deltacompress.errors import InternalError
from deltacompress.runtime.parallel.plan import Kind, Plan, Way
from deltacompress.runtime.parallel.ranks.messages import Message, Order, of_plan, received, to_plan

PLANS = [
    Plan(Kind.SEQUENCES, [0, 3], [5, 6, 7, 8], 2, 2, keep=[0, 3], kept=[1, 1]),
    Plan(Kind.SEQUENCES, [0], [5], 1, 1, keep=[], kept=[0]),
    Plan(Kind.PIECES, [4], list(range(20)), 1, 6, (7, 64), 2, fresh=True, keep=[5], kept=[1]),
    Plan(Kind.ROWS, [0, 1, 1], [1, 2, 3, -1, 2**40], 3, 1, (1, 1), 1, kept=[]),
    Plan(Kind.ROWS, [0, 1, 1], [1, 2], 4, 1, (1, 1), 1, kept=[], way=Way.REPLAYED, run=8, variants=True),
    Plan(Kind.ROWS, [0, 1], [0, 0, 7, 9, 1, 1, 2, 3], 2, 1, (1, 4), 4, kept=[], ahead=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kind.name)
def test_plans(plan: Plan) -> None:
    found = received(io.BytesIO(of_plan(plan).packed()))
    assert found is not None
    assert found.order == Order.FORWARD
    assert to_plan(found.numbers) == plan


def test_a_stream_of_messages() -> None:
    sent = [Message(Order.OPEN, [1], '{"path": "ä"}'), Message(Order.LEAVE, [2]), Message(Order.CLOSE)]
    stream = io.BytesIO(b"".join(one.packed() for one in sent))
    found = [received(stream) for _ in range(4)]
    assert [(one.order, list(one.numbers), one.text) for one in found[:3] if one] == [
        (one.order, list(one.numbers), one.text) for one in sent
    ]
    assert found[3] is None


def test_the_bytes() -> None:
    """As messages.py says, whatever machine this is."""
    assert Message(Order.BRING, [2, -1], "a").packed() == struct.pack("<4sIIIqqs", b"DCTP", 4, 2, 1, 2, -1, b"a")


def test_what_is_no_message() -> None:
    whole = Message(Order.BRING, [2, 1], "a").packed()
    assert received(io.BytesIO(whole[:-1])) is None  # whoever sent it is gone
    assert received(io.BytesIO(whole[:7])) is None
    for wrong in (b"PICK" + whole[4:], whole[:4] + struct.pack("<I", 99) + whole[8:]):
        with pytest.raises(InternalError, match="begins no message"):
            received(io.BytesIO(wrong))
    numbers = of_plan(PLANS[0]).numbers
    for wrong_numbers in (numbers[:-1], [*numbers, 0], numbers[:9]):
        with pytest.raises(InternalError, match="cut short"):
            to_plan(wrong_numbers)
