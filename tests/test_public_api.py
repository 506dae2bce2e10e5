from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import deltacompress
from deltacompress import errors

HEAVY = ("accelerate", "datasets", "numpy", "pydantic", "rich", "torch", "transformers", "typer", "yaml")


def test_all_is_sorted_and_without_duplicates() -> None:
    assert deltacompress.__all__ == sorted(set(deltacompress.__all__))


@pytest.mark.parametrize("name", deltacompress.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(deltacompress, name) is not None
    assert name in dir(deltacompress)


def test_every_error_is_public() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(deltacompress.__all__)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING and the lazy table cannot drift apart."""
    tree = ast.parse(Path(deltacompress.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: str(node.module).removeprefix("deltacompress.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted([*declared, "__version__"]) == deltacompress.__all__
    assert {name: home for name, home in declared.items() if home != "errors"} == deltacompress._HOME


def test_no_submodule_can_hide_a_public_name() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(deltacompress.__path__)}
    assert submodules & set(deltacompress.__all__) == set()


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deltacompress.nothing  # noqa: B018


def test_importing_costs_nothing_heavy() -> None:
    code = f"import sys, deltacompress; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
