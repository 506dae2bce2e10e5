"""`deltacompress bench predict`: what measuring a pair takes, before anything is compressed."""

from __future__ import annotations

from typing import Annotated

import typer

from deltacompress.cli.given.options import BenchDevice, DeviceMemory, PairScratch, PairShape, Samples
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import check_driver


@verb
def predict(
    console: Console,
    *,
    device: BenchDevice = "auto",
    samples: Samples = 256,
    seq_len: Annotated[int, typer.Option(min=2, max=4096, help="Tokens in each.")] = 256,
    layers: Annotated[int, typer.Option(min=1, max=80, help="Decoder layers of the pair.")] = 3,
    shape: PairShape = None,
    device_memory: DeviceMemory = None,
    scratch: PairScratch = None,
) -> None:
    """Time `analyze --predict`, which a size or a quality measures, too, on a random pair of the shape of a Llama."""
    from deltacompress.cli.shown import render
    from deltacompress.compression.job import device_memory as parsed

    check_driver(device)
    parsed(device_memory)
    from deltacompress.bench.frontier.predicted import run

    with console.progress() as reporter:
        data = run(
            device=device,
            samples=samples,
            seq_len=seq_len,
            layers=layers,
            shape=shape,
            device_memory=device_memory,
            scratch=scratch,
            reporter=reporter,
        )
    console.result(data, lambda: render.summary_and_rows("predict", data, table="rows"))


def register(app: typer.Typer) -> None:
    """Add this verb to those of `deltacompress bench`."""
    app.command("predict")(predict)
