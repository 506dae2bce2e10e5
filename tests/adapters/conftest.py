"""Adapters that PEFT itself wrote, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from adapters.written import Written, write


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Name of a case of written.CASES -> what PEFT made of it."""
    root: Path = tmp_path_factory.mktemp("adapters")
    made: dict[str, Written] = {}

    def find(case: str) -> Written:
        if case not in made:
            made[case] = write(root, case)
        return made[case]

    return find
