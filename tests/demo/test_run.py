"""What `deltacompress demo` may delete: its own earlier output by name, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacompress.demo import run
from deltacompress.errors import OutputError


@pytest.mark.parametrize("stranger", ["thesis.tex", "palindrome.int4-24-my-notes"])
def test_a_directory_with_other_things_is_refused_untouched(tmp_path: Path, stranger: str) -> None:
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / stranger).write_text("precious")
    with pytest.raises(OutputError, match=stranger):
        run._clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["results.json", stranger])


def test_somebody_elses_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(OutputError, match="not the rest of a demo"):
        run._clear(tmp_path)
    assert (tmp_path / "results.json").is_file()


def test_an_earlier_demo_is_cleared(tmp_path: Path) -> None:
    for variant in run.VARIANTS:
        for recipe in run.RECIPES:
            (tmp_path / f"{variant}.{recipe}").mkdir()
            (tmp_path / f"{variant}.{recipe}.restored").mkdir()
    (tmp_path / "results.json").write_text("{}")
    run._clear(tmp_path)
    assert not any(tmp_path.iterdir())
