"""`deltacompress recipes`, `gates`, `tasks`: what ships, and what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacompress.cli.shown.console import Console, verb

if TYPE_CHECKING:
    from deltacompress.codecs.recipe import Recipe
    from deltacompress.evaluation.tasks.load import LocalSpec, SuiteSpec

ADVICE = (
    "start with int2-24; int4-24 where quality comes first; storage, storage-small for the least loss at their bytes "
    "on disk; sign-24 where size comes first; lossless where every bit counts, or for a model that cannot be "
    "calibrated; gptq-4bit for other engines"
)
Shown = Annotated[str | None, typer.Argument(metavar="NAME", help="Show this one as it is written.")]


@verb
def recipes(console: Console, name: Shown = None) -> None:
    """List the recipes of `compress`, with advice on which to take; NAME shows one."""
    from deltacompress.cli.shown import render
    from deltacompress.codecs.recipe import Recipe
    from deltacompress.files.content import shipped_yaml

    found = shipped_yaml("calibration/recipes")
    if name is not None:
        Recipe.load(name)  # or what is wrong with the name
        _show(console, found.get(name, Path(name)))
        return
    rows = [_recipe_row(Recipe.load(one)) for one in found]
    console.result(rows, lambda: render.rows("recipes", rows, spare=("scope", "calibrates")))
    console.note(ADVICE)


@verb
def gates(console: Console, name: Shown = None) -> None:
    """List the policies of `gate` and `compress --gate`; NAME shows one."""
    from deltacompress.cli.shown import render
    from deltacompress.evaluation.gate.rules import Gate
    from deltacompress.files.content import shipped_yaml

    found = shipped_yaml("evals/gates")
    if name is not None:
        Gate.load(name)
        _show(console, found.get(name, Path(name)))
        return
    policies = [Gate.load(one).policy for one in found]
    rows = [{"name": one.name, "samples": one.min_samples, "for": one.description} for one in policies]
    console.result(rows, lambda: render.rows("gates", rows))


@verb
def tasks(
    console: Console,
    name: Shown = None,
    *,
    task_dir: Annotated[
        Path | None, typer.Option(help="Also those of this folder: <task>/validation.jsonl or <task>.yaml.")
    ] = None,
) -> None:
    """List the tasks of `eval`, and where their data comes from; NAME shows one in full."""
    from deltacompress.cli.shown import render
    from deltacompress.evaluation.tasks.load import check_task_dir, find_spec, task_names

    check_task_dir(task_dir)
    if name is not None:
        data = find_spec(name, task_dir).model_dump(mode="json")
        console.result(data, lambda: render.summary(name, data))
        return
    rows = [_task_row(find_spec(one, task_dir)) for one in task_names(task_dir)]
    console.result(rows, lambda: render.rows("tasks", rows, spare=("kind",)))


def _show(console: Console, path: Path) -> None:
    """The file as it is: a table's lines would be broken where the screen ends."""
    from rich.text import Text

    text = path.read_text(encoding="utf-8").rstrip("\n")
    if console.settings.json or console.settings.quiet:
        console.result({"file": str(path), "text": text}, lambda: Text(text))
    else:
        console.write(text + "\n")


def _task_row(spec: LocalSpec | SuiteSpec) -> dict[str, Any]:
    if spec.kind == "suite":
        return {"name": spec.task, "kind": spec.kind, "data": "fetched by lm-eval", "for": spec.description}
    data = "here" if spec.data else f"--task-dir DIR, {spec.task}/"
    return {"name": spec.task, "kind": spec.kind, "data": data, "for": spec.description}


def _recipe_row(recipe: Recipe) -> dict[str, Any]:
    linear = next((rule for rule in recipe.rules if recipe.needs_kinds and rule.matches("", "linear")), None)
    bits = getattr(linear, "bits", None)
    return {
        "name": recipe.name,
        "linears": "as they are"
        if bits is None
        else f"{bits} bit{'s' * (bits > 1)}, {getattr(linear, 'sparsity', 'dense')}",
        "scope": recipe.scope,
        "calibrates": recipe.needs_calibration,
        "for": recipe.description,
    }
