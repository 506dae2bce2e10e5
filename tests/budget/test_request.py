"""What can be asked."""

from __future__ import annotations

from typing import Any

import pytest

from deltacompress.budget.request import Request
from deltacompress.errors import InputError


def test_what_was_asked() -> None:
    assert Request.of(10, None, None).bytes(1005) == 100
    assert Request.of(None, "1.2GB", None).bytes(5) == 1_200_000_000
    assert Request.of(None, 1000, None).bytes(5) == 1000
    assert Request.of(None, None, 0.01).bytes(5) is None
    assert [str(Request.of(*one)) for one in ((10, None, None), (None, "2kB", None), (None, None, 0.01))] == [
        "10x",
        "2,000 bytes",
        "KL 0.01",
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((None, None, None), "nothing is asked; give one of target_ratio, max_size, max_kl"),
        ((10, "1GB", None), "target_ratio and max_size ask for two things"),
        ((10, None, 0.01), "target_ratio and max_kl ask for two things"),
        ((1, None, None), "target_ratio 1: is no ratio above 1"),
        ((float("nan"), None, None), "target_ratio nan: is no ratio above 1"),
        ((None, "much", None), "max_size much: is no size; give one such as 1.2GB"),
        ((None, "-1GB", None), "max_size -1GB: is no size"),
        ((None, 0, None), "max_size 0: is no size"),
        ((None, None, 0), "max_kl 0: is no number above 0"),
        ((None, None, float("inf")), "max_kl inf: is no number above 0"),
    ],
)
def test_what_cannot_be_asked(asked: tuple[Any, Any, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        Request.of(*asked)
    assert str(error.value).startswith(told)
