"""`deltacompress compress`: a fine-tuned model becomes a delta of its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deltacompress.cli import early
from deltacompress.cli.console import Console, verb
from deltacompress.cli.models import model
from deltacompress.cli.options import Device, FinetunedArgument
from deltacompress.errors import InputError

if TYPE_CHECKING:
    from deltacompress.compression.job import CompressResult
    from deltacompress.evaluation.report.data import Report
    from deltacompress.reporter import Reporter

Lossless = Literal["none", "zstd", "gdeflate", "ans"]
_PANEL = "Gate and zoo"

Base = Annotated[
    Path,
    typer.Argument(metavar="BASE", parser=model, help="Directory of the base model (safetensors and config.json)."),
]
RecipeOption = Annotated[
    str, typer.Option(help="Name of a shipped recipe (int2-24, int4-24, lossless, ...) or path of a YAML file.")
]
Out = Annotated[Path, typer.Option(help="Directory to publish the artifact as.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        help="Calibration data: a .jsonl, .json, .parquet or .txt file, or the id of a data set. "
        "A recipe that only rounds or copies needs none."
    ),
]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Calibration sequences.", show_default="the recipe's, normally 256")
]
SeqLen = Annotated[
    int | None, typer.Option(min=2, help="Tokens of each sequence.", show_default="the recipe's, normally 256")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.", show_default="the recipe's, normally 0")]
LosslessOption = Annotated[
    Lossless, typer.Option(help="Last, exact stage; gdeflate and ans need the extra gpu, and ans a GPU.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run of --out stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Replace another artifact in --out, once the new one is whole.")]
GateOption = Annotated[
    str | None,
    typer.Option(
        help="Policy (shipped name or YAML) that must pass before --out comes to exist.", rich_help_panel=_PANEL
    ),
]
GateTasks = Annotated[
    str,
    typer.Option(
        help="Tasks that --gate measures, separated by commas.",
        show_default="those that the policy requires",
        rich_help_panel=_PANEL,
    ),
]
GateTaskDir = Annotated[
    Path | None, typer.Option(help="Folder with <task>/validation.jsonl or <task>.yaml.", rich_help_panel=_PANEL)
]
GateLimit = Annotated[
    int | None, typer.Option(min=1, help="Only the first samples of each task.", rich_help_panel=_PANEL)
]
PublishZoo = Annotated[
    str | None,
    typer.Option(
        help="Also publish to this zoo (path or URL), as --name.",
        show_default="DELTACOMPRESS_ZOO",
        rich_help_panel=_PANEL,
    ),
]
PublishName = Annotated[
    str | None, typer.Option(help="namespace/name of the entry in the zoo.", rich_help_panel=_PANEL)
]


@verb
def compress(
    console: Console,
    base: Base,
    finetuned: FinetunedArgument,
    *,
    recipe: RecipeOption,
    out: Out,
    calibration: Calibration = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    lossless: LosslessOption = "zstd",
    device: Device = "auto",
    resume: Resume = False,
    force: Force = False,
    gate: GateOption = None,
    tasks: GateTasks = "",
    task_dir: GateTaskDir = None,
    limit: GateLimit = None,
    zoo: PublishZoo = None,
    name: PublishName = None,
) -> None:
    """Compress FINETUNED into a small, verified delta of BASE; with --gate only if it keeps enough."""
    from deltacompress.cli import render

    if gate is None and (tasks or task_dir or limit):
        raise InputError("--tasks, --task-dir and --limit say what a gate measures: give --gate POLICY")
    _check_destination(name, zoo)
    if gate is not None:
        early.gate(gate, tasks, task_dir, limit=limit)
    early.compression(base, finetuned, out, recipe, calibration, lossless, device)
    if resume and not early.waits(out):
        console.note(f"--resume: no unfinished run of {out} is there to go on with")
    options: dict[str, Any] = {
        "recipe": recipe,
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
    gated = {"tasks": [one for one in tasks.split(",") if one], "task_dir": task_dir, "limit": limit}
    with console.progress() as reporter:
        result, report = _compress(base, finetuned, options, gate, gated, reporter)
        data = result.to_json()
        if name is not None:
            data["published"] = _publish(out, name, zoo, report, reporter)
    console.result(data, lambda: render.summary_and_rows(f"delta in {out}", data, table="parts"))


def _check_destination(name: str | None, zoo: str | None) -> None:
    """Where the artifact is to be published, if anywhere; raises InputError, ZooError."""
    if name is not None:
        from deltacompress.zoo.exchange.resolve import check_destination

        check_destination(name, zoo)
    elif zoo is not None:
        raise InputError("give the entry a name too, --name NAMESPACE/NAME", where=f"--zoo {zoo}")


def _compress(
    base: Path,
    finetuned: Path,
    options: dict[str, Any],
    gate: str | None,
    gated: dict[str, Any],
    reporter: Reporter,
) -> tuple[CompressResult, Report | None]:
    """The result, and the report that a gate let pass."""
    from deltacompress.codecs.recipe import Recipe
    from deltacompress.compression.driver import compress as compress_pair

    options = options | {"recipe": Recipe.load(options["recipe"]), "reporter": reporter}
    if gate is None:
        return compress_pair(base, finetuned, **options), None
    from deltacompress.evaluation import Gate, compress_gated

    passed = compress_gated(base, finetuned, gate=Gate.load(gate), **gated, **options)
    return passed.compressed, passed.report


def _publish(out: Path, name: str, zoo: str | None, report: Report | None, reporter: Reporter) -> str:
    """The entry's name@version, once it is durable, with the report attached."""
    from deltacompress.zoo.exchange.resolve import publish_artifact

    published = publish_artifact(out, name, zoo, reporter=reporter)
    if report is not None:
        from deltacompress.evaluation.zoo import attach_report

        attach_report(zoo, published, out.name, report)
    return published
