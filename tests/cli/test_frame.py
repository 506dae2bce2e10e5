"""The frame of the command line: options, exit codes, what goes where. The work behind the verbs is replaced."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console as RichConsole

from deltacompress import __version__, errors
from deltacompress.cli.given import early
from deltacompress.cli.main import app, main
from deltacompress.cli.shown import render
from deltacompress.cli.shown.console import Console, OutputOptions
from deltacompress.cli.shown.progress import RichReporter

VERBS = (
    *("analyze", "bench", "chat", "compare", "compress", "demo", "dequantize", "doctor", "eval"),
    *("export", "gate", "gates", "generate", "inspect", "recipes", "restore", "serve", "tasks", "verify", "zoo"),
)
SUMMARY = {"ratio": 8.5, "artifact_bytes": 1234, "tensors": [{"name": "a.weight", "bits": 2.5, "shape": [4, 8]}]}

Fake = Callable[..., None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a module with the given attributes in the place of one of the package's rooms."""

    def put(name: str, **attributes: Any) -> None:
        module = ModuleType(f"deltacompress.{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


@pytest.fixture
def delta(fake: Fake) -> None:
    fake("artifact.delta", load_delta=lambda path: SimpleNamespace(summary=lambda **_: SUMMARY))


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        raise error

    return call


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_verbs_are_all_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(commands) == sorted(VERBS)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], *([verb, "--help"] for verb in VERBS), ["bench", "obs", "-h"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "Usage: deltacompress" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("argv", [["--help"], ["compress", "--help"], ["--version"], ["compress", "--nonsense"]])
def test_the_frame_does_not_import_torch(argv: list[str]) -> None:
    heavy = ("datasets", "numpy", "pydantic", "torch", "transformers")
    allowed = ("pydantic",)  # Typer checks option values with it
    done = run_python(
        "import sys\nfrom deltacompress.cli.main import main\n"
        f"main({argv!r})\nsys.stderr.write('\\n' + ' '.join(set({heavy!r}) & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.splitlines()[-1].split()) <= set(allowed)


def test_version_and_module_entry_point() -> None:
    for option in ("--version", "-V"):
        done = subprocess.run([sys.executable, "-m", "deltacompress", option], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"deltacompress {__version__}\n")


@pytest.mark.parametrize("argv", [[], ["bench"]])
def test_without_a_verb_the_help_is_the_answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Usage: deltacompress" in captured.out + captured.err


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["nonsense"], "(see deltacompress --help)"),
        (["inspct"], "Did you mean 'inspect'?"),
        (["bench", "obz"], "Did you mean 'obs'? (see deltacompress bench --help)"),
        (["inspect"], "ARTIFACT' (see deltacompress inspect --help)"),
        (["compress", "a", "--recipie", "x"], "--recipe) (usage: deltacompress compress BASE"),
        (["bench", "obs", "--size", "1000000"], "(see deltacompress bench obs --help)"),
        (["bench", "pairs", "a", "b", "--out", "c", "--device", "tpu"], "--device"),
        (["inspect", "x", "--nonsense"], "--nonsense"),
        (["compress", "a", "b", "--out", "c"], "--recipe"),
        (["compress", "a", "b", "--out", "c"], "--target-ratio, --max-size and --max-kl"),
        (["compress", "a", "b", "--recipe", "r"], "--out"),
        (["compress", "a", "b", "--recipe", "r", "--out", "c", "--samples", "0"], "--samples"),
        (["compress", "a", "b", "--recipe", "r", "--out", "c", "--samples", "many"], "--samples"),
        (["compress", "a", "b", "--recipe", "r", "--out", "c", "--lossless", "rar"], "--lossless"),
        (["compress", "a", "b", "--recipe", "r", "--out", "c", "--device", "tpu"], "--device"),
        (["restore", "a", "--base", "b"], "--out"),
        (["restore", "a", "--out", "b"], "--base"),
        (["restore", "a", "--base", "", "--out", "b"], "--base is empty"),
        (["inspect", ""], "ARTIFACT is empty"),
        (["generate", "a", "", "--base", "b"], "PROMPT is empty"),
        (["eval", "a", "", "--base", "b"], "ARTIFACT_OR_NAME is empty"),
        (["zoo", "pull", "--quiet", "", "b"], "NAME is empty"),
        (["inspect", "a", "--nonsense", ""], "argument 4 is empty"),
        (["zoo", "pull", "a/b", "--out", "b"], "(usage: deltacompress zoo pull NAME DIR [OPTIONS]; see deltacompress"),
        (["restore", "a", "--base=", "--out", "b"], "--base is empty"),
    ],
)
def test_usage_errors_are_one_line(argv: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert names in captured.err
    assert captured.err.count("\n") == 1


def error_classes() -> list[type[errors.DeltaCompressError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.DeltaCompressError)
    ]


@pytest.mark.parametrize("error", error_classes())
def test_every_error_gets_its_exit_code_and_one_line(
    error: type[errors.DeltaCompressError], fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("artifact.delta", load_delta=raising(error("manifest.json: two\nlines [bold]and a path[/bold]")))
    assert main(["inspect", "x"]) == error.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    bug = "internal error: " if error is errors.InternalError else ""
    assert captured.err == f"error: {bug}manifest.json: two lines [bold]and a path[/bold]\n"


def test_the_exit_codes_scripts_rely_on() -> None:
    codes = {error.__name__: error.exit_code for error in error_classes()}
    assert {codes[name] for name in ("InputError", "CalibrationError", "OutputError", "BackendError")} == {2}
    assert {codes[name] for name in ("IntegrityError", "BaseMismatchError", "ChecksumError", "FormatError")} == {3}
    assert codes["Interrupted"] == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            PermissionError(13, "Permission denied", "/data/out"),
            2,
            "error: /data/out: Permission denied; mend that or give another path",
        ),
        (
            OSError(28, "No space left on device"),
            2,
            "error: [Errno 28] No space left on device; mend that or give another path",
        ),
        (KeyboardInterrupt(), 2, "error: interrupted; run it again"),
        (MemoryError("8 GB"), 2, "error: out of memory (8 GB); free some, or ask for less at once"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            2,
            "error: out of memory (DefaultCPUAllocator: can't allocate memory); free some, or ask for less at once",
        ),
        (
            ZeroDivisionError("by zero"),
            70,
            "error: internal error: ZeroDivisionError: by zero (run again with --debug for the traceback)",
        ),
    ],
)
def test_other_exceptions(
    error: BaseException, code: int, line: str, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("artifact.delta", load_delta=raising(error))
    assert main(["inspect", "x"]) == code
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    "argv", [["--debug", "inspect", "x"], ["inspect", "x", "--debug"], ["inspect", "--debug", "x"]]
)
def test_debug_shows_the_traceback(argv: list[str], fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake("artifact.delta", load_delta=raising(errors.ChecksumError("part 0 differs")))
    assert main(argv) == 3
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: part 0 differs\n")


def test_debug_from_the_environment(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_DEBUG", "1")
    fake("artifact.delta", load_delta=raising(RuntimeError("bug")))
    assert main(["inspect", "x"]) == 70
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "--debug" not in err.splitlines()[-1]


@pytest.mark.parametrize("argv", [["--json", "inspect", "x"], ["inspect", "x", "--json"], ["inspect", "--json", "x"]])
@pytest.mark.usefixtures("delta")
def test_json_is_all_there_is_on_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == SUMMARY | {"artifact": "x"}
    assert captured.err == ""


@pytest.mark.usefixtures("delta")
def test_the_table_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "x"]) == 0
    out = capsys.readouterr().out
    for expected in ("a.weight", "2.5", "4 x 8", "8.50 x", "1,234 B"):
        assert expected in out


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("quiet", [True, False])
def test_a_signal_ends_a_verb_like_ctrl_c(number: str, quiet: bool) -> None:
    done = run_python(
        "import signal, sys, time\nfrom types import ModuleType\nfrom deltacompress.cli.main import main\n"
        "def load_delta(path):\n"
        f"    signal.raise_signal(signal.{number})\n"
        "    time.sleep(60)\n"
        "sys.modules['deltacompress.artifact.delta'] = room = ModuleType('artifact')\nroom.load_delta = load_delta\n"
        f"sys.exit(main(['inspect', 'x', *['--quiet'] * {quiet}]))"
    )
    at_once = "stopping; what is done is kept or cleaned up (again after 2 seconds: end at once)\n"
    told = ("" if quiet else at_once) + "error: interrupted; run it again\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_an_interrupt_names_the_verb_and_the_output_that_go_on(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    fake("demo.run", run_demo=interrupted)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    told = f"error: interrupted; run it again: deltacompress demo ... --out {tmp_path / 'out'}"
    assert told in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_signal_that_somebody_swallowed_is_told_again(quiet: bool) -> None:
    """As a library may that is being imported."""
    done = run_python(
        "import signal, sys\nfrom deltacompress.cli.shown.console import Console, OutputOptions, run\n"
        "from deltacompress.cli.interrupts import interrupts\n"
        "def work():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    except BaseException:\n"
        "        pass\n"
        f"    with Console(OutputOptions(quiet={quiet})).progress() as reporter:\n"
        "        reporter.phase('importing')\n"
        "        print('went on')\n"
        "with interrupts():\n"
        "    sys.exit(run(work, debug=False))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: interrupted; run it again\n")


