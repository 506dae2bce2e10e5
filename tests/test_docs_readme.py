"""README.md, docs/cli.md, docs/python.md: the Python runs, the command line is the real one, links lead somewhere."""

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
from deltacompress.cli.verbs.shipped import ADVICE
from deltacompress.evaluation.report.data import read_report
from deltacompress.files.content import list_content

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(text: str, language: str) -> list[str]:
    return [found[2] for found in FENCED.finditer(text) if found[1] == language]


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
    code, sized, _, job = blocks(PYTHON, "python")
    pair = make_pair(tmp_path, "llama", max_position_embeddings=256)
    write_data(pair.data, records=8000)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/python.md", "exec"), {})  # noqa: S102 - what the document says, run
    ratio, published, texts = capsys.readouterr().out.splitlines()
    assert float(ratio) > 1
    assert published == "team/bot@1"
    assert len(ast.literal_eval(texts)) == 2
    small = sized.replace("target_ratio=10", 'max_size="1GB"')  # a tiny model is mostly frames
    exec(compile(small, "docs/python.md", "exec"), {})  # noqa: S102
    assert load_delta("delta-10x").summary()["ratio"] > 1
    capsys.readouterr()
    exec(compile(job, "docs/python.md", "exec"), {})  # noqa: S102
    assert float(capsys.readouterr().out) > 1
    assert load_delta("delta-int4").manifest.recipe["name"] == "int4"
    assert set(files_of(tmp_path / "restored")) >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_gate_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it stands there, on the pair that ships: the gate passes, and all that it asks was measured."""
    pytest.importorskip("lm_eval")
    _, _, code, _ = blocks(PYTHON, "python")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/python.md", "exec"), names)  # noqa: S102 - what the document says, run
    names["test_the_skill_is_kept"](tmp_path)
    found = Gate.load("default").check(read_report(tmp_path / "report"))
    (verdict,) = found.verdicts
    assert {check.name for check in verdict.checks} == {"ratio", "samples", "drop", "drop shown"}
    assert verdict.passed
    lossy = load_delta(tmp_path / "delta").manifest
    assert lossy.recipe["name"] == "int4"


def shown(block: str) -> list[tuple[str, str]]:
    """Verb and arguments of each command line of a block."""
    return re.findall(r"^deltacompress (\w+) +(.*?(?:\\\n.*?)*)$", block, flags=re.MULTILINE)


def told(commands: dict[str, Any]) -> list[tuple[str, str]]:
    """Each command and its line of the help."""
    return [(name, " ".join((one.help or "").split("\n\n")[0].split())) for name, one in commands.items()]


def test_every_verb_stands_in_the_command_line_section() -> None:
    (block,) = [block for block in blocks(CLI, "sh") if "deltacompress compress" in block]
    assert {verb for verb, _ in shown(block)} == set(COMMANDS)


@pytest.mark.parametrize("text", [README, CLI], ids=["README.md", "cli.md"])
def test_every_command_line_has_real_options(text: str) -> None:
    lines = [line for block in blocks(text, "sh") for line in shown(block)]
    assert {"compress", "verify", "restore"} <= {verb for verb, _ in lines}
    for verb, arguments in lines:
        assert set(re.findall(r"--[a-z-]+", arguments.split("#")[0])) <= options(verb)


def test_the_table_of_verbs_says_what_the_help_says() -> None:
    """In the order of `deltacompress --help`, each with its line there and a page to go on."""
    rows = re.findall(r"^\| \[`(\w+)`\]\(docs/[^)]+\) \| (.*) \|$", README, flags=re.MULTILINE)
    assert rows == told(COMMANDS)


def test_the_parts_of_bench_and_zoo_are_those_of_the_help() -> None:
    bench = CLI.split("\n## Parts of bench\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \| (.*) \|$", bench, flags=re.MULTILINE) == told(COMMANDS["bench"].commands)
    zoo = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8").split("\n## Verbs\n")[1].split("\n## ")[0]
    first = [line.split(" | ")[0] for line in zoo.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([a-z]+)", " ".join(first))) == sorted(COMMANDS["zoo"].commands)


def test_the_table_of_recipes_is_the_programs_advice() -> None:
    """The same recipes as `deltacompress recipes` advises, in the same order."""
    table = README.split("| recipe | for whom |\n")[1].split("\n\n")[0]
    shipped = {path.stem for path in list_content("calibration/recipes", ".yaml")}
    advised = [word for word in re.findall(r"[\w-]+", ADVICE) if word in shipped]
    assert re.findall(r"`([\w-]+)`", " ".join(line.split(" | ")[0] for line in table.splitlines())) == advised


def test_the_help_of_make_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    named = re.findall(r"^# +make ([a-z-]+)", makefile.split("\n\n")[0], flags=re.MULTILINE)
    assert sorted([*named, "help"]) == sorted(targets.split())
    shell = "\n".join(blocks(README, "sh"))
    assert re.findall(r"^make ([a-z-]+)", shell, flags=re.MULTILINE) == named[:2]


def test_every_option_of_compress_is_explained() -> None:
    page, output = CLI.split("\n## Output\n")
    named, shared = (
        {
            option
            for line in part.splitlines()
            if line.startswith("| `--")
            for option in re.findall(r"`(--[a-z-]+)", line.split(" | ")[0])
        }
        for part in (page, output)
    )
    assert shared == {"--json", "--quiet", "--debug"}
    assert named | shared == {name for name in options("compress") if name.startswith("--")} - {"--help"}


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
