from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from deltacompress.errors import InputError
from deltacompress.files import content
from deltacompress.files.content import FOLDERS, content_path, list_content


def test_the_checkout_is_found(repo_root: Path) -> None:
    assert content_path("calibration") == repo_root / "calibration"
    assert content_path("registry", "README.md").is_file()


def test_the_packaged_copy_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deltacompress"
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (package / "_content" / folder).mkdir(parents=True)
    monkeypatch.setattr(content, "_PACKAGE", package)
    assert content_path("evals") == package / "_content" / "evals"


def test_neither_copy_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_PACKAGE", tmp_path / "deltacompress")
    with pytest.raises(InputError, match="reinstall"):
        content_path("evals")


def test_a_missing_file_names_what_is_there() -> None:
    with pytest.raises(InputError, match=r"no shipped content registry/nothing\.json; beside it: .*README\.md"):
        content_path("registry", "nothing.json")


@pytest.mark.parametrize("parts", [(), ("docs",), ("registry", "..", "pyproject.toml"), ("registry", "/etc")])
def test_only_content_can_be_asked_for(parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="content_path"):
        content_path(*parts)


def test_list_content_is_sorted_and_filtered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = tmp_path / "calibration" / "recipes"
    recipes.mkdir(parents=True)
    (tmp_path / "evals").mkdir()
    (tmp_path / "registry").mkdir()
    for name in ("b.yaml", "a.yaml", "c.json"):
        (recipes / name).write_text("")
    (recipes / "folder.yaml").mkdir()
    monkeypatch.setattr(content, "_PACKAGE", tmp_path / "deltacompress")
    assert [path.name for path in list_content("calibration/recipes", ".yaml")] == ["a.yaml", "b.yaml"]


def test_content_folders_hold_no_code(repo_root: Path) -> None:
    assert [path for folder in FOLDERS for path in (repo_root / folder).rglob("*.py")] == []


def test_the_wheel_carries_the_content(repo_root: Path, tmp_path: Path) -> None:
    if find_spec("build") is None or find_spec("hatchling") is None:
        pytest.skip("needs build and hatchling (extra: dev)")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, repo_root],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    shipped = {f"deltacompress/_content/{path.relative_to(repo_root)}" for path in content_files(repo_root)}
    assert shipped
    assert {name for name in names if name.startswith("deltacompress/_content/")} == shipped
    assert {"deltacompress/py.typed", "deltacompress/cli/main.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)

    # What is installed from it finds its own copy, not a checkout.
    found = subprocess.run(
        [sys.executable, "-c", "from deltacompress.files.content import content_root; print(content_root())"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == tmp_path / "site" / "deltacompress" / "_content"


def content_files(root: Path) -> list[Path]:
    """The content a clone holds: what git tracks, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: cannot tell content from leftovers")
    return [root / line for line in listed.stdout.splitlines()]
