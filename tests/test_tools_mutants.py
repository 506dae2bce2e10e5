"""The runner of `make mutants`: what it mutates, which tests it takes, what it counts as wording."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutants(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", repo_root / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_room_is_a_folder_or_a_file(mutants: ModuleType) -> None:
    assert "deltacompress/numerics/grid.py" in mutants._sources("numerics")
    assert (
        mutants._sources("numerics/grid") == mutants._sources("numerics/grid.py") == ["deltacompress/numerics/grid.py"]
    )
    with pytest.raises(SystemExit, match="no attic in deltacompress/"):
        mutants._sources("attic")


def test_tests_lie_as_the_code_does(mutants: ModuleType) -> None:
    assert mutants._tests("numerics") == ["tests/numerics"]
    assert mutants._tests("numerics/grid.py") == ["tests/numerics/test_grid.py"]
    assert mutants._tests("zoo/care/gc.py") == ["tests/zoo"]
    with pytest.raises(SystemExit, match="TESTS="):
        mutants._tests("attic")


def test_only_what_stands_between_quotes_is_wording(mutants: ModuleType) -> None:
    assert mutants._is_wording(['-    raise Error("no file")', '+    raise Error("XXno fileXX")'])
    assert not mutants._is_wording(["-    return a - b", "+    return a + b"])
    assert not mutants._is_wording(['-    told = f"{a}" if a else "b"', '+    told = f"{a}" if not a else "b"'])