def test_an_interrupt_before_any_verb() -> None:
    """While the command line itself is imported, and while Typer parses."""
    importing = run_python(
        "import builtins, sys\nfrom deltacompress.cli.program import program\nload = builtins.__import__\n"
        "def interrupted(name, *given):\n"
        "    if name == 'typer':\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, *given)\n"
        "builtins.__import__ = interrupted\n"
        "program()"
    )
    parsing = run_python(
        "import sys\nfrom deltacompress.cli.program import program\n"
        "from typer.core import TyperGroup\n"
        "def interrupted(*_):\n"
        "    raise KeyboardInterrupt\n"
        "TyperGroup.parse_args = interrupted\n"
        "sys.argv = ['deltacompress', 'inspect', 'x']\n"
        "program()"
    )
    for done in (importing, parsing):
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: interrupted; run it again\n")


def test_the_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "2 usage or input error, or stopped by Ctrl-C or SIGTERM" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("delta")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_stdout_is_said(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work is done all the same."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["inspect", "x", *options]) == 0
    assert capsys.readouterr().err == "warning: standard output is closed, so the result is not printed\n"


PRINTS_ITS_ARGUMENT = """
import sys
from types import ModuleType, SimpleNamespace
from deltacompress.cli.main import main
from deltacompress.cli.shown.console import print_error
sys.modules["deltacompress.artifact.delta"] = room = ModuleType("artifact")
room.load_delta = lambda path: SimpleNamespace(summary=lambda **_: {"path": str(path)})
code = main(["inspect", sys.argv[1]])
print_error(sys.argv[1])
sys.exit(code)
"""


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_any_path_can_be_printed(encoding: str) -> None:
    """Bytes that are no text, characters that the locale lacks: escaped, never a crash after the work is done."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTS_ITS_ARGUMENT, b"\xff/\xc3\xbc"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr
    for stream in (done.stdout, done.stderr):
        assert b"\\udcff/" in stream


def test_json_refuses_what_json_cannot_hold(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake("artifact.delta", load_delta=lambda path: SimpleNamespace(summary=lambda **_: {"ratio": float("nan")}))
    assert main(["inspect", "x", "--json"]) == 70
    assert capsys.readouterr().out == ""


def test_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deltacompress", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert err == ""


class TestOptionsReachTheWork:
    @pytest.fixture(autouse=True)
    def _nothing_to_look_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("checkpoints", "compression"):
            monkeypatch.setattr(early, name, lambda *given: None)
        monkeypatch.setattr(early, "artifact", lambda spec, *given, **options: Path(spec))

    def test_compress(self, fake: Fake, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        seen: dict[str, Any] = {}

        def compress(base: Path, finetuned: Path, **options: Any) -> Any:
            seen.update(options, base=base, finetuned=finetuned)
            options["reporter"].phase("layers", 2)
            options["reporter"].step("layer 0", loss=0.5, memory_bytes=2**30)
            options["reporter"].phase("one", 1)
            options["reporter"].note("a [note]")
            return SimpleNamespace(to_json=lambda: {"ratio": 8.0})

        fake("compression.driver", compress=compress)
        importlib.import_module("deltacompress.compression.job")  # which needs the recipes as they are
        fake("codecs.recipe", Recipe=SimpleNamespace(load=lambda name: f"<{name}>"))
        out = tmp_path / "delta"
        argv = ["compress", "B", "F", "--recipe", "int2-24", "--calibration", "c.jsonl", "--out", str(out)]
        assert main([*argv, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {"ratio": 8.0}
        assert captured.err.splitlines() == ["layers (2 steps)", "one", "a [note]"]
        del seen["reporter"]
        defaults = {"samples": None, "seq_len": None, "seed": None, "lossless": "zstd", "device": "auto"}
        assert seen == {
            "base": Path("B"),
            "finetuned": Path("F"),
            "recipe": "<int2-24>",
            "calibration": "c.jsonl",
            "out": out,
            "devices": None,
            "device_memory": None,
            "resume": False,
            "force": False,
            **defaults,
        }

        more = ["--samples", "8", "--seq-len", "32", "--seed", "7", "--lossless", "none", "--device", "cpu", "--resume"]
        more.append("--force")
        assert main([*argv, *more, "--quiet"]) == 0
        assert capsys.readouterr() == ("", "")
        assert {key: seen[key] for key in (*defaults, "resume", "force")} == {
            "samples": 8,
            "seq_len": 32,
            "seed": 7,
            "lossless": "none",
            "device": "cpu",
            "resume": True,
            "force": True,
        }

    @pytest.mark.parametrize("base", [None, Path("B")])
    def test_verify(self, base: Path | None, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
        seen: list[Any] = []
        fake("artifact.delta", verify=lambda path, *, base, reporter: seen.extend((path, base)))
        assert main(["verify", "A", "--json", *([] if base is None else ["--base", str(base)])]) == 0
        assert seen == [Path("A"), base]
        assert json.loads(capsys.readouterr().out)["verified"] is True

    def test_restore(self, fake: Fake) -> None:
        seen: list[Any] = []
        fake(
            "artifact.restoration",
            restore=lambda path, *, base, out, force, reporter: seen.extend((path, base, out, force)),
        )
        assert main(["restore", "A", "--base", "B", "--out", "O", "--quiet"]) == 0
        assert main(["restore", "A", "--base", "B", "--out", "O", "--quiet", "--force"]) == 0
        assert seen == [Path("A"), Path("B"), Path("O"), False, Path("A"), Path("B"), Path("O"), True]

    def test_demo_and_bench(self, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
        result = SimpleNamespace(to_json=lambda: {"seconds": 1.5})
        seen: list[Any] = []
        fake("demo.run", run_demo=lambda out, force, reporter: seen.append((out, force)) or result)
        fake("bench.obs", run=lambda size, device, reporter: seen.append((size, device)) or result)
        assert main(["demo", "--out", "somewhere", "--json", "--force"]) == 0
        assert main(["bench", "obs", "--size", "128", "--json"]) == 0
        assert seen == [(Path("somewhere"), True), (128, "auto")]
        assert capsys.readouterr().out.count('"seconds": 1.5') == 2

    def test_analyze(self, fake: Fake, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        rows = [{"layer": "layer 0", "weights": 32}]
        data = SUMMARY | {"notes": ["spectrum left out"]}
        found = SimpleNamespace(to_json=lambda: data, summary_rows=lambda: rows)
        seen: list[Any] = []

        def analyze_into(out: Path, base: Path, finetuned: Path, *, force: bool, reporter: Any) -> Any:
            seen.append((out, base, finetuned, force))
            return SimpleNamespace(data=data, rows=lambda: rows, files=(out / "a.json",), missing="no picture: why")

        fake("analysis.pair", analyze=lambda base, finetuned, reporter: found)
        fake("analysis.output", analyze_into=analyze_into)
        assert main(["analyze", "B", "F", "--out", str(tmp_path), "--force"]) == 0
        captured = capsys.readouterr()
        assert "layer 0" in captured.out
        assert captured.err.splitlines() == [
            f"wrote {tmp_path / 'a.json'}", "warning: no picture: why", "spectrum left out",
        ]  # fmt: skip
        assert main(["analyze", "B", "F", "--out", str(tmp_path), "--quiet"]) == 0
        assert capsys.readouterr().err.splitlines() == ["warning: no picture: why"]
        assert main(["analyze", "B", "F", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == data
        assert seen == [(tmp_path, Path("B"), Path("F"), True), (tmp_path, Path("B"), Path("F"), False)]

    def test_analyze_refuses_an_output_that_cannot_be(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert main(["analyze", "B", "F", "--out", str(tmp_path / "file" / "sub")]) == 2
        told = capsys.readouterr().err
        assert f"sub: {tmp_path / 'file'} is a file, where a directory is needed; choose another --out" in told


class TestRender:
    @pytest.mark.parametrize("columns", ["20", "80", "300"])
    def test_no_character_is_lost_on_a_narrow_screen(
        self, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        for variable, value in (("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", columns)):
            monkeypatch.setenv(variable, value)
        rows = [{"name": name, "weights": 123_456_789, "relative_size": 0.0123, "bits_per_weight": 1.27}]
        Console(OutputOptions()).result({}, lambda: render.rows("tensors", rows))
        out = capsys.readouterr().out
        for number in ("123,456,789", "0.0123", "1.27", "relative", "weights"):
            assert number in out
        assert name in "".join(line.split(" ")[1] for line in out.splitlines() if line.startswith(" "))

    def test_a_narrow_screen_is_spared_columns_before_names_are_folded(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: Fake
    ) -> None:
        for variable, value in (("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "80")):
            monkeypatch.setenv(variable, value)
        row = {"name": "model.layers.0.self_attn.q_proj.weight", "shape": [128, 128], "kind": "linear"}
        row |= {"status": "coded", "codec": "obs 2:4 int2", "bits_per_weight": 1.72, "bytes": 3532, "loss": 0.0032}
        found = {"ratio": 8.5, "tensors": [row | {"damp_fraction": 0.01}], "parts": []}
        fake("artifact.delta", load_delta=lambda path: SimpleNamespace(summary=lambda **_: found))
        assert main(["inspect", "x"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        for kept in (row["name"], "obs 2:4 int2", "1.72", "3,532 B", "0.0032", "no room for damp fraction, status"):
            assert kept in out

    def test_a_pipe_is_as_wide_as_the_table_likes_or_as_columns_says(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [{"name": name, "for": "a word " * 30} for name in ("a", "longer")]

        def shown() -> list[str]:
            Console(OutputOptions()).result({}, lambda: render.rows("a title", rows))
            return capsys.readouterr().out.splitlines()

        monkeypatch.delenv("COLUMNS", raising=False)
        title, *_, head, first, second = [line for line in shown() if line]
        assert (title, head.split()) == ("a title", ["name", "for"])  # and no rule
        assert [first.split()[0], second.split()[0]] == ["a", "longer"]
        assert first.endswith(" ".join(["a word"] * 30))
        monkeypatch.setenv("COLUMNS", "70")
        lines = shown()
        assert 60 < max(map(len, lines)) <= 70
        assert [line for line in lines if line.endswith(" ")] == []

    @pytest.mark.parametrize("columns", [60, 80])
    def test_long_names_and_digests_fold_rather_than_leave_the_screen(
        self, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: Fake
    ) -> None:
        # not TERM=dumb, which rich takes for 80 columns
        for variable, value in (("TTY_COMPATIBLE", "1"), ("TERM", "xterm"), ("COLUMNS", str(columns))):
            monkeypatch.setenv(variable, value)
        row = {"name": "model.layers.10.post_attention_layernorm.weight", "codec": "obs 2:4 int2", "status": "coded"}
        row |= {"bits_per_weight": 8.31, "bytes": 133_000_000, "loss": 0.00335}
        found = {"digest": "0123456789abcdef" * 4, "linear_bits_per_weight": 1.55, "tensors": [row], "parts": []}
        fake("artifact.delta", load_delta=lambda path: SimpleNamespace(summary=lambda **_: found))
        assert main(["inspect", "x"]) == 0
        out = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)  # bold heads
        assert max(map(len, out.splitlines())) <= columns
        for kept in ("8.31", "133,000,000 B", "0.00335", "linear bits per weight"):
            assert kept in out
        folded = out[out.index("digest") + len("digest") : out.index("linear bits per weight")]
        assert "".join(folded.split()) == found["digest"]

    def test_one_long_value_moves_no_other_away(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        data = {"out": "/a/path" * 60, "bytes": 5}
        Console(OutputOptions()).result({}, lambda: render.summary("t", data))
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
        assert lines == [["t"], ["out", "/a/path" * 60], ["bytes", "5", "B"]]
        monkeypatch.setenv("COLUMNS", "500")
        Console(OutputOptions()).result({}, lambda: render.summary("t", data))
        assert max(len(line) for line in capsys.readouterr().out.splitlines() if "bytes" in line) < 30

    def test_rows_of_nothing(self) -> None:
        assert text(render.rows("tensors", [])) == "tensors: none\n"

    def test_values(self) -> None:
        drawn = text(render.summary("t", {"done": True, "loss": 0.123456, "source": None, "name": "[red]x"}))
        for expected in ("yes", "0.123", "-", "[red]x"):
            assert expected in drawn


def text(renderable: Any) -> str:
    console = RichConsole(width=100, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_the_reporter_draws_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with RichReporter() as reporter:
        reporter.phase("layers", 2)
        reporter.step("layer 0", loss=0.00123, memory_bytes=3 * 2**29)
    captured = capsys.readouterr()
    assert captured.out == ""
    for expected in ("layers", "layer 0", "loss 0.00123", "peak 1.50 GiB"):
        assert expected in captured.err
