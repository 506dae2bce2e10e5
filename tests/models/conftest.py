"""What the tests of opening models share."""

from __future__ import annotations

import pytest


@pytest.fixture
def lm_eval() -> None:
    pytest.importorskip("lm_eval")
