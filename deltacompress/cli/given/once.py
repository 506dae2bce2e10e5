"""An option that takes one value is given once: a second value would silently be the only one that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from deltacompress.errors import InputError


class _Command(TyperCommand):
    """A verb, which refuses an option that is given again, unless it adds up; flags change nothing by that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's; raises InputError."""
        if not ctx.resilient_parsing:  # by the shell, for its completion
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            if not any(one.is_eager for one in order):  # who asks for the help gets it
                _refuse_again(order)
        return super().parse_args(ctx, args)


def _refuse_again(order: list[Any]) -> None:
    """order: of the parameters, as they came on the command line."""
    for one, times in Counter(order).items():
        if times == 1 or one.param_type_name != "option" or one.multiple or one.is_flag or one.count:
            continue
        is_list = any("," in str(text) for text in (one.metavar, one.default)) or "commas" in (one.help or "")
        told = "twice" if times == 2 else f"{times} times"
        way_out = "separate the values with commas" if is_list else "give it once"
        raise InputError(f"is given {told}", where=one.opts[0], way_out=way_out)


class Verbs(typer.Typer):
    """An app whose verbs are such commands."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """As Typer's."""
        return super().command(name, **{"cls": _Command} | options)
