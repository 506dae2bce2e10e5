"""What is printed, and to whom: readers that leave, full disks, terminals that obey, locales that know few letters."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.text import Text

from deltacompress.cli.shown import render
from deltacompress.cli.shown.console import Console, OutputOptions, print_error
from deltacompress.cli.shown.progress import RichReporter
from deltacompress.escape import escape

EVIL = "a\x1b[2Jb\x9bc\u202ed\re\nf\u200bg\x07"
SAFE = "a\\x1b[2Jb\\x9bc\\u202ed\\re\\nf\\u200bg\\x07"
WORKS = """
import sys
from types import ModuleType, SimpleNamespace
sys.modules["deltacompress.artifact.delta"] = room = ModuleType("artifact")
room.load_delta = lambda path: SimpleNamespace(summary=lambda **_: {"name": "x" * %d, "tensors": [], "parts": []})
from deltacompress.cli.program import program
sys.argv = ["deltacompress", "inspect", "x", %s]
program()
"""


def shell(line: str, code: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """(exit code of the program, stderr) of a line of bash in which $run is the program."""
    done = subprocess.run(
        ["bash", "-c", f'run() {{ "$PYTHON" -c "$CODE"; }}; {line}'],
        env=os.environ | {"PYTHON": sys.executable, "CODE": code} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", ['"--json"', ""])
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_reader_that_leaves_is_no_failure(options: str, size: int) -> None:
    """The work was done: its exit code stands, and nobody is told."""
    assert shell("run | head -c 0; exit ${PIPESTATUS[0]}", WORKS % (size, options)) == (0, "")


@pytest.mark.parametrize("options", ['"--json"', ""])
def test_no_standard_output_at_all(options: str) -> None:
    warning = "warning: standard output is closed, so the result is not printed\n"
    assert shell("run >&-", WORKS % (10, options)) == (0, warning)


@pytest.mark.parametrize("options", ['"--json"', ""])
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_below_standard_output_is_one_line(options: str, size: int) -> None:
    code, told = shell("run > /dev/full", WORKS % (size, options))
    assert code == 2
    fields = ("standard output", "No space left on device", "the work is done, print its result to another place")
    if options:
        error = json.loads(told)["error"]
        assert (error["where"], error["what"], error["way_out"]) == fields
        assert told.count("\n") == 1
    else:
        assert told == "error: {}: {}; {}\n".format(*fields)


@pytest.mark.parametrize("option", ["--help", "-V"])
def test_a_help_that_cannot_be_written_is_one_line(option: str) -> None:
    code = f"import sys; sys.argv = ['deltacompress', '{option}']; import deltacompress.cli.program as p; p.program()"
    told = "error: standard output: No space left on device; print to another place\n"
    assert shell("run > /dev/full", code) == (2, told)
    assert shell("run | head -c 0; exit ${PIPESTATUS[0]}", code) == (0, "")


@pytest.mark.parametrize("where", ["2>&-", "2> /dev/full", "2> >(exec true)"])
def test_nobody_reads_what_is_said(where: str) -> None:
    """Neither notes and progress nor errors: only the exit code can tell then."""
    talks = (
        "from deltacompress.cli.shown.console import Console, OutputOptions, run\nimport sys, time\n"
        "def work():\n    console = Console(OutputOptions())\n    time.sleep(0.2)\n    console.note('a')\n"
        "    with console.progress() as reporter:\n        reporter.phase('one', 2)\n        reporter.note('b')\n"
        "        reporter.step('c')\n    raise ValueError\n"
        "code = run(work, debug=False)\nassert code == 70\n"
        "from deltacompress.cli.program import _flush\n_flush()\nsys.exit(5)"
    )
    assert shell(f"run {where}", talks)[0] == 5


def test_what_a_terminal_would_obey_is_escaped_wherever_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    console = Console(OutputOptions())
    tables = [
        render.summary(EVIL, {EVIL: EVIL}),
        render.rows(EVIL, [{"name": EVIL, EVIL: 1}]),
        render.rows(EVIL, []),
        Text(EVIL.replace("\n", "").replace("\r", "")),  # what no table escaped
    ]
    for table in tables:
        console.result({}, lambda table=table: table)
    console.note(EVIL)
    console.warn(EVIL)
    print_error(EVIL)
    with RichReporter() as reporter:
        reporter.phase(EVIL, 2)
        reporter.step(EVIL)
        reporter.note(EVIL)
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        for bad in ("\x1b[2J", "\x9b", "\u202e", "\u200b", "\x07"):
            assert bad not in text
        assert "a\\x1b[2Jb\\x9bc\\u202ed" in text
    assert captured.out.count("a\\x1b[2Jb") == 1 + 2 + 2 + 1 + 1


def test_what_a_figure_means_is_told_where_it_has_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"kl_on_calibration": 0.5, "seconds": None, "rows": [{"loss": None, "kept": 1.0}, {"loss": 0.1}]}
    notes = {"kl_on_calibration": "A", "seconds": "B", "loss": "C", "kept": "D", "other": "E"}
    console = Console(OutputOptions())
    console.result(data, lambda: render.summary_and_rows("title", data, table="rows", notes=notes))
    assert capsys.readouterr().out.endswith("\nkl on calibration: A\nloss: C\nkept: D\n")


def test_escaping_keeps_what_can_be_seen() -> None:
    assert escape(EVIL) == SAFE
    assert escape("Müller/模型 (1).safetensors") == "Müller/模型 (1).safetensors"
    assert escape("a\tb\nc\x1b", keep="\n\t") == "a\tb\nc\\x1b"


def test_text_of_a_model_is_escaped_for_a_terminal_and_left_alone_for_a_file(tmp_path: Path) -> None:
    imports = "from deltacompress.cli.shown.console import Console, OutputOptions"
    code = f"{imports}\nConsole(OutputOptions()).write({EVIL!r} + '\\t.')"
    file = tmp_path / "out"
    with file.open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert file.read_bytes().decode() == EVIL + "\t."
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert shown.replace("\r\n", "\n").expandtabs() == (SAFE.replace("\\n", "\n") + "\t.").expandtabs()


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_a_locale_that_knows_few_letters(locale: Mapping[str, str]) -> None:
    code = r"""
from deltacompress.cli.main import _print_any_path
_print_any_path()
from deltacompress.cli.shown import render
from deltacompress.cli.shown.console import Console, OutputOptions, print_error
console = Console(OutputOptions())
console.result({}, lambda: render.rows("\u251c", [{"n\xe4me": "\u6a21", "x": 1}]))
console.write("\u6a21\n")
print_error("M\xfcller")
console.note("\xb1")
with console.progress() as reporter:
    reporter.phase("gr\xf6\xdfe", 2)
    reporter.note("\xe9")
"""
    code_and_told = shell("run >&2", code, locale)
    assert code_and_told[0] == 0, code_and_told[1]
    for escaped in ("\\u251c", "M\\xfcller", "\\xb1\n", "n\\xe4me", "\\u6a21\n", "gr\\xf6\\xdfe", "\\xe9\n"):
        assert escaped in code_and_told[1]
