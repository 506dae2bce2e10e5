"""docs/quality.svg is what tools/quality_picture.py draws from the table of docs/benchmarks.md, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest


@pytest.fixture
def picture(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality_picture", repo_root / "tools" / "quality_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quality_picture", module)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def test_the_committed_picture_shows_the_committed_table(picture: ModuleType, repo_root: Path) -> None:
    table = (repo_root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert (repo_root / "docs" / "quality.svg").read_text(encoding="utf-8") == picture.draw(picture.read(table))


TABLE = """
| task | method | ratio |
|---|---|---|
| wikisql | int4-24 | 9x |

| method | ratio | wikisql | change | p | KL | ratio | palindrome | change | p | KL |
|---|---|---|---|---|---|---|---|---|---|---|
| fine-tuned | | 33.2 | | | | | 52.3 | | | |
| `sign-24` (one bit) | 11.42x | 30.4 | -2.8 [-4.3, -1.4] | 0 | 0.012 | 12.53x | 49.5 | +0.8 [-1.7, +3.3] | 1 | 0 |

| method | ratio | wikisql |
|---|---|---|
| `int2-24` | 1x | 2 |
"""


def test_what_is_read(picture: ModuleType) -> None:
    """Of one table, only what was compressed: ratio, change and both ends of its interval, with their signs."""
    point = picture.Point
    assert picture.read(TABLE) == {
        "wikisql": [point("sign-24", 11.42, -2.8, -4.3, -1.4)],
        "palindrome": [point("sign-24", 12.53, 0.8, -1.7, 3.3)],
    }


def test_every_method_has_a_dot_within_the_picture(picture: ModuleType, repo_root: Path) -> None:
    found = picture.read((repo_root / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    methods = {task: [one.method for one in points] for task, points in found.items()}
    assert methods["wikisql"] == methods["palindrome"]
    assert len(methods["wikisql"]) == len(set(methods["wikisql"])) == 10
    drawn = ElementTree.fromstring(picture.draw(found))
    words = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    for points in found.values():
        for one in points:
            assert 0 < one.ratio < picture.MOST_RATIO
            assert -picture.MOST_LOST < one.low <= one.change <= one.high < 2
            assert words.count(one.method) == len(found)
