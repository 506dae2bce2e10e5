"""Stops at bad moments: while modules are imported, twice at once, while the end is told, when all is done."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("stoppable")
BEGIN = """
import signal, sys, time
from deltacompress.cli import interrupts
from deltacompress.cli.shown.console import Console, OutputOptions, run
def again(number=signal.SIGINT):
    signal.raise_signal(number)
def end(work):
    with interrupts.interrupts():
        sys.exit(run(work, debug=False))
"""
STOPPED = (2, "error: interrupted; run it again\n")


def python(code: str, *, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, cwd=cwd, timeout=60)
    return done.returncode, done.stderr


def test_two_signals_at_once_are_one_stop() -> None:
    """The second falls into the handling of the first."""
    assert (
        python(
            "def work():\n"
            "    try:\n"
            "        again()\n"
            "    finally:\n"
            "        again(signal.SIGTERM)\n"
            "        again(signal.SIGHUP)\n"
            "end(work)"
        )
        == STOPPED
    )


def test_a_signal_in_an_import_waits_for_its_end(tmp_path: Path) -> None:
    """Also where the library that is imported swallows everything."""
    (tmp_path / "slow.py").write_text(
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGTERM)\nexcept BaseException:\n    print('swallowed', flush=True)\n"
        "done = True\n"
    )
    code, told = python(
        "def work():\n    import slow\n    assert slow.done\n    time.sleep(30)\nend(work)",
        cwd=tmp_path,
    )
    assert (code, told) == STOPPED


def test_a_stop_that_falls_on_a_finalizer_is_not_lost() -> None:
    assert (
        python(
            "class Last:\n    def __del__(self):\n        again()\n"
            "def work():\n    one = Last()\n    del one\n    time.sleep(30)\nend(work)"
        )
        == STOPPED
    )


def test_a_signal_long_after_the_first_ends_it_at_once() -> None:
    code, told = python(
        "interrupts._SAME_STOP = 0.1\n"
        "def work():\n"
        "    try:\n        again()\n"
        "    finally:\n        time.sleep(0.2)\n        again()\n        time.sleep(30)\n"
        "end(work)"
    )
    assert (code, told) == (2, "error: interrupted again; ended at once\n")


def test_a_signal_in_an_import_before_anything_is_begun_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('went on')\n")
    code, told = python(
        "def work():\n    with interrupts.nothing_begun():\n        import slow\nend(work)\nprint('went on')",
        cwd=tmp_path,
    )
    assert (code, told) == STOPPED


def test_a_signal_that_came_before_does_not_wait_either() -> None:
    assert (
        python(
            "def work():\n"
            "    try:\n"
            "        again()\n"
            "    except KeyboardInterrupt:\n"
            "        pass\n"
            "    with interrupts.nothing_begun():\n"
            "        time.sleep(30)\n"
            "end(work)"
        )
        == STOPPED
    )


@pytest.mark.parametrize(
    "line",
    [
        "compress BASE FINETUNED --recipe lossless --out OUT",
        "analyze BASE FINETUNED",
        "restore ARTIFACT --base BASE --out OUT",
        "demo --out OUT",
    ],
)
def test_a_verb_ends_at_once_while_it_imports_torch(line: str, tmp_path: Path, repo_root: Path) -> None:
    demo, golden = repo_root / "registry" / "demo", repo_root / "tests" / "golden" / "v1"
    given = {"BASE": demo / "base", "FINETUNED": demo / "palindrome", "OUT": tmp_path / "out"}
    argv = line.split()
    if "ARTIFACT" in argv:
        given |= {"BASE": golden / "base", "ARTIFACT": golden / "int4-24"}
    command = [sys.executable, "-v", "-m", "deltacompress", *(str(given.get(one, one)) for one in argv)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("import 'torch._C'"):
            pass
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert process.returncode == 2
    assert told.endswith("error: interrupted; run it again\n")
    assert "import 'torch' " not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block", ["with interrupts.held():\n            hang()", "import hangs"])
def test_a_later_signal_ends_what_hangs_while_the_first_waits(block: str, tmp_path: Path) -> None:
    """A reader of the result that reads no more, a module on a file system that is gone."""
    hangs = ["import signal, time", *["signal.raise_signal(signal.SIGTERM)", "time.sleep(0.2)"] * 2, "time.sleep(5)"]
    (tmp_path / "hangs.py").write_text("\n".join(hangs))
    code, told = python(
        "interrupts._SAME_STOP = 0.1\ndef hang():\n    again()\n    time.sleep(0.2)\n    again()\n    time.sleep(5)\n"
        f"def work():\n        {block}\nend(work)",
        cwd=tmp_path,
    )
    assert (code, told) == (2, "error: interrupted again; ended at once\n")


def test_no_signal_changes_what_finished_work_ends_with() -> None:
    """Neither one while the result is printed, nor one after that."""
    for printed in ("sys.stdout.write = lambda text: again()", "sys.stdout.flush = again"):
        code, told = python(
            f"def work():\n    {printed}\n    Console(OutputOptions(json=True)).result({{}}, str)\n"
            "with interrupts.interrupts():\n    code = run(work, debug=False)\n    again()\n    time.sleep(0.2)\n"
            "sys.stdout = None\nsys.exit(code)"
        )
        assert (code, told) == (0, ""), printed


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("argv", [["--version"], ["inspect", "/no/such/place"]])
def test_no_signal_ends_a_process_that_ends(name: str, argv: list[str]) -> None:
    """While the interpreter shuts down, as libraries' own last words are run."""
    code, told = python(
        "import atexit\nfrom deltacompress.cli.program import program\n"
        f"def last():\n    again(signal.{name})\n    print('last words', file=sys.stderr)\n"
        "ignore = interrupts.ignore\n"
        "interrupts.ignore = lambda: (ignore(), atexit.register(last))\n"
        f"sys.argv = ['deltacompress', *{argv!r}]\nprogram()"
    )
    assert code == (0 if argv == ["--version"] else 2)
    assert told.endswith("last words\n")
    assert told.count("\n") == 1 + (argv != ["--version"])


