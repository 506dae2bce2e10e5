"""docs/evaluation.md does what it says: its Python runs, its policy parses, and the options it names exist."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main
import yaml

from deltacompress.cli.main import app
from deltacompress.evaluation import Gate, GateFailedError
from deltacompress.evaluation.comparison import METHODS
from deltacompress.evaluation.tasks import _SPEC

if TYPE_CHECKING:
    from pairs import Pair


@pytest.fixture(scope="module")
def text(repo_root: Path) -> str:
    return (repo_root / "docs" / "evaluation.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.usefixtures("lm_eval")
def test_the_python_runs(
    text: str, pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in (("base", pair.base), ("bot", pair.finetuned), ("bot.delta", artifact)):
        shutil.copytree(source, tmp_path / name)
    shutil.copytree(task_dir / "colours", tmp_path / "data" / "intents")
    monkeypatch.chdir(tmp_path)
    short, suite = blocks(text, "python")
    assert len([line for line in short.splitlines() if line]) <= 5
    (tmp_path / "short.py").write_text(short)
    (tmp_path / "suite.py").write_text(suite)
    keeps_its_skills = runpy.run_path("suite.py")["test_the_bot_kept_its_skills"]
    for policy, passes in (("name: lax\nmin_ratio: 1\n", True), ("name: tough\nmin_ratio: 100\n", False)):
        (tmp_path / "gate.yaml").write_text(policy)
        if passes:
            runpy.run_path("short.py")
            keeps_its_skills(tmp_path / "a")
            continue
        with pytest.raises(GateFailedError, match="wanted at least 100x"):
            runpy.run_path("short.py")
        with pytest.raises(AssertionError, match="wanted at least 100x"):
            keeps_its_skills(tmp_path / "b")


def test_the_yaml_is_right(text: str) -> None:
    task, policy = (yaml.safe_load(block) for block in blocks(text, "yaml"))
    _SPEC.validate_python(task)
    assert Gate.parse(policy).policy.require_tasks == ("intents",)


def test_the_options_exist(text: str) -> None:
    command = typer.main.get_command(app)
    known = {"--zoo"}
    for verb in ("eval", "gate", "compare", "compress"):
        known |= {option for parameter in command.commands[verb].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


def test_the_methods_are_told(text: str) -> None:
    for method in set(METHODS.split(",")) - {"int4-24", "int2-24", "sign-24"}:
        assert f"`{method}`" in text
