"""Adapters on the command line: several in one batch, what they hold, and where only an artifact will do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import peft_models
import pytest
import typer
from runtime.adapters.family import Family
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deltacompress.cli.verbs.artifact import inspect, restore, verify
from deltacompress.cli.verbs.generate import generate
from deltacompress.runtime import Runtime

WEIGHTS = "adapter_model.safetensors"
app = typer.Typer()
for one in (generate, inspect, restore, verify):
    app.command()(one)


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def adapters(family: Family, tmp_path: Path) -> tuple[Path, Path]:
    base = family.pair.base
    lora = peft_models.write(base, tmp_path / "lora", "Lora", r=4)
    targets = ["q_proj", "down_proj"]
    return lora, peft_models.write(base, tmp_path / "boft", "BOFT", boft_block_size=4, target_modules=targets)


def together(family: Family, sources: Sequence[Path]) -> Runtime:
    runtime = Runtime.from_base(family.pair.base)
    for path in sources:
        runtime.load(path)
    return runtime


def test_several_answer_in_one_batch(family: Family, adapters: tuple[Path, Path]) -> None:
    lora, boft = adapters
    options = ("w1 w2", "--base", family.pair.base, "--max-new-tokens", 5, "--device", "cpu")
    wanted = together(family, adapters).generate([("lora", "w1 w2"), ("boft", "w1 w2")], 5)
    code, out, _ = run("generate", lora, *options, "--also", f"turned={boft}")
    assert (code, out.splitlines()) == (0, [f"lora: {wanted[0]}", f"turned: {wanted[1]}"])
    code, out, _ = run("generate", lora, *options, "--also", f"turned={boft}", "--json")
    data = json.loads(out)
    assert code == 0
    assert [(one["name"], one["text"]) for one in data["answers"]] == list(zip(("lora", "turned"), wanted, strict=True))
    assert data["text"] == wanted[0]


@pytest.mark.parametrize(
    ("also", "told"),
    [
        (["bot"], "--also bot: is not NAME=SOURCE"),
        (["=x"], "--also =x: is not NAME=SOURCE"),
        (["a=x", "a=y"], "--also: the name a is given twice"),
        (["base=x"], "--also base=x: is taken by the base; give another (NAME=SOURCE)"),
        (["a=gone"], "gone: no such artifact directory"),
    ],
)
def test_others_that_cannot_be(family: Family, adapters: tuple[Path, Path], also: list[str], told: str) -> None:
    more = [part for one in also for part in ("--also", one)]
    code, out, err = run("generate", adapters[0], "w1", "--base", family.pair.base, "--device", "cpu", *more)
    assert (code, out) == (2, "")
    assert told in err


def test_another_one_by_the_name_of_the_artifact(family: Family, adapters: tuple[Path, Path]) -> None:
    lora, boft = adapters
    options = ("--base", family.pair.base, "--device", "cpu", "--also", f"lora={boft}")
    code, out, err = run("generate", lora, "w1", *options)
    assert (code, out) == (2, "")
    assert "--also lora=: is the name of ARTIFACT; give another (NAME=SOURCE)" in err


def test_what_an_adapter_holds(adapters: tuple[Path, Path]) -> None:
    code, out, _ = run("inspect", adapters[1], "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["kind"], data["butterfly_factors"], data["rank"]) == ("boft", 1, None)
    weights = load_file(adapters[1] / WEIGHTS)
    assert data["parameters"] == sum(one.numel() for one in weights.values())
    assert {one["tensor"]: tuple(one["shape"]) for one in data["tensors"]} == {
        name: tuple(one.shape) for name, one in weights.items()
    }
    assert data["bytes"] == sum(file.stat().st_size for file in adapters[1].iterdir())
    code, _, err = run("inspect", adapters[0], "--entropy")
    assert code == 2
    assert "--entropy: is of the codes of an artifact" in err


def test_an_adapter_is_verified_against_its_base(family: Family, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    lora, base = adapters[0], family.pair.base
    code, out, err = run("verify", lora, "--base", base, "--json")
    data = json.loads(out)
    assert (code, data["verified"], data["kind"]) == (0, True, "lora")
    assert "has no recorded hashes" in err
    assert data["digest"] == json.loads(run("inspect", lora, "--json")[1])["digest"]
    weights = load_file(lora / WEIGHTS)
    weights[min(weights)][0, 0] = float("nan")
    save_file(weights, lora / WEIGHTS)
    code, _, err = run("verify", lora, "--base", base)
    assert code == 2
    assert f"{min(weights)} holds NaN" in err


def test_where_only_an_artifact_will_do(family: Family, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, err = run("restore", adapters[0], "--base", family.pair.base, "--out", tmp_path / "out")
    assert code == 2
    assert "a PEFT adapter, not an artifact; serve it" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_what_verify_tells_of_an_adapter(family: Family, adapters: tuple[Path, Path]) -> None:
    lora, base = adapters[0], family.pair.base
    config, weights = lora / "adapter_config.json", load_file(lora / WEIGHTS)
    first = min(weights).rpartition(".lora_")[0]
    save_file({name: one for name, one in weights.items() if not name.startswith(first)}, lora / WEIGHTS)
    code, _, err = run("verify", lora, "--base", base)
    told = f"its file has nothing for 1 of {len(weights) // 2} modules that its config names"
    assert (code, told in " ".join(err.split())) == (0, True)
    assert told in together(family, [lora]).notes[-1]
    save_file(weights, lora / WEIGHTS)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ".*_proj"}))
    told = "target_modules is an expression, which is not run"
    code, _, err = run("verify", lora, "--base", base)
    assert (code, told in err) == (0, True)
    runtime = together(family, [lora])
    assert told in runtime.notes[-1]
    save_file({min(weights): weights[min(weights)]}, lora / WEIGHTS)
    code, _, err = run("verify", lora)
    assert code == 2
    assert "A and B belong together" in err
