"""The one place that prints: results on stdout, everything else on stderr, an error as one line with an exit code.

Every verb is wrapped by `verb`, which adds `--json`, `--quiet` and `--debug` to it (they work before the verb as well
as after it), hands the body a `Console`, and turns exceptions into the exit codes that scripts rely on:

    0    done                                                 3    integrity failure (IntegrityError)
    1    a gate failed                                        70   internal error, a bug of ours
    2    usage or input error, or stopped by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from deltacompress.cli.interrupts import check, finish, held, tell
from deltacompress.cli.shown.failures import as_given, failure, in_json
from deltacompress.cli.shown.screen import ReaderGoneError, discard, screen
from deltacompress.errors import DeltaCompressError, InputError, OutputError, for_the_command_line
from deltacompress.escape import escape
from deltacompress.reporter import Reporter

if TYPE_CHECKING:
    from rich.console import RenderableType

P = ParamSpec("P")

EXIT_INPUT = InputError.exit_code

_UNBOUNDED = 10_000
_RULE = re.compile(" *─+")
_PANEL = "Output"
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout.", show_default=False, rich_help_panel=_PANEL)
]
QuietFlag = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print nothing but errors (and, with --json, the result).",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
DebugFlag = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error.",
        envvar="DELTACOMPRESS_DEBUG",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output options, as given before the verb, after it, or both."""

    json: bool = False
    quiet: bool = False
    debug: bool = False

    def __or__(self, other: OutputOptions) -> OutputOptions:
        return OutputOptions(self.json or other.json, self.quiet or other.quiet, self.debug or other.debug)


