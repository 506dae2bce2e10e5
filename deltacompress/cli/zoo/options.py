"""Arguments that the verbs of `deltacompress zoo` share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

ZooOption = Annotated[
    str | None, typer.Option("--zoo", envvar="DELTACOMPRESS_ZOO", help="Directory or s3:// URL of the zoo.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="namespace/name, with @version or @alias, or the newest.")]


def date(seconds: float) -> str:
    """A time in seconds since 1970 as people and programs read it: 2026-11-21T07:00:00Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
