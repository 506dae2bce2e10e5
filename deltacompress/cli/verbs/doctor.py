"""`deltacompress doctor`: what is here, what works, and what to do about the rest."""

from __future__ import annotations

from deltacompress.cli.shown.console import Console, verb


@verb
def doctor(console: Console) -> None:
    """Show versions, devices, extras and what works here; what does not comes with the way out."""
    from deltacompress.cli.shown import render
    from deltacompress.diagnosis import diagnose

    rows = diagnose()
    console.result(rows, lambda: render.rows("doctor", rows))
