"""The house itself: rooms that a newcomer can keep in mind, and imports that go one way, file by file.

Which room may import which is import-linter's (pyproject.toml); this holds what it has no word for.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import file_index
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "deltacompress"
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 12, 300, 60


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, wherever in it, also for annotations alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{one.name}" for one in node.names} & set(FILES)
            found |= inside or {node.module}
    return found & set(FILES)


def test_no_circle_of_files() -> None:
    """Lazy imports and imports for annotations count: a circle of names is a circle for whoever reads.

    Left out: the package's own face, which every `import deltacompress.x` runs first and which names what lies below.
    """
    graph = {name: imported(path) - {"deltacompress"} for name, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_the_walk_sees_a_circle(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f():\n    from deltacompress.zoo import zoo\n    import deltacompress.errors\n")
    assert imported(file) == {"deltacompress.zoo.zoo", "deltacompress.errors"}


def test_no_folder_is_crowded() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.parent.name != "__pycache__":
            folders[path.parent] += 1
    crowded = {folder.name: count for folder, count in folders.items() if count > MOST_FILES}
    assert crowded == {}


def test_no_file_is_long() -> None:
    long = {name: lines for name, path in FILES.items() if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert long == {}


def test_no_function_is_long() -> None:
    """Signature and docstring count."""
    long = {
        f"{name}.{node.name}"
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }
    assert long == set()


def test_every_file_says_what_it_is() -> None:
    assert [name for name, path in FILES.items() if not file_index.summary(path)] == []


def test_the_index_of_files_is_fresh() -> None:
    """`python tools/file_index.py` writes docs/files.md."""
    assert file_index.INDEX.read_text(encoding="utf-8") == file_index.index()


def test_the_index_names_every_file() -> None:
    folders = re.findall(r"^## (.*)/$", file_index.index(), re.MULTILINE)
    assert sorted(folders) == sorted(
        path.parent.relative_to(PACKAGE.parent).as_posix() for path in FILES.values() if path.name == "__init__.py"
    )
    assert len(re.findall(r"^- `", file_index.index(), re.MULTILINE)) == len(FILES) - len(folders)


def test_every_file_that_is_named_is_there(repo_root: Path) -> None:
    """In docs, comments and docstrings: `room/file.py` is the end of some path of the checkout."""
    places = [repo_root / name for name in ("deltacompress", "tests", "tools")]
    have = [str(path.relative_to(repo_root)) for place in places for path in place.rglob("*.py")]
    texts = [*FILES.values(), *(repo_root / "docs").glob("*.md"), repo_root / "README.md"]
    lost = {
        f"{text.name}: {name}"
        for text in texts
        for name in re.findall(r"(?<![\w/.{])(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b", text.read_text(encoding="utf-8"))
        if not any(path == name or path.endswith(f"/{name}") for path in have)
    }
    assert lost == set()
