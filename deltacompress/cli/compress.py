"""`deltacompress compress`: a fine-tuned model becomes a delta of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deltacompress.cli import early
from deltacompress.cli.console import Console, verb
from deltacompress.cli.models import model
from deltacompress.errors import InputError

Lossless = Literal["none", "zstd", "gdeflate", "ans"]
Device = Literal["auto", "cpu", "cuda"]
_PANEL = "Gate and zoo"


@verb
def compress(
    console: Console,
    base: Annotated[
        Path,
        typer.Argument(metavar="BASE", parser=model, help="Directory of the base model (safetensors and config.json)."),
    ],
    finetuned: Annotated[
        Path, typer.Argument(metavar="FINETUNED", parser=model, help="Directory of the fine-tuned model.")
    ],
    *,
    recipe: Annotated[
        str, typer.Option(help="Name of a shipped recipe (int2-24, int4-24, lossless, ...) or path of a YAML file.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to publish the artifact as.")],
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Calibration data: a .jsonl, .json, .parquet or .txt file, or the id of a data set. "
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
    lossless: Annotated[
        Lossless, typer.Option(help="Last, exact stage; gdeflate and ans need the extra gpu, and ans a GPU.")
    ] = "zstd",
    device: Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run of --out stopped.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another artifact in --out, once the new one is whole.")
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Policy (shipped name or YAML) that must pass before --out comes to exist.", rich_help_panel=_PANEL
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks that --gate measures, separated by commas.",
            show_default="those that the policy requires",
            rich_help_panel=_PANEL,
        ),
    ] = "",
    task_dir: Annotated[
        Path | None, typer.Option(help="Folder with <task>/validation.jsonl or <task>.yaml.", rich_help_panel=_PANEL)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first samples of each task.", rich_help_panel=_PANEL)
    ] = None,
    zoo: Annotated[
        str | None,
        typer.Option(
            help="Also publish to this zoo (path or URL), as --name.",
            show_default="DELTACOMPRESS_ZOO",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="namespace/name of the entry in the zoo.", rich_help_panel=_PANEL)
    ] = None,
) -> None:
    """Compress FINETUNED into a small, verified delta of BASE; with --gate only if it keeps enough."""
    from deltacompress.cli import render

    if gate is None and (tasks or task_dir or limit):
        raise InputError("--tasks, --task-dir and --limit say what a gate measures: give --gate POLICY")
    if name is not None:
        from deltacompress.zoo.exchange.resolve import check_destination

        check_destination(name, zoo)
    elif zoo is not None:
        raise InputError("give the entry a name too, --name NAMESPACE/NAME", where=f"--zoo {zoo}")
    if gate is not None:
        early.gate(gate, tasks, task_dir, limit=limit)
    early.compression(base, finetuned, out, recipe, calibration, lossless, device)
    from deltacompress.codecs.recipe import Recipe
    from deltacompress.compression.driver import compress as compress_pair

    options: dict[str, Any] = {
        "recipe": Recipe.load(recipe),
        "calibration": calibration,
        "out": out,
        "samples": samples,
        "seq_len": seq_len,
        "seed": seed,
        "lossless": lossless,
        "device": device,
        "resume": resume,
        "force": force,
    }
    report = None
    with console.progress() as reporter:
        if gate is None:
            result = compress_pair(base, finetuned, reporter=reporter, **options)
        else:
            from deltacompress.evaluation import Gate, compress_gated

            passed = compress_gated(
                base,
                finetuned,
                gate=Gate.load(gate),
                tasks=[one for one in tasks.split(",") if one],
                task_dir=task_dir,
                limit=limit,
                reporter=reporter,
                **options,
            )
            result, report = passed.compressed, passed.report
        data = result.to_json()
        if name is not None:
            from deltacompress.zoo.exchange.resolve import publish_artifact

            data["published"] = publish_artifact(out, name, zoo, reporter=reporter)
            if report is not None:
                from deltacompress.evaluation.zoo import attach_report

                attach_report(zoo, data["published"], out.name, report)
    console.result(data, lambda: render.summary_and_rows(f"delta in {out}", data, table="parts"))
