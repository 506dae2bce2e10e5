"""`deltacompress compress`: a fine-tuned model becomes a delta of its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from deltacompress.cli.compressing.budget import JudgeBy, MaxKl, MaxSize, TargetRatio, check_judge, compress_to_budget
from deltacompress.cli.compressing.fleet import compress_jobs, plan_table
from deltacompress.cli.given import early
from deltacompress.cli.given.models import model
from deltacompress.cli.given.options import DeviceMemory, Devices
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown import render
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.shown.failures import UsageError
from deltacompress.devices import DeviceName, check_together, device_numbers
from deltacompress.errors import InputError

if TYPE_CHECKING:
    from deltacompress.compression.job import CompressResult
    from deltacompress.evaluation.report.data import Report
    from deltacompress.reporter import Reporter

T = TypeVar("T")
Lossless = Literal["none", "zstd", "gdeflate", "ans"]
DEFAULT_LOSSLESS: Lossless = "zstd"
DEFAULT_DEVICE: DeviceName = "auto"
_PANEL = "Gate and zoo"
_FLEET = "Many at once"

Base = Annotated[
    Path | None,
    typer.Argument(metavar="BASE", parser=model, help="Directory of the base model (safetensors and config.json)."),
]
Finetuned = Annotated[
    Path | None, typer.Argument(metavar="FINETUNED", parser=model, help="Directory of the fine-tuned model.")
]
RecipeOption = Annotated[
    str | None, typer.Option(help="Name of a shipped recipe (int2-24, int4-24, lossless, ...) or path of a YAML file.")
]
Out = Annotated[Path | None, typer.Option(help="Directory to publish the artifact as.")]
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
    Lossless | None,
    typer.Option(
        help="Last, exact stage; gdeflate and ans need the extra gpu, and ans a GPU.", show_default=DEFAULT_LOSSLESS
    ),
]
DeviceOption = Annotated[
    DeviceName | None,
    typer.Option(help="Where to compute; auto takes a GPU if there is one.", show_default=DEFAULT_DEVICE),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run of --out stopped.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and show the plan: sizes, memory, time. Writes nothing.")
]
Jobs = Annotated[
    Path | None,
    typer.Option(
        help="Compress every fine-tuned model of this jobs file (YAML), which says all but the options of this panel, "
        "--resume, --force and --zoo.",
        rich_help_panel=_FLEET,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that work on --jobs at once.", show_default="one for each GPU", rich_help_panel=_FLEET
    ),
]
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
    base: Base = None,
    finetuned: Finetuned = None,
    *,
    recipe: RecipeOption = None,
    target_ratio: TargetRatio = None,
    max_size: MaxSize = None,
    max_kl: MaxKl = None,
    judge: JudgeBy = None,
    out: Out = None,
    calibration: Calibration = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    lossless: LosslessOption = None,
    device: DeviceOption = None,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    workers: Workers = None,
    gate: GateOption = None,
    tasks: GateTasks = "",
    task_dir: GateTaskDir = None,
    limit: GateLimit = None,
    zoo: PublishZoo = None,
    name: PublishName = None,
) -> None:
    """Compress FINETUNED into a small, verified delta of BASE; with --gate only if it keeps enough."""
    data_of: dict[str, Any] = {"calibration": calibration, "samples": samples, "seq_len": seq_len, "seed": seed}
    asked = {"target_ratio": target_ratio, "max_size": max_size, "max_kl": max_kl}
    gated: dict[str, Any] = {"tasks": [one for one in tasks.split(",") if one], "task_dir": task_dir, "limit": limit}
    if jobs is not None:
        own = {"BASE": base, "FINETUNED": finetuned, "recipe": recipe, "out": out, **data_of, "lossless": lossless}
        own |= {"device": device, "devices": devices, "device_memory": device_memory, "gate": gate, **gated}
        own |= {"name": name, **asked, "judge": judge}
        compress_jobs(console, jobs, own, workers=workers, zoo=zoo, resume=resume, force=force, dry_run=dry_run)
        return
    base, finetuned = _given("argument 'BASE'", base), _given("argument 'FINETUNED'", finetuned)
    by_budget = any(value is not None for value in asked.values())
    check_judge(judge, by_budget=by_budget)
    recipe = (
        recipe if by_budget else _given("option '--recipe' (or one of --target-ratio, --max-size and --max-kl)", recipe)
    )
    out = _given("option '--out'", out)
    if workers is not None:
        raise InputError("says how many work on a jobs file: give --jobs FILE", where=f"--workers {workers}")
    where = {"device": device or DEFAULT_DEVICE, "devices": devices, "device_memory": device_memory}
    run = {"lossless": lossless or DEFAULT_LOSSLESS, **where, "resume": resume, "force": force}
    if by_budget:
        beside = {"recipe": recipe, "dry_run": dry_run, "gate": gate, **gated, "zoo": zoo, "name": name}
        compress_to_budget(console, base, finetuned, asked, {"out": out, "judge": judge, **data_of, **run}, beside)
        return
    options = {"recipe": recipe, "out": out, **data_of, **run}
    _by_recipe(console, base, finetuned, options, gate, gated, name, zoo, dry_run=dry_run)


def _by_recipe(
    console: Console,
    base: Path,
    finetuned: Path,
    options: dict[str, Any],
    gate: str | None,
    gated: dict[str, Any],
    name: str | None,
    zoo: str | None,
    *,
    dry_run: bool,
) -> None:
    """Check, plan or compress one model, and show what came of it."""
    out = options["out"]
    _check(console, base, finetuned, options, gate, gated, name, zoo)
    if dry_run:
        with console.progress() as reporter:
            planned = _plan(base, finetuned, options, reporter)
        console.result(planned, lambda: plan_table(planned))
        return
    with console.progress() as reporter:
        result, report = _compress(base, finetuned, options, gate, gated, reporter)
        data = result.to_json()
        if name is not None:
            data["published"] = _publish(out, name, zoo, report, reporter)
    notes = render.COMPRESSED
    console.result(data, lambda: render.summary_and_rows(f"delta in {out}", data, table="parts", notes=notes))


def _given(what: str, value: T | None) -> T:
    """A parameter that only --jobs does without; raises UsageError as Typer would."""
    if value is None:
        raise UsageError(f"Missing {what}", way_out="see deltacompress compress --help")
    return value


def _check(
    console: Console,
    base: Path,
    finetuned: Path,
    options: dict[str, Any],
    gate: str | None,
    gated: dict[str, Any],
    name: str | None,
    zoo: str | None,
) -> None:
    """All that can be told before torch is imported; raises as the rooms that look."""
    if gate is None and any(gated.values()):
        raise InputError("--tasks, --task-dir and --limit say what a gate measures: give --gate POLICY")
    _check_destination(name, zoo)
    if gate is not None:
        early.gate(gate, ",".join(gated["tasks"]), gated["task_dir"], limit=gated["limit"])
    from deltacompress.compression.job import device_memory

    device_memory(options["device_memory"])
    check_together(device_numbers(options["devices"]), options["device"])
    out = options["out"]
    early.compression(
        base, finetuned, out, options["recipe"], options["calibration"], options["lossless"], options["device"]
    )
    if options["resume"] and not early.waits(out):
        console.note(f"--resume: no unfinished run of {out} is there to go on with")


def _plan(base: Path, finetuned: Path, options: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    from deltacompress.codecs.recipe import Recipe
    from deltacompress.compression.before.dry_run import plan

    options = options | {"recipe": Recipe.load(options["recipe"]), "reporter": reporter}
    return plan(base, finetuned, **options).to_json()


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
    with nothing_begun():
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
