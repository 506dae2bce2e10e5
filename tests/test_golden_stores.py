"""A zoo and a report written by earlier versions of the program: today's must read them, and say the same of them.

tests/golden_stores/make_stores.py wrote them.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from deltacompress.artifact.restoration import restore
from deltacompress.evaluation import read_report
from deltacompress.zoo import Zoo

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "golden_stores"))

from make_stores import judged, read_zoo  # noqa: E402

STORES = TESTS / "golden_stores" / "v1"
ADAPTERS = TESTS / "golden_stores" / "v2"
EXPECTED = json.loads((STORES / "expected.json").read_text())


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    with tarfile.open(STORES / "zoo.tar.xz") as tar:
        tar.extraction_filter = lambda member, _path: member  # ours, with read-only files; before 3.11.4 nothing asks
        tar.extractall(tmp_path)
    return Zoo.open(tmp_path / "zoo")


def test_an_old_zoo_verifies_and_says_what_it_said(zoo: Zoo) -> None:
    assert read_zoo(zoo) == EXPECTED["zoo"]


def test_its_entries_are_pulled_and_restored(zoo: Zoo, tmp_path: Path) -> None:
    pulled = zoo.pull("team/tiny@prod", tmp_path / "pulled")
    restored = restore(pulled, base=TESTS / "golden" / "v1" / "base", out=tmp_path / "restored")
    assert (restored / "config.json").is_file()


def test_a_removed_version_comes_back(zoo: Zoo) -> None:
    zoo.undelete("team/tiny@1")
    assert zoo.resolve("team/tiny@1").version == 1
    assert zoo.verify().ok


def test_an_old_report_is_judged_as_it_was() -> None:
    assert judged(read_report(STORES / "report")) == EXPECTED["report"]


def test_an_old_report_of_an_adapter_is_judged_as_it_was() -> None:
    found = read_report(ADAPTERS / "report")
    assert (found.schema_version, found.subject("lora").role) == (2, "adapter")
    assert judged(found) == json.loads((ADAPTERS / "expected.json").read_text())["report"]


@pytest.mark.parametrize("folder", [STORES, ADAPTERS])
def test_they_stay_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 70_000