class _Quiet:
    """A reporter that says nothing, and lets no signal get lost."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Nothing to say."""
        check()

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Nothing to say."""
        check()

    def note(self, message: str) -> None:
        """Drop it."""


class Console:
    """What the body of a verb prints with."""

    def __init__(self, settings: OutputOptions) -> None:
        self.settings = settings

    def result(self, data: Mapping[str, Any] | Sequence[Any], table: Callable[[], RenderableType]) -> None:
        """Print what the verb found: `data` as JSON under --json, else what `table` draws, else (--quiet) nothing.

        Raises:
            ValueError: `data` holds a NaN or an infinity, which JSON cannot.
            OutputError: it cannot be written, for want of room say.
        """
        if self.settings.quiet and not self.settings.json:
            return
        if self.settings.json:
            self.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
            return
        if not self._has_output():
            return
        drawn, here = table(), screen()
        # Never crop: a screen too narrow for the table wraps it; a file or a pipe is as wide as the table likes, unless
        # COLUMNS says otherwise.
        needed = screen(width=_UNBOUNDED).measure(drawn)
        is_narrow = here.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
        place = screen(width=max(here.width, needed.minimum) if is_narrow else needed.maximum)
        if here.is_terminal:
            with _printing():
                place.print(drawn)
            return
        drawn_lines = place.render_lines(drawn, pad=False)  # their cells are padded all the same
        lines = ("".join(part.text for part in line).rstrip(" ") for line in drawn_lines)
        # Whole cells, in columns, and nothing that is drawn: a rule as long as the longest cell helps nobody there.
        text = "".join(f"{line}\n" for line in lines if not _RULE.fullmatch(line))
        with _printing():
            sys.stdout.write(text)

    def write(self, text: str) -> None:
        """Print text as it is; on a terminal, without what a terminal would obey.

        Raises:
            ReaderGoneError: nobody reads any more; `run` ends the verb, and that is no failure.
            OutputError: it cannot be written, for want of room say.
        """
        if self._has_output():
            with _printing():
                sys.stdout.write(escape(text, keep="\n\t") if sys.stdout.isatty() else text)
                sys.stdout.flush()

    def _has_output(self) -> bool:
        if getattr(sys, "stdout", None) is not None:
            return True
        self.warn("standard output is closed, so the result is not printed")  # `>&-`
        return False

    def note(self, message: str) -> None:
        """One line for the user on stderr, unless --quiet."""
        if not self.settings.quiet:
            _stderr(message)

    def warn(self, message: str) -> None:
        """One line on stderr, --quiet or not: something that was asked for could not be done."""
        _stderr("warning: " + " ".join(message.split()), style="yellow")

    def progress(self) -> AbstractContextManager[Reporter]:
        """A reporter that draws progress on stderr while the block runs; under --quiet it says nothing."""
        if self.settings.quiet:
            return nullcontext(_Quiet())
        from deltacompress.cli.shown.progress import RichReporter

        return RichReporter()


@contextmanager
def _printing() -> Iterator[None]:
    try:
        with held():
            yield
            sys.stdout.flush()  # here, where what goes wrong is still handled
    except BrokenPipeError as error:
        discard(sys.stdout)
        raise ReaderGoneError from error
    except OSError as error:
        discard(sys.stdout)
        raise OutputError(
            error.strerror or str(error),
            where="standard output",
            way_out="the work is done, print its result to another place",
        ) from error


def verb(body: Callable[Concatenate[Console, P], None]) -> Callable[..., None]:
    """Make a Typer command of `body(console, ...)`: add the output options, and map exceptions to exit codes."""
    own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        inspect.Parameter("json", keyword, annotation=JsonFlag, default=False),
        inspect.Parameter("quiet", keyword, annotation=QuietFlag, default=False),
        inspect.Parameter("debug", keyword, annotation=DebugFlag, default=False),
    ]

    @functools.wraps(body)
    def command(*, ctx: typer.Context, json: bool, quiet: bool, debug: bool, **options: Any) -> None:
        settings = OutputOptions(json, quiet, debug)
        if isinstance(ctx.obj, OutputOptions):
            settings |= ctx.obj
        again = f"{ctx.command_path} ... --out {options['out']}" if options.get("out") else ""
        tell(at_once=not settings.quiet)
        code = run(
            functools.partial(body, Console(settings), **options),
            debug=settings.debug,
            as_json=settings.json,
            again=again,
        )
        if code:
            raise typer.Exit(code)

    parameters = [parameter.replace(kind=keyword) for parameter in own] + added
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def run(work: Callable[[], object], *, debug: bool, as_json: bool = False, again: str = "") -> int:
    """Run `work`; print a failure on stderr (after its traceback under debug); return the exit code.

    again: what goes on after an interruption, if anything does.

    Typer's own exceptions (usage errors, a deliberate exit) pass through: Typer ends those.
    """
    try:
        with for_the_command_line():
            work()
        finish()
    except (typer.Exit, typer.Abort, typer.TyperException):
        raise
    except ReaderGoneError:  # and the work is done
        return 0
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the last stop: what is left is a bug
        if debug:
            traceback.print_exc()
        told = failure(error, debug=debug, again=again)
        print_failure(told, as_json=as_json)
        return told.exit_code
    return 0


def print_failure(error: DeltaCompressError, *, as_json: bool) -> None:
    """What ended the work: one line on stderr, with its fields under --json."""
    if as_json:
        _stderr(in_json(error))
    else:
        print_error(str(error))


def print_error(message: str) -> None:
    """One line on stderr, however many the message has."""
    _stderr("error: " + " ".join(as_given(message).split()), style="red")


def _stderr(message: str, *, style: str | None = None) -> None:
    if getattr(sys, "stderr", None) is None:
        return
    with suppress(OSError):  # nobody can be told
        if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):  # nothing to colour: rich need not be imported
            sys.stderr.write(escape(message) + "\n")
            sys.stderr.flush()
            return
        # No wrapping, markup or highlighting: paths and tensor names must come out as they are, and be copied whole.
        screen(stderr=True).print(escape(message), style=style, soft_wrap=True, markup=False, highlight=False)
