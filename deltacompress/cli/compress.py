"""`deltacompress compress`: a fine-tuned model becomes a delta of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deltacompress.cli.console import Console, verb

Lossless = Literal["none", "zstd", "gdeflate", "ans"]
Device = Literal["auto", "cpu", "cuda"]


@verb
def compress(
    console: Console,
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="Directory of the base model (safetensors and config.json).")
    ],
    finetuned: Annotated[Path, typer.Argument(metavar="FINETUNED", help="Directory of the fine-tuned model.")],
    *,
    recipe: Annotated[
        str, typer.Option(help="Name of a shipped recipe (int2-24, int4-24, lossless, ...) or path of a YAML file.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to publish the artifact as.")],
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Calibration data: a .jsonl, .parquet or .txt file, or the id of a data set. "
            "A recipe that only rounds or copies needs none."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Calibration sequences.", show_default="the recipe's, normally 256")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each sequence.", show_default="the recipe's, normally 256")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling.", show_default="the recipe's, normally 0")
    ] = None,
    lossless: Annotated[Lossless, typer.Option(help="Last, exact stage; gdeflate and ans need a GPU.")] = "zstd",
    device: Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run of --out stopped.")] = False,
) -> None:
    """Compress FINETUNED into a small, verified delta of BASE."""
    from deltacompress.cli import render
    from deltacompress.driver import compress as compress_pair
    from deltacompress.recipe import Recipe

    with console.progress() as reporter:
        result = compress_pair(
            base,
            finetuned,
            recipe=Recipe.load(recipe),
            calibration=calibration,
            out=out,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            lossless=lossless,
            device=device,
            resume=resume,
            reporter=reporter,
        )
    data = result.to_json()
    console.result(data, lambda: render.summary_and_rows(f"delta in {out}", data, table="parts"))
