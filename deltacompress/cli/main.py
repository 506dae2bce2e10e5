"""Puts the verbs together and ends the process with the right exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from deltacompress._version import __version__
from deltacompress.cli.bench import verbs as bench
from deltacompress.cli.compressing.analyze import analyze
from deltacompress.cli.compressing.compress import compress
from deltacompress.cli.given.once import Verbs
from deltacompress.cli.interrupts import interrupts, wants_json
from deltacompress.cli.shown.console import (
    EXIT_INPUT,
    DebugFlag,
    JsonFlag,
    OutputOptions,
    QuietFlag,
    print_failure,
)
from deltacompress.cli.shown.failures import UsageError
from deltacompress.cli.verbs.artifact import inspect, restore, verify
from deltacompress.cli.verbs.compare import compare
from deltacompress.cli.verbs.demo import demo
from deltacompress.cli.verbs.doctor import doctor
from deltacompress.cli.verbs.evaluate import evaluate, gate
from deltacompress.cli.verbs.generate import chat, generate
from deltacompress.cli.verbs.interop import dequantize, export
from deltacompress.cli.verbs.serve import serve
from deltacompress.cli.verbs.shipped import gates, recipes, tasks
from deltacompress.cli.zoo import verbs as zoo
from deltacompress.errors import DeltaCompressError, InputError, Interrupted, OutputError

PROGRAM = "deltacompress"
EPILOG = (
    "Exit codes: 0 done; 1 a gate failed; 2 usage or input error, or stopped by Ctrl-C or SIGTERM; "
    "3 integrity failure; 70 internal error."
)

_TYPERS_INTERRUPT = 130
"""What Typer returns for a KeyboardInterrupt while it parses."""

app = Verbs(
    name=PROGRAM,
    no_args_is_help=True,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        sys.stdout.flush()
        raise typer.Exit


@app.callback()
def frame(
    ctx: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compress a fine-tuned model into a small, verified delta of its base model, and get it back."""
    ctx.obj = OutputOptions(json, quiet, debug)


app.command()(compress)
app.command()(inspect)
app.command()(verify)
app.command()(restore)
app.command()(export)
app.command()(dequantize)
app.command()(analyze)
app.command("eval")(evaluate)
app.command()(gate)
app.command()(compare)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.add_typer(zoo.app, name="zoo")
app.command()(recipes)
app.command()(gates)
app.command()(tasks)
app.command()(demo)
app.command()(doctor)
app.add_typer(bench.app, name="bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's own arguments) and return its exit code."""
    # Read once, when torch's OpenMP starts: its idle threads then sleep instead of spinning, which costs little on
    # an idle machine and saves much where something else keeps the cores busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # What transformers and the hub libraries log is about their insides; our own notes and errors say what matters.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Looking for plug-ins of pydantic means reading what every installed package says of itself; none has a say here.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    _print_any_path()
    given = sys.argv[1:] if argv is None else argv
    as_json = wants_json(given)
    if empty := _empty_argument(given):
        what = f"{empty} is empty, perhaps a variable of the shell that is not set"
        print_failure(InputError(what, way_out="give it a value"), as_json=as_json)
        return EXIT_INPUT
    try:
        with interrupts():
            code = app(args=argv, prog_name=PROGRAM, standalone_mode=False)
            if code == _TYPERS_INTERRUPT:
                raise KeyboardInterrupt
    except typer.TyperException as error:  # a usage error, found before any verb ran
        if message := error.format_message():  # empty where the help was the answer
            context = getattr(error, "ctx", None)
            place = PROGRAM if context is None else context.command_path
            usage = _usage(context) if type(error).__name__ == "NoSuchOption" else ""
            print_failure(UsageError(message.rstrip("."), way_out=f"{usage}see {place} --help"), as_json=as_json)
        return error.exit_code
    except DeltaCompressError as error:  # our own, of the same kind
        print_failure(error, as_json=as_json)
        return error.exit_code
    except SystemExit:  # what Typer makes of a help that nobody reads
        return 0
    except OSError as error:  # a help or a version that cannot be written: a verb tells its own
        what = error.strerror or str(error)
        failed = OutputError(what, where="standard output", way_out="print to another place")
        print_failure(failed, as_json=as_json)
        return EXIT_INPUT
    except (typer.Abort, KeyboardInterrupt):  # before or after the verb, which handles its own
        print_failure(Interrupted("interrupted", way_out="run it again"), as_json=as_json)
        return EXIT_INPUT
    return code if isinstance(code, int) else 0


def _usage(context: Any) -> str:
    """How a verb takes its arguments: who gives an option that it does not have may look for one of them."""
    names = " ".join(str(one.metavar) for one in _arguments(context.command))
    return f"usage: {context.command_path} {names} [OPTIONS]; " if names else ""


def _arguments(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]


def _empty_argument(argv: Sequence[str]) -> str | None:
    """What the first argument without a character in it is called: as a path it would mean the working directory."""
    for i, given in enumerate(argv):
        option, equals, value = given.partition("=")
        if option.startswith("--") and equals and not value:
            return option
        if not given:
            return _name_of(argv, i)
    return None


def _name_of(argv: Sequence[str], place: int) -> str:
    """Of the parameter that takes the empty argument at a place; of a command line that is wrong, its number."""
    command: Any = typer.main.get_command(app)
    context, rest = None, ["\0" if i == place else given for i, given in enumerate(argv)]  # no real argument has it
    with suppress(typer.TyperException, KeyError, IndexError):
        while True:
            context = command.context_class(command, parent=context)
            given, rest, _ = command.make_parser(context).parse_args(rest)
            for one in command.params:
                value = given.get(one.name)
                if value == "\0" or (isinstance(value, list | tuple) and "\0" in value):
                    return str(one.metavar).rstrip(".") if one in _arguments(command) else str(one.opts[0])
            command, rest = command.commands[rest[0]], rest[1:]
    return f"argument {place + 1}"


def _print_any_path() -> None:
    """A path may hold bytes that are no text, or characters that the locale lacks: escape those, never fail on them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):  # the latter: LC_ALL=C
            stream.reconfigure(errors="backslashreplace")
