"""The tests marked `interpreted`, whichever file they are in: few processes in which Triton interprets run them all.

Few, because each imports torch, Triton and the models before it runs anything.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from interpreted import INTERPRETED

TESTS = Path(__file__).resolve().parent
MARKS = {("interpreted", "inside"), ("kernels.adapter_cases", "PLACES")}
"""What puts the mark on a test: the module that has it, and its name."""
GROUPS = 2


def imported(path: Path) -> set[tuple[str, str]]:
    """What a file takes from which module."""
    nodes = [one for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(one, ast.ImportFrom)]
    return {(node.module or "", one.name) for node in nodes for one in node.names}


def passed(report: Path) -> set[Path]:
    """The files of which a test passed: it has nothing to tell."""
    cases = ElementTree.parse(report).iter("testcase")
    return {TESTS.parent / case.attrib["file"] for case in cases if not list(case)}


FILES = sorted(
    (path for path in TESTS.rglob("test_*.py") if imported(path) & MARKS),
    key=lambda path: (-path.stat().st_size, path),
)
"""Long ones first: dealt out in turns, groups take about as long as each other."""


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_in_a_process_that_interprets(group: int, tmp_path: Path) -> None:
    """Of each file some pass, and none fails."""
    if INTERPRETED:
        pytest.skip("this is that process")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    files, report = FILES[group::GROUPS], tmp_path / "report.xml"
    told = ["-q", "--tb=short", f"--junitxml={report}", "-o", "junit_family=xunit1"]  # which names the files
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "-m", "interpreted", *told, *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert passed(report) == set(files)


def test_none_is_left_out(request: pytest.FixtureRequest) -> None:
    """Of all tests of this run, wherever they are."""
    marked = {item.path for item in request.session.items if item.get_closest_marker("interpreted")}
    assert marked <= set(FILES)
