"""Every file of the package in one line, from its docstring: `python tools/file_index.py` writes docs/files.md."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs" / "files.md"
HEAD = """# Every file in one line

The rooms and how they hang together: [architecture.md](architecture.md). This page is made of the files' own
docstrings: `python tools/file_index.py` writes it, and `tests/test_house.py` fails where it is stale.
"""


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, in one line; empty without one."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def section(folder: Path) -> str:
    """A folder as a heading, what its __init__ says, and a line for each other file."""
    name = folder.relative_to(ROOT).as_posix()
    lines = [f"\n## {name}/", "", *textwrap.wrap(summary(folder / "__init__.py"), 120, break_on_hyphens=False), ""]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            entry = f"- `{path.name}`: {summary(path)}"
            lines += textwrap.wrap(entry, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).rstrip() + "\n"


def index() -> str:
    """The whole page: folders in the order of their paths, so that a room stands above what lies in it."""
    folders = sorted(path.parent for path in (ROOT / "deltacompress").rglob("__init__.py"))
    return HEAD + "".join(section(folder) for folder in folders)


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
