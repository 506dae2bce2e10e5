"""`deltacompress bench`: timings of the parts that decide how long compressing takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deltacompress.cli.bench import adapters as adapter_requests
from deltacompress.cli.bench import pairs, predict, serve, simulate, tuning
from deltacompress.cli.bench.pairs import parts_of, without
from deltacompress.cli.given import early
from deltacompress.cli.given.models import model
from deltacompress.cli.given.once import Verbs
from deltacompress.cli.given.options import (
    BenchBackend,
    BenchDevice,
    DeviceMemory,
    Devices,
    PairScratch,
    PairShape,
    Samples,
    files_in,
)
from deltacompress.cli.shown.console import Console, verb
from deltacompress.devices import check_driver, check_together, device_numbers
from deltacompress.errors import InputError

ADAPTER_PARTS = ("lora16", "lora32", "lora64", "boft", "mixed")

app = Verbs(help="Measure the speed of the parts on this machine.", no_args_is_help=True)


@app.command("obs")
@verb
def obs(
    console: Console,
    *,
    size: Annotated[
        int, typer.Option(min=64, max=32768, help="Rows and columns of the layer, a multiple of 4.")
    ] = 4096,
    device: BenchDevice = "auto",
) -> None:
    """Time the OBS solver (2:4, 4 bits) on one linear against a plain column-by-column implementation."""
    if size % 4:  # said here too, before torch is imported
        raise InputError("must be a multiple of 4, for whole 2:4 groups", where=f"--size {size}")
    check_driver(device)
    from deltacompress.bench.obs import run
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        data = run(size=size, device=device, reporter=reporter).to_json()
    console.result(data, lambda: render.summary_and_rows(f"OBS, {size} x {size}", data, table="rows"))


@app.command("layers")
@verb
def layers(
    console: Console,
    *,
    device: BenchDevice = "auto",
    recipe: Annotated[str, typer.Option(help="Name of a shipped recipe, or the path of a YAML file.")] = "int4-24",
    samples: Samples = 256,
    seq_len: Annotated[
        int | None,
        typer.Option(min=2, max=4096, help="Tokens in each.", show_default="2048; on a CPU, for a tiny shape, 512"),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, max=80, help="Decoder layers to compress.")] = 3,
    shape: PairShape = None,
    stages: Annotated[bool, typer.Option("--stages", help="Tell where the time of the last layer goes.")] = False,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    scratch: PairScratch = None,
) -> None:
    """Time `compress` layer by layer on a random pair of the shape of a Llama, or of a mixture of experts."""
    from deltacompress.cli.shown import render

    early.recipes(recipe)
    check_together(device_numbers(devices), device)
    check_driver(device)
    from deltacompress.bench.layers import run

    with console.progress() as reporter:
        data = run(
            device=device,
            recipe=recipe,
            samples=samples,
            seq_len=seq_len,
            layers=layers,
            shape=shape,
            stages=stages,
            devices=devices,
            device_memory=device_memory,
            scratch=scratch,
            reporter=reporter,
        ).to_json()
    more = "stages" if stages else ""
    console.result(data, lambda: render.summary_and_rows("layers", data, table="rows", more=more))


@app.command("kernels")
@verb
def kernels(
    console: Console,
    *,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
) -> None:
    """Time the products of packed deltas (SBMM) against dense deltas and against decoding first."""
    check_driver(device)
    from deltacompress.bench.kernels import run
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        data = run(device=device, backend=backend, reporter=reporter).to_json()
    shown = data | {"rows": [without(row, "spread", "baselines") | row.get("baselines", {}) for row in data["rows"]]}
    console.result(data, lambda: render.summary_and_rows("kernels", shown, table="rows"))


@app.command("adapter-kernels")
@verb
def adapter_kernels(
    console: Console,
    *,
    device: BenchDevice = "auto",
    backend: Annotated[Literal["auto", "reference", "triton"], typer.Option(help="What runs them.")] = "auto",
) -> None:
    """Time the kernels of adapters (low rank, rotations, sparse rows, scales) against loops and batched products."""
    check_driver(device)
    from deltacompress.bench.adapter_kernels import run
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        data = run(device=device, backend=backend, reporter=reporter).to_json()
    every = [without(row, "spread", "baselines") | row["baselines"] for row in data["rows"]]
    products = [row for row in every if "product" in row]  # whose columns are others
    shown = data | {"rows": [row for row in every if "product" not in row], "products": products}
    console.result(data, lambda: render.summary_and_rows("adapter kernels", shown, table="rows", more="products"))


@app.command("decode")
@verb
def decode(
    console: Console,
    *,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
    variants: Annotated[int, typer.Option(min=2, max=256, help="Variants that decode at once.")] = 16,
    most: Annotated[int, typer.Option(min=2, max=256, help="Variants to load at the end, on a GPU.")] = 32,
    scratch: Annotated[Path | None, files_in("18 GB of files")] = None,
) -> None:
    """Time decode steps of a random model (7B-shaped on a GPU) with many variants, and how fast variants load."""
    check_driver(device)
    from deltacompress.bench.decode import run
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        data = run(
            device=device, backend=backend, variants=variants, most=most, scratch=scratch, reporter=reporter
        ).to_json()
    hidden, columns = ("spread", "computed"), dict.fromkeys(key for row in data["rows"] for key in row)
    shown = {
        **{key: value for key, value in data.items() if key not in ("memory", "notes")},
        **(data["memory"] or {}),
        "rows": [{key: row.get(key) for key in columns if key not in hidden} for row in data["rows"]],
        "loads": [{key: row[key] for key in row if key not in hidden} for row in data["loads"]],
    }
    console.result(data, lambda: render.summary_and_rows("decode", shown, table="rows", more="loads"))


@app.command("adapters")
@verb
def adapters(
    console: Console,
    *,
    device: BenchDevice = "auto",
    backend: BenchBackend = "auto",
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(ADAPTER_PARTS)}.", show_default="all")
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=256,
            help="Rows of a step and adapters of a kind (mixed: 5 or more).",
            show_default="96; on a CPU 6",
        ),
    ] = None,
    scratch: Annotated[Path | None, files_in("17 GB of files")] = None,
) -> None:
    """Time decode steps of a random model (7B-shaped on a GPU) with many adapters, against the base's own step."""
    parts = parts_of(only, ADAPTER_PARTS)
    check_driver(device)
    from deltacompress.bench.adapters.run import run
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        data = run(device=device, backend=backend, parts=parts, most=most, scratch=scratch, reporter=reporter).to_json()
    shown = data | {"rows": [without(row, "spread") for row in data["rows"]]}
    console.result(data, lambda: render.summary_and_rows("adapters", shown, table="rows", more="loads"))


