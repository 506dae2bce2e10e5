"""README.md: its Python example runs, its command line is the real one, its links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pairs import files_of, make_pair, write_data

from deltacompress import GateFailedError, compress
from deltacompress.cli.main import app

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
    pytest.importorskip("lm_eval")
    _, code = blocks("python")
    pair = make_pair(tmp_path, "llama", max_position_embeddings=256)
    write_data(pair.data, records=8000)
    skills = tmp_path / "data" / "skills"
    skills.mkdir(parents=True)
    rows = [{"prompt": f"w{i} w{i + 1} ", "completion": f"w{i % 3}", "choices": ["w0", "w1", "w2"]} for i in range(300)]
    (skills / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    compress("base", "finetuned", recipe="lossless", out="delta")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - what the document says, run
    with pytest.raises(GateFailedError, match="ratio"):  # every bit kept, so it is not small: the one thing to fail
        names["test_the_bot_kept_its_skills"](tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    failed = [check["name"] for verdict in report["verdicts"] for check in verdict["checks"] if not check["passed"]]
    assert failed == ["ratio"]


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
