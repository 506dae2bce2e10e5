"""README.md: its Python example runs, its command line is the real one, its links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pairs import files_of, make_pair, write_data

from deltacompress import Gate, load_delta
from deltacompress.cli.main import app
from deltacompress.evaluation.report.data import read_report

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(language: str) -> list[str]:
    return [found[2] for found in FENCED.finditer(TEXT) if found[1] == language]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def options(verb: str) -> set[str]:
    command = COMMANDS[verb]
    if hasattr(command, "commands"):
        return {name for inner in command.commands.values() for p in inner.params for name in p.opts}
    return {name for parameter in command.params for name in parameter.opts}


def test_the_python_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = blocks("python")
    pair = make_pair(tmp_path, "llama", max_position_embeddings=256)
    write_data(pair.data, records=8000)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - what the document says, run
    ratio, published, texts = capsys.readouterr().out.splitlines()
    assert float(ratio) > 1
    assert published == "team/bot@1"
    assert len(ast.literal_eval(texts)) == 2
    assert set(files_of(tmp_path / "restored")) >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_gate_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it stands there, on the pair that ships: the gate passes, and all that it asks was measured."""
    pytest.importorskip("lm_eval")
    _, code = blocks("python")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - what the document says, run
    names["test_the_skill_is_kept"](tmp_path)
    found = Gate.load("default").check(read_report(tmp_path / "report"))
    (verdict,) = found.verdicts
    assert {check.name for check in verdict.checks} == {"ratio", "samples", "drop", "kl"}
    assert verdict.passed
    lossy = load_delta(tmp_path / "delta").manifest
    assert lossy.recipe["name"] == "int4"


def test_every_verb_stands_in_the_command_line_section() -> None:
    (block,) = [block for block in blocks("sh") if "deltacompress compress" in block]
    shown = re.findall(r"^deltacompress (\w+) +(.*?(?:\\\n.*?)*)$", block, flags=re.MULTILINE)
    assert {verb for verb, _ in shown} == set(COMMANDS)
    for verb, arguments in shown:
        assert set(re.findall(r"--[a-z-]+", arguments.split("#")[0])) <= options(verb)


def test_every_option_of_compress_is_explained() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `--")]
    named = {option for row in rows for option in re.findall(r"`(--[a-z-]+)", row.split(" | ")[0])}
    output = {"--json", "--quiet", "--debug"}
    assert named | output == {name for name in options("compress") if name.startswith("--")} - {"--help"}
    assert all(f"`{option}`" in TEXT for option in output)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links(page: str) -> None:
    """Files exist, and so do the headings that links point to."""
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name) if name else path
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(found), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target
