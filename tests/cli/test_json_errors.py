"""Under --json an error is one JSON object on stderr, in the place of its line; stdout stays empty."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltacompress.cli import interrupts
from deltacompress.cli.main import main
from deltacompress.cli.shown.console import print_failure
from deltacompress.cli.shown.failures import in_json
from deltacompress.errors import FormatError, InputError, Interrupted
from deltacompress.evaluation.gate.rules import GateFailedError

ODD = "\x1b[2J\x7f\udcff\u202eü"

Told = Callable[..., dict[str, Any]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """What `inspect` tells where opening the artifact raises an error; and the code it ends with."""

    def run(error: BaseException, *options: str) -> dict[str, Any]:
        def load_delta(path: Path) -> None:
            raise error

        room = ModuleType("deltacompress.artifact.delta")
        vars(room).update(load_delta=load_delta)
        monkeypatch.setitem(sys.modules, room.__name__, room)
        code = main(["inspect", "x", "--json", *options])
        captured = capsys.readouterr()
        assert captured.out == ""
        *before, last = captured.err.splitlines()
        assert bool(before) == ("--debug" in options)
        assert last.isascii()
        assert last.isprintable()
        fields: dict[str, Any] = json.loads(last)
        assert list(fields) == ["error"]
        assert fields["error"].pop("exit_code") == code
        return fields["error"] | {"code": code}

    return run


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (
            InputError("no such artifact", where="a/b", way_out="give one"),
            ("InputError", "a/b", "no such artifact", "give one", 2),
        ),
        (
            FormatError("part x: two\nlines", where="m.json", way_out="copy it; or not"),
            ("FormatError", "m.json", "part x: two\nlines", "copy it; or not", 3),
        ),
        (GateFailedError("lost too much"), ("GateFailedError", None, "lost too much", None, 1)),
        (Interrupted("interrupted", way_out="resume"), ("Interrupted", None, "interrupted", "resume", 2)),
        (KeyboardInterrupt(), ("Interrupted", None, "interrupted", "run it again", 2)),
        (
            ZeroDivisionError("by zero"),
            ("internal", None, "ZeroDivisionError: by zero", "run again with --debug for the traceback", 70),
        ),
        (
            PermissionError(13, "Permission denied", "/data"),
            ("InputError", "/data", "Permission denied", "mend that or give another path", 2),
        ),
        (
            MemoryError("8 GB"),
            ("BackendError", None, "out of memory (8 GB)", "free some, or ask for less at once", 2),
        ),
        (InputError("odd", where=ODD), ("InputError", ODD, "odd", None, 2)),
    ],
)
def test_an_error_is_its_fields(error: BaseException, fields: tuple[object, ...], told: Told) -> None:
    assert tuple(told(error)[key] for key in ("type", "where", "what", "way_out", "code")) == fields


def test_a_traceback_comes_before_it(told: Told) -> None:
    assert told(ValueError("bug"), "--debug") == {
        "type": "internal", "where": None, "what": "ValueError: bug", "way_out": None, "code": 70
    }  # fmt: skip


def test_an_artifact_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "inspect", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.err)["error"]
    assert (captured.out, error["type"], error["where"]) == ("", "InputError", str(tmp_path / "none"))
    assert error["what"] == "no such artifact directory"
    assert error["way_out"].startswith("give one that `compress` published")


@pytest.mark.parametrize(
    ("argv", "what", "way_out"),
    [
        (["inspect", "--json"], "Missing argument 'ARTIFACT'", "see deltacompress inspect --help"),
        (["--json", "nonsense"], "No such command 'nonsense'", "see deltacompress --help"),
        (
            ["inspect", "x", "--nonsense", "--json"],
            "No such option: --nonsense",
            "usage: deltacompress inspect ARTIFACT [OPTIONS]; see deltacompress inspect --help",
        ),
    ],
)
def test_a_command_line_that_cannot_be_read(
    argv: list[str], what: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err) == {
        "error": {"type": "UsageError", "where": None, "what": what, "way_out": way_out, "exit_code": 2}
    }


def test_an_empty_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "pull", "--json", "", "b"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error = json.loads(captured.err)["error"]
    assert error["what"] == "NAME is empty, perhaps a variable of the shell that is not set"
    assert error["way_out"] == "give it a value"


def test_after_two_dashes_it_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--", "--json", "more"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_signal() -> None:
    done = _run(
        "import signal, sys, time\nfrom types import ModuleType\nfrom deltacompress.cli.main import main\n"
        "def load_delta(path):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "sys.modules['deltacompress.artifact.delta'] = room = ModuleType('artifact')\nroom.load_delta = load_delta\n"
        "sys.exit(main(['inspect', 'x', '--quiet', '--json']))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == interrupts.INTERRUPTED_JSON


def test_an_interrupt_before_any_verb() -> None:
    done = _run(
        "import builtins, sys\nfrom deltacompress.cli.program import program\nload = builtins.__import__\n"
        "def interrupted(name, *given):\n"
        "    if name == 'typer':\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, *given)\n"
        "builtins.__import__ = interrupted\n"
        "sys.argv = ['deltacompress', 'inspect', 'x', '--json']\n"
        "program()"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", interrupts.INTERRUPTED_JSON)


def test_a_second_signal_ends_at_once() -> None:
    done = _run(
        "import signal, sys\nfrom deltacompress.cli import interrupts\n"
        "sys.argv = ['deltacompress', 'inspect', 'x', '--json']\n"
        "interrupts._SAME_STOP = -1.0\n"
        "with interrupts.interrupts():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    except KeyboardInterrupt:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == in_json(Interrupted("interrupted again; ended at once")) + "\n"


def test_what_is_written_without_imports_is_the_same() -> None:
    assert in_json(Interrupted("interrupted", way_out="run it again")) + "\n" == interrupts.INTERRUPTED_JSON


@pytest.mark.parametrize("coloured", [True, False])
def test_colours_leave_it_whole(
    coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if coloured:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "20")
    error = InputError("[bold]long[/bold] " * 20, where="a\x7f")
    print_failure(error, as_json=True)
    assert json.loads(capsys.readouterr().err)["error"]["what"] == error.what


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
