"""docs/evaluation.md does what it says: its Python runs, its policy parses, and the options it names exist."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import typer.main
import yaml

from deltacompress.cli.main import app
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.evaluation import Gate, GateFailedError
from deltacompress.evaluation.methods.names import METHODS, load_method
from deltacompress.evaluation.tasks.load import _SPEC, SuiteSpec, read_spec
from deltacompress.files.content import content_path, list_content
from deltacompress.types import TensorKind

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


def test_shipped_gates_are_what_the_table_says(text: str) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(path.stem for path in list_content("evals/gates", ".yaml"))
    for name, samples, points, ratio in rows:
        asked = Gate.load(name).policy.model_dump(exclude={"description"}, exclude_defaults=True)
        assert asked == {
            "name": name,
            "min_samples": int(samples),
            "drop": {"max": int(points) / 100, "bound": "probability"},
            "min_ratio": float(ratio),
        }


def test_what_the_text_says_of_the_default_gate(text: str) -> None:
    """What untouched deltas lose lies below its limit."""
    policy = Gate.load("default").policy
    assert policy.drop is not None
    rows = re.findall(
        r"^\| \w+(?: \(demo\))? \| (generate|choose) \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", text, re.MULTILINE
    )
    assert len(rows) >= 3
    for kind, untouched, least, most in rows:
        assert float(untouched) <= 100 * policy.drop.max
        assert float(least) <= float(most)
        assert kind == "generate" or float(least) > 100 * policy.drop.max


BASELINES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gptq-direct-4bit": (
        "full",
        {
            "codec": "obs",
            "bits": 4,
            "group_size": 128,
            "activation_order": False,
            "asymmetric": 0.0,
            "refine_sweeps": 0,
        },
        {"codec": "exact"},
    ),
    "rtn-direct-4bit": ("full", {"codec": "rtn", "bits": 4, "group_size": 128}, {"codec": "exact"}),
    "rtn-4bit": ("delta", {"codec": "rtn", "bits": 4, "sparsity": "2:4"}, {"codec": "rtn", "bits": 4}),
    "rtn-2bit": ("delta", {"codec": "rtn", "bits": 2, "sparsity": "2:4"}, {"codec": "rtn", "bits": 2}),
    "bitdelta": ("delta", {"codec": "bitdelta"}, {"codec": "exact"}),
    "sign-rtn": ("delta", {"codec": "rtn", "bits": 1, "grid": "midrise"}, {"codec": "exact"}),
}
"""What the page says of each: scope, linear weights, head and embedding; the rest is exact, all else a default."""


@pytest.mark.parametrize("name", [path.stem for path in list_content("evals/baselines", ".yaml")])
def test_baselines_are_what_the_text_says(name: str) -> None:
    scope, linear, outer = BASELINES[name]
    recipe = load_method(name)
    assert (recipe.scope, recipe.sequential) == (scope, name != "gptq-direct-4bit")
    assert recipe.calibration == CalibrationSpec()
    for kind in get_args(TensorKind):
        rule = recipe.rule_for("model.some.weight", kind)
        wanted = linear if kind == "linear" else outer if kind in ("head", "embedding") else {"codec": "exact"}
        assert rule.model_dump(exclude={"kind", "name"}, exclude_defaults=True) | {"codec": rule.codec} == wanted


def test_shipped_tasks_are_what_the_table_says(text: str) -> None:
    """What is asked of whom, and what of lm-eval's many metrics counts."""
    rows = re.findall(r"^\| `([\w-]+)` \| (choose|generate|`\w+`, \w+(?:, [\w-]+)?) \| (\d) \|", text, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(path.stem for path in list_content("evals/tasks", ".yaml"))
    for name, how, shots in rows:
        spec = read_spec(content_path("evals", "tasks", f"{name}.yaml"))
        assert spec.few_shot == int(shots)
        if isinstance(spec, SuiteSpec):
            suite, metric, *filtered = how.split(", ")
            assert (f"`{spec.suite}`", spec.metric, spec.filter) == (suite, metric, *(filtered or ["none"]))
            continue
        assert spec.kind == how
        assert (spec.match, spec.stop, spec.max_new_tokens) == ("tokens", (), None)
        assert (spec.prompt, spec.completion, spec.choices) == ("{{prompt}}", "{{completion}}", "choices")
        assert spec.data == (f"registry/demo/data/{name.removeprefix('demo-')}" if "demo-" in name else None)
