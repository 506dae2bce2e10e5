"""`compress` by a size or a quality, and `analyze --predict`: options, checks, and what is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deltacompress.cli.given import early
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown import render
from deltacompress.cli.shown.console import Console
from deltacompress.devices import DeviceName, check_driver, check_together, device_numbers
from deltacompress.errors import CalibrationError, InputError, option

_PANEL = "A size or a quality in the place of --recipe"
TargetRatio = Annotated[
    float | None,
    typer.Option(help="The artifact is to be so many times smaller than FINETUNED, at least.", rich_help_panel=_PANEL),
]
MaxSize = Annotated[
    str | None, typer.Option(help="The artifact may take so much, such as 1.2GB.", rich_help_panel=_PANEL)
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        help="KL(fine-tuned || compressed) on the data judged by, in nats/token, may be so much, its 95 % bound.",
        rich_help_panel=_PANEL,
    ),
]
_JUDGE = "Records to judge by that FINETUNED was not trained on, as --calibration takes them; else some of those."
JudgeBy = Annotated[str | None, typer.Option("--judge", help=_JUDGE, rich_help_panel=_PANEL)]
_PREDICT = "With --predict"
PredictJudge = Annotated[str | None, typer.Option("--judge", help=_JUDGE, rich_help_panel=_PREDICT)]
PredictOn = Annotated[
    str | None,
    typer.Option("--calibration", help="Calibration data, as compress takes it.", rich_help_panel=_PREDICT),
]
PredictSamples = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="Calibration sequences.", show_default="256", rich_help_panel=_PREDICT),
]
PredictSeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", min=2, help="Tokens of each sequence.", show_default="256", rich_help_panel=_PREDICT),
]
PredictSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of the sampling.", show_default="0", rich_help_panel=_PREDICT),
]
PredictDevice = Annotated[
    DeviceName | None,
    typer.Option("--device", help="Where to compute.", show_default="auto", rich_help_panel=_PREDICT),
]


def check_judge(judge: str | None, *, by_budget: bool) -> None:
    """Without a budget nothing is judged; raises InputError."""
    if judge is not None and not by_budget:
        asked = ", ".join(option(name) for name in ("target_ratio", "max_size", "max_kl"))
        raise InputError("says what a budget is judged by", where=option("judge"), way_out=f"give one of {asked}, too")


def compress_to_budget(
    console: Console,
    base: Path,
    finetuned: Path,
    asked: Mapping[str, Any],
    options: Mapping[str, Any],
    beside: Mapping[str, Any],
) -> None:
    """Choose a recipe, compress by it, and show what was asked, predicted and reached.

    asked: the three; options: others of `compress`, as `compress_to` takes them; beside: those that do not go with it.

    Raises:
        InputError: two things are asked that may not agree; as compress_to.
    """
    _check(base, finetuned, asked, options, beside)
    with nothing_begun():
        from deltacompress.budget.places import recipe_path
        from deltacompress.budget.run import compress_to
    with console.progress() as reporter:
        result = compress_to(base, finetuned, **asked, **options, reporter=reporter)
    out = options["out"]
    console.note(f"recipe: {recipe_path(out)}")
    data = result.to_json()
    judged = "of tokens to be written, on the records judged by" if result.judged.tokens else "every bit is restored"
    notes = {"kl": judged} | render.COMPRESSED
    console.result(
        data, lambda: render.summary_and_rows(f"delta in {out}", data, table="parts", more="budget", notes=notes)
    )


def _check(
    base: Path, finetuned: Path, asked: Mapping[str, Any], options: Mapping[str, Any], beside: Mapping[str, Any]
) -> None:
    """What can be told before torch is imported."""
    from deltacompress.budget.request import Request

    first = next(name for name, value in asked.items() if value is not None)
    for name, value in beside.items():
        if value not in (None, False, []):
            told = f"does not go with {option(name)}"
            way_out = "give one of them; what a budget chose is a recipe that takes all other options"
            raise InputError(told, where=option(first), way_out=way_out)
    Request.of(**asked)
    if options["calibration"] is None:
        raise CalibrationError(f"a budget is chosen on data: give {option('calibration')} FILE (or a data set id)")
    from deltacompress.compression.job import device_memory

    device_memory(options["device_memory"])
    check_together(device_numbers(options["devices"]), options["device"])
    early.compression(
        base, finetuned, options["out"], None, options["calibration"], options["lossless"], options["device"]
    )
    if options["judge"] is not None:
        early.calibration(options["judge"])


def show_frontier(
    console: Console, base: Path, finetuned: Path, given: Mapping[str, Any], out: Path | None, *, force: bool
) -> None:
    """`analyze --predict`: the frontier, shown and, with `out`, written. given: options of `predict`.

    Raises:
        InputError: no calibration data; as predict and predict_into.
    """
    if given["calibration"] is None:
        raise CalibrationError(f"a prediction is made on data: give {option('calibration')} FILE (or a data set id)")
    options = dict(given) | {"device": given["device"] or "auto"}
    if out is not None:
        early.folder(out)
    check_driver(options["device"])
    early.calibration(options["calibration"])
    if options["judge"] is not None:
        early.calibration(options["judge"])
    early.checkpoints(base, finetuned)
    if out is None:
        from deltacompress.budget.prediction.frontier import predict

        with console.progress() as reporter:
            data = predict(base, finetuned, reporter=reporter, **options).to_json()
    else:
        from deltacompress.budget.prediction.output import predict_into

        with console.progress() as reporter:
            written = predict_into(out, base, finetuned, force=force, reporter=reporter, **options)
        for path in written.files:
            console.note(f"wrote {path}")
        if written.missing is not None:
            console.warn(written.missing)
        data = dict(written.data)
    for note in data["notes"]:
        console.warn(note)
    every = sorted((*data["points"], *data["shipped"]), key=lambda point: float(point["ratio"]))
    rows = [dict(point) | {"recipe": point["recipe"] or "best known"} for point in every]
    console.result(data, lambda: render.rows(f"predicted of {finetuned} against {base}", rows))
