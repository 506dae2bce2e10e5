"""The runner of `make mutants`: what it mutates, which tests it takes, what it counts as wording."""

from __future__ import annotations

import ast
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
    lossless = mutants._sources("lossless")
    assert "deltacompress/lossless/stream.py" in lossless
    assert "deltacompress/lossless/_gdeflate_child.py" not in lossless  # with faults in it, no test would pass
    with pytest.raises(SystemExit, match="no attic in deltacompress/"):
        mutants._sources("attic")


def test_tests_lie_as_the_code_does(mutants: ModuleType) -> None:
    assert mutants._tests("numerics") == ["tests/numerics"]
    assert mutants._tests("numerics/grid.py") == ["tests/numerics/test_grid.py"]
    assert mutants._tests("zoo/care/gc.py") == ["tests/zoo"]
    with pytest.raises(SystemExit, match="TESTS="):
        mutants._tests("attic")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('raise Error("no file")', 'raise Error("XXno fileXX")'),
        (
            'raise Error(f"{name}: " + ("gone" if gone else "here"))',
            'raise Error(f"{name}: " + ("GONE" if gone else "here"))',
        ),
        ("raise Error(f\"no {', '.join(names)}\")", "raise Error(f\"no {'XX, XX'.join(names)}\")"),
        ('raise broken("no file", 3)', 'raise broken("NO FILE", 3)'),
        ('return FormatError("no file")', 'return FormatError("NO FILE")'),
        ('reporter.note(f"{count} " "left")', 'reporter.note(f"{count} " "LEFT")'),
        ('console.warn("slow")', 'console.warn("XXslowXX")'),
        ('typer.Option("--out", help="Where to.")', 'typer.Option("--out", help="WHERE TO.")'),
        ('def f():\n    "Words."', 'def f():\n    "WORDS."'),
    ],
)
def test_words_of_messages_are_wording(mutants: ModuleType, before: str, after: str) -> None:
    assert mutants._is_wording(ast.parse(before), ast.parse(after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return a - b", "return a + b"),
        ('told = f"{a}" if a else "b"', 'told = f"{a}" if not a else "b"'),
        ('bits = params["bits"]', 'bits = params["XXbitsXX"]'),
        ('parts = {"codes": codes}', 'parts = {"CODES": codes}'),
        ('if spec.grid == "minmax": pass', 'if spec.grid == "MINMAX": pass'),
        ('path = folder / "manifest.json"', 'path = folder / "MANIFEST.JSON"'),
        ('codec = open_codec("zstd")', 'codec = open_codec("ZSTD")'),
        ('typer.Option("--out", help="Where to.")', 'typer.Option("--OUT", help="Where to.")'),
        ('raise Error("no file")', "raise Error(None)"),
        ('raise Error("no file")', 'raise OtherError("no file")'),
        ("raise Error(f\"{params['bits']} bits\")", "raise Error(f\"{params['BITS']} bits\")"),
        ('raise Error("one" if kind == "a" else "two")', 'raise Error("one" if kind == "A" else "two")'),
        ("raise Error(f\"add {option('out')}\")", "raise Error(f\"add {option('OUT')}\")"),
    ],
)
def test_strings_that_do_something_are_faults(mutants: ModuleType, before: str, after: str) -> None:
    assert not mutants._is_wording(ast.parse(before), ast.parse(after))


def test_a_fault_is_shown_beside_the_line_that_it_changes(mutants: ModuleType, tmp_path: Path) -> None:
    written = tmp_path / "a.py"
    written.write_text(
        "class A:\n"
        "    def xǁAǁf__mutmut_orig(self):\n        return self.kind == 'a'\n"
        "    def xǁAǁf__mutmut_1(self):\n        return self.kind == 'XXaXX'\n"
    )
    (before, lines), (after, changed) = mutants._pair(mutants._functions(written), "package.a.xǁAǁf__mutmut_1")
    assert mutants._changes(lines, changed) == [
        "-         return self.kind == 'a'",
        "+         return self.kind == 'XXaXX'",
    ]
    assert not mutants._is_wording(before, after)
