"""`deltacompress bench adapter-requests`: requests for many adapters, through the serving engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deltacompress.cli.bench.pairs import numbers, parts_of, without
from deltacompress.cli.bench.serve_options import Scratch, Shape
from deltacompress.cli.given import early
from deltacompress.cli.given.options import BenchBackend, BenchDevice
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import check_driver

PARTS = ("s1", "s2", "lora64", "lora32", "rivals", "peft", "zipf", "loads")
_SHOWN = (
    "system",
    "adapters",
    "load",
    "requests",
    "tokens_s",
    "over_base",
    "e2e_mean",
    "e2e_p50",
    "e2e_p99",
    "ttft_p50",
)


Only = Annotated[str | None, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(PARTS)}.", show_default="all")]
Adapters = Annotated[
    str | None,
    typer.Option(
        help="Numbers of adapters, separated by commas.", show_default="2 to 1000, as published; on a CPU 2,4"
    ),
]
AtOnce = Annotated[
    str | None, typer.Option(help="Requests at once, of closed loops.", show_default="1,16,32,64,96; on a CPU 1,4")
]
Rates = Annotated[
    str | None,
    typer.Option(help="Requests a second, of Poisson processes, or none.", show_default="10; on a CPU 50"),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Of a point; of a closed loop at most 16 for each at once.",
        show_default="512, on a CPU 8; at least as many as are at once",
    ),
]
Repeats = Annotated[int | None, typer.Option(min=1, help="Of each point.", show_default="3; on a CPU 2")]
Minutes = Annotated[float | None, typer.Option(min=0, help="After which no point is begun.")]
Out = Annotated[Path | None, typer.Option(help="Directory for what was measured: the same call goes on with the rest.")]


@verb
def adapter_requests(
    console: Console,
    *,
    only: Only = None,
    adapters: Adapters = None,
    at_once: AtOnce = None,
    rates: Rates = None,
    requests: Requests = None,
    repeats: Repeats = None,
    minutes: Minutes = None,
    out: Out = None,
    shape: Shape = None,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
    scratch: Scratch = None,
) -> None:
    """Serve requests for many adapters through the engine, against the base alone and what others do."""
    parts = parts_of(only, PARTS)
    lists = (
        ("adapters", adapters, int),
        ("at_once", at_once, int),
        ("rates", "," if rates == "none" else rates, float),
    )
    given: dict[str, Any] = {
        name: tuple(numbers(name, listed, kind)) for name, listed, kind in lists if listed is not None
    }
    given |= {name: value for name, value in (("requests", requests), ("repeats", repeats)) if value is not None}
    check_driver(device)
    if out is not None:
        early.folder(out)
    from deltacompress.bench.adapters.study import TINY, Study, run
    from deltacompress.bench.serve.models import shape_of
    from deltacompress.devices import resolve_device

    study = replace(Study() if resolve_device(device).type == "cuda" else TINY, **given)
    if requests is None:
        study = replace(study, requests=max([study.requests, *study.at_once]))
    sizes = None if shape is None else shape_of(shape, device)
    places: dict[str, Any] = {"shape": sizes, "device": device, "backend": backend, "out": out, "scratch": scratch}
    with console.progress() as reporter:
        data = run(study, parts=parts, minutes=minutes, reporter=reporter, **places).to_json()
    console.result(data, lambda: _told(data))


def _told(data: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    from deltacompress.cli.shown import render

    shown = data | {"left": f"{len(data['left'])} points" if data["left"] else "nothing"}
    rows = [{name: row[name] for name in _SHOWN} for row in data["rows"]]
    more = {name: [without(row, "spread") for row in data[name]] for name in ("rivals", "zipf", "loads")}
    tables = [render.rows(name, some) for name, some in {"requests": rows, **more}.items() if some]
    return Group(*tables, render.summary("adapter requests", shown), *map(Text, data["notes"]))


def register(app: typer.Typer) -> None:
    """Add this verb to those of `deltacompress bench`."""
    app.command("adapter-requests")(adapter_requests)