@app.command("precision")
@verb
def precision(
    console: Console,
    base: Annotated[
        Path | None, typer.Argument(metavar="[BASE]", parser=model, help="A base model; by default a random pair.")
    ] = None,
    finetuned: Annotated[
        Path | None, typer.Argument(metavar="[FINETUNED]", parser=model, help="A model fine-tuned from it.")
    ] = None,
    *,
    layer: Annotated[int, typer.Option(min=0, help="Which decoder layer.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Rows of random tokens.")] = 16,
    seq_len: Annotated[
        int | None, typer.Option(min=2, max=4096, help="Tokens in each.", show_default="2048, or the model's positions")
    ] = None,
    device: BenchDevice = "auto",
) -> None:
    """Say how exact the sums of asymmetric targets are in each precision, as the delta gets smaller."""
    check_driver(device)
    from deltacompress.bench.precision import run
    from deltacompress.cli.shown import render

    with console.progress() as reporter:
        data = run(
            base, finetuned, layer=layer, samples=samples, seq_len=seq_len, device=device, reporter=reporter
        ).to_json()
    console.result(data, lambda: render.summary_and_rows("precision", data, table="rows"))


@app.command("architectures")
@verb
def architectures(
    console: Console,
    types: Annotated[
        list[str] | None, typer.Argument(metavar="[TYPE]...", help="Model types, as in config.json; all by default.")
    ] = None,
) -> None:
    """Say which causal model types of the installed transformers are taken, and why others are refused."""
    from deltacompress.cli.shown import render
    from deltacompress.models.architectures.survey import run

    with console.progress() as reporter:
        data = run(types or (), reporter=reporter).to_json()
    shown = data | {"rows": [row | {"taken": "yes" if row["taken"] else "no"} for row in data["rows"]]}
    console.result(data, lambda: render.summary_and_rows("architectures", shown, table="rows"))


for part in (adapter_requests, pairs, predict, simulate, serve, tuning):
    part.register(app)
