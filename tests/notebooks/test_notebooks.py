"""The notebooks: stripped, public names only, real commands, and executed whole on the shipped pair.

A kernel of the running interpreter executes each in an empty directory, with a temporary directory of its own; both are
empty again afterwards. What the text of a notebook claims is then asked of its variables.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from deltacompress.cli.main import app

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAGIC = re.compile(r"^[%!].*$", flags=re.MULTILINE)
SHELL = re.compile(r"^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# What to read from each notebook once it ran: an expression of plain data.
PROBES = {
    "01_quickstart": """{
        "passed": verdict.passed, "ratio": ratio, "strict": [check.name for check in strict.failures],
        "caught": type(caught).__name__, "same": twins.same, "samples": twins.samples, "answer": answers[0],
        "scores": {score.subject: score.value for score in report.scores},
    }""",
    "02_anatomy_of_a_delta": """{
        "change": change, "errors": errors, "shares": shares, "stored": stored, "median": median.to_dict(),
        "top16": {what: float(share) for what, share in top16.items()},
    }""",
    "03_choosing_a_recipe": """{
        "pick": pick, "budget": budget, "edge": frontier(table), "table": table.to_dict("index"),
        "tuned": tuned.right, "confirmed": confirmed.to_dict(),
    }""",
    "04_zoo_lineage_gates": """{
        "passed": {one.subject: one.passed for one in result.verdicts}, "exit_codes": exit_codes,
        "published": str(published), "moves": [(move.version, move.rollback) for move in history],
        "relations": sorted(edge.relation for edge in graph.edges), "svg": picture.data[:4],
        "entries": list(there.index), "problems": len(checked.problems), "answer": answer,
    }""",
}


def code_of(path: Path) -> str:
    """All code of a notebook, magics left out."""
    cells = nbformat.read(path, as_version=4).cells
    return MAGIC.sub("", "\n".join(cell.source for cell in cells if cell.cell_type == "code"))


def text_of(path: Path) -> str:
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")


def test_every_notebook_has_a_probe() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(PROBES)


@every_notebook
def test_stripped_and_valid(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert "pip install '.[" in notebook.cells[0].source  # what it needs, before anything else
    assert notebook.cells[-1].source == "scratch.cleanup()"


@every_notebook
def test_imports_public_names(path: Path) -> None:
    for node in ast.walk(ast.parse(code_of(path))):
        assert not (isinstance(node, ast.Import) and any(one.name.startswith("deltacompress") for one in node.names))
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("deltacompress"):
            continue
        module = import_module(str(node.module))
        for one in node.names:
            assert one.name in getattr(module, "__all__", [one.name])
            assert not any(part.startswith("_") for part in [*str(node.module).split("."), one.name])
            assert getattr(module, one.name).__doc__


@every_notebook
def test_commands_are_real(path: Path) -> None:
    root = typer.main.get_command(app)
    lines = "\n".join(SHELL.findall(text_of(path))).replace("\\\n", " ").splitlines()
    commands = [line.split("#")[0].split() for line in lines if line.startswith("deltacompress ")]
    assert commands
    for words in commands:
        command: Any = root
        rest = words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word.split("=")[0] for word in rest if word.startswith("--")} <= options, words


@every_notebook
def test_links(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        assert (path.parent / target).exists(), target


@pytest.mark.slow
@every_notebook
def test_executes_and_holds(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("nbclient", "ipykernel", "lm_eval", "matplotlib"):
        pytest.importorskip(needed)
    found, pictures = execute(path, tmp_path, monkeypatch)
    CHECKS[path.stem](found)
    assert pictures == PICTURES[path.stem]


def execute(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], int]:
    """Run a notebook; what its probe says, and how many pictures it shows."""
    from nbclient import NotebookClient

    here, temporary, spec = tmp_path / "cwd", tmp_path / "tmp", tmp_path / "jupyter" / "kernels" / "tested"
    for folder in (here, temporary, spec):
        folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tested", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch makes it when it is imported
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    probe = f"import json\nprint('PROBE', json.dumps({PROBES[path.stem]}))"
    notebook.cells.append(nbformat.v4.new_code_cell(probe))
    resources = {"metadata": {"path": str(here)}}
    NotebookClient(notebook, timeout=None, kernel_name="tested", resources=resources).execute()
    assert list(here.iterdir()) == []
    assert list(temporary.iterdir()) == []
    streams = [one for one in notebook.cells[-1].outputs if one.output_type == "stream" and one.name == "stdout"]
    told = "".join(one.text for one in streams)  # a busy kernel flushes in the middle of a line
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = sum(bool({"image/png", "image/svg+xml"} & set(one.get("data", ()))) for one in outputs)
    probed: dict[str, Any] = json.loads(told.removeprefix("PROBE "))
    return probed, pictures


def check_quickstart(found: dict[str, Any]) -> None:
    assert found["passed"] is True
    assert found["ratio"] > 7
    assert found["strict"] == ["ratio"]
    assert found["caught"] == "ChecksumError"
    assert found["same"] == found["samples"] == 500
    assert found["scores"]["delta"] > found["scores"]["base"] + 0.4
    assert found["answer"] == " birds"


def check_anatomy(found: dict[str, Any]) -> None:
    errors = found["errors"]
    assert errors["fine-tuned weights, 4 bits"] > 0.8 * found["change"]
    assert errors["delta, 2 bits"] < errors["fine-tuned weights, 4 bits"] / 1.5
    assert errors["delta, 4 bits"] < found["change"] / 5
    assert found["shares"][0] == 0.5
    assert 1 < found["stored"] < 2
    assert found["top16"]["weights"] < found["top16"]["delta"] < 0.95
    weights, outputs = found["median"]["weights"], found["median"]["outputs"]
    assert weights["obs"] > 1.5 * weights["rtn"]
    assert outputs["obs"] < outputs["rtn"] / 2 < outputs["low rank"]


def check_choosing(found: dict[str, Any]) -> None:
    table, pick = found["table"], found["pick"]
    assert pick == "graded"
    assert pick in found["edge"]
    assert table[pick]["kB"] <= found["budget"]
    assert table["int2"]["kB"] < 0.75 * table["int4-24"]["kB"]
    assert table["int2"]["KL low"] < table["int4-24"]["KL high"]
    assert "int4-24" not in found["edge"]
    direct = table.pop("sparsegpt-direct-4bit")
    for row in table.values():
        assert row["KL"] < direct["KL"] / 10
        assert row["kB"] < direct["kB"]
        assert row["right"] > direct["right"] + 20
    assert found["confirmed"]["KL"] < 2 * table[pick]["KL high"]
    assert abs(found["confirmed"]["change"]) < 3


def check_zoo(found: dict[str, Any]) -> None:
    assert found["passed"] == {"sign-24": False, "int2": True}
    assert found["exit_codes"] == {"sign-24": 1, "int2": 0}
    assert found["published"] == "demo/majority@2"
    assert found["moves"] == [[1, False], [2, False], [1, True], [2, False]]
    assert found["relations"] == ["finetune", "finetune", "quantized", "quantized", "recompressed"]
    assert found["svg"] == "<svg"
    assert found["problems"] == 0
    assert found["entries"] == ["demo/base@1", "demo/majority@1", "demo/palindrome@1"]
    assert found["answer"] == " birds"


CHECKS = {
    "01_quickstart": check_quickstart,
    "02_anatomy_of_a_delta": check_anatomy,
    "03_choosing_a_recipe": check_choosing,
    "04_zoo_lineage_gates": check_zoo,
}
PICTURES = {"01_quickstart": 1, "02_anatomy_of_a_delta": 6, "03_choosing_a_recipe": 3, "04_zoo_lineage_gates": 1}