def test_the_end_waits_for_no_garbage() -> None:
    """Of all of torch that takes seconds."""
    code, told = python(
        "import gc\nfrom deltacompress.cli.program import program\n"
        "class Slow:\n    def __del__(self):\n        sys.stderr.write('collected')\n"
        "circle = Slow()\ncircle.own = circle\ndel circle\ngc.disable()\n"
        "sys.argv = ['deltacompress', '--version']\nprogram()"
    )
    assert (code, told) == (0, "")


def test_an_obeyed_stop_is_forgotten() -> None:
    """As in a chat, where the first ended an answer."""
    assert (
        python(
            "def work():\n"
            "    try:\n        again()\n    except KeyboardInterrupt:\n        interrupts.forget()\n"
            "    interrupts.check()\n"
            "    again()\n"
            "end(work)"
        )
        == STOPPED
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_process_while_it_imports_torch(number: signal.Signals, tmp_path: Path, repo_root: Path) -> None:
    """The process itself, from its first line: what comes then is a stop like any other."""
    demo = repo_root / "registry" / "demo"
    argv = ["analyze", str(demo / "base"), str(demo / "palindrome")]
    with subprocess.Popen(
        [sys.executable, "-v", "-m", "deltacompress", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("import 'torch"):
            pass
        process.send_signal(number)
        time.sleep(0.02)
        process.send_signal(number)
        told = process.stderr.read()
    assert process.returncode == 2
    assert "error: interrupted; run it again\n" in told
    assert "Traceback" not in told


@pytest.fixture
def tool(repo_root: Path) -> ModuleType:
    spec = spec_from_file_location("signal_storm", repo_root / "tools" / "signal_storm.py")
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_storm_leaves_out_what_comes_before_our_first_line(tool: ModuleType, tmp_path: Path) -> None:
    pythons = 'Could not import runpy module\nTraceback (most recent call last):\n  File "<frozen runpy>", line 15\n'
    ours = 'Traceback (most recent call last):\n  File "/x/deltacompress/cli/program.py", line 17, in program\n'
    assert tool.before_ours(1, pythons, 3.0)
    assert tool.before_ours(-signal.SIGTERM, "", 0.1)
    assert not tool.before_ours(-signal.SIGTERM, "", 3.0)
    assert not tool.before_ours(-signal.SIGKILL, "", 0.1)
    assert not tool.before_ours(2, STOPPED[1], 0.1)
    assert not tool.before_ours(1, ours, 0.1)
    assert tool.wrong(1, ours, tmp_path / "out") == "a traceback"


@pytest.mark.slow
def test_a_small_storm(tool: ModuleType) -> None:
    counts, failures = tool.storm(6, seed=1, longest=4.0)
    assert failures == []
    assert counts.total() == 6
