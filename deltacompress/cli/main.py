"""Puts the verbs together and ends the process with the right exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from deltacompress import __version__
from deltacompress.cli import bench
from deltacompress.cli.analyze import analyze
from deltacompress.cli.artifact import inspect, restore, verify
from deltacompress.cli.compress import compress
from deltacompress.cli.console import (
    EXIT_INPUT,
    DebugFlag,
    JsonFlag,
    QuietFlag,
    Settings,
    print_error,
)
from deltacompress.cli.demo import demo

PROGRAM = "deltacompress"

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        raise typer.Exit


@app.callback()
def frame(
    ctx: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compress a fine-tuned model into a small, verified delta of its base model, and get it back."""
    ctx.obj = Settings(json, quiet, debug)


app.command()(compress)
app.command()(inspect)
app.command()(verify)
app.command()(restore)
app.command()(analyze)
app.command()(demo)
app.add_typer(bench.app, name="bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's own arguments) and return its exit code."""
    # Read once, when torch's OpenMP starts: its idle threads then sleep instead of spinning, which costs little on
    # an idle machine and saves much where something else keeps the cores busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = app(args=argv, prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:  # a usage error, found before any verb ran
        if message := error.format_message():  # empty where the help was the answer
            print_error(f"{message.rstrip('.')} (see {PROGRAM} --help)")
        return error.exit_code
    except typer.Abort:
        print_error("standard input ended")
        return EXIT_INPUT
    return code if isinstance(code, int) else 0
