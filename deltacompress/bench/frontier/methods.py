"""The methods of the table: recipes (shipped, baselines, files), each of one size, and those that take a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from deltacompress.bench.frontier.sketches import DRAWN, SKETCHES
from deltacompress.budget.rungs import RUNGS
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import InputError, option
from deltacompress.evaluation.methods.names import load_method
from deltacompress.files.content import shipped_yaml

METHODS = (
    "budget,int4-24,int2-24,sign-24,storage,storage-small,int4,int2,deltazip-4bit,deltazip-2bit,"
    "bitdelta,svd,delta-come,sign+svd,dare,largest,impart,ultradelta"
)
RATIOS = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
BUDGET = "budget"
"""`compress --target-ratio`: what the budget solver chooses for a size."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A method by its label. recipe: None of one that takes a size: the budget, or a sketch."""

    label: str
    recipe: Recipe | None

    @property
    def seeded(self) -> bool:
        """Whether a seed changes what comes out."""
        if self.recipe is None:
            return self.label in (BUDGET, *DRAWN)
        return self.recipe.needs_calibration


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. asked: a ratio of sizes, of methods that take one; seed: of calibration or chance, if any."""

    task: str
    method: Chosen
    asked: float | None
    seed: int | None

    @property
    def key(self) -> str:
        """Its name among the finished ones; the recipe is in it, or what a budget chooses from."""
        recipe = "" if self.method.recipe is None else self.method.recipe.model_dump_json()
        if self.method.label == BUDGET:
            recipe = repr([(one.name, one.rule("linear")) for one in RUNGS.values()])
        return f"{self.task} {self.method.label} {self.asked} {self.seed} {recipe}"

    def __str__(self) -> str:
        size = "" if self.asked is None else f" at {self.asked:g}x"
        return f"{self.task}: {self.method.label}{size}" + ("" if self.seed is None else f", seed {self.seed}")


def chosen(names: Sequence[str]) -> list[Chosen]:
    """The methods by names, or paths of recipes.

    Raises:
        InputError: no such method, none, or one is named twice.
    """
    if not names:
        raise InputError("names none", where=option("methods"), way_out="give one or more")
    found = [Chosen(Path(name).stem, None if name in (BUDGET, *SKETCHES) else _recipe(name)) for name in names]
    labels = [one.label for one in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise InputError(f"{twice[0]} is given twice", where=option("methods"), way_out="name each once")
    return found


def _recipe(name: str) -> Recipe:
    known = [*shipped_yaml("evals/baselines"), *shipped_yaml("calibration/recipes"), BUDGET, *SKETCHES]
    if name not in known and Path(name).suffix not in (".yaml", ".yml"):
        close = get_close_matches(name, known, n=2)
        told = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known))}"
        raise InputError(
            f"unknown method {name!r}", where=option("methods"), way_out=f"{told} (or give the path of a recipe)"
        )
    return load_method(name)


def points(
    tasks: Sequence[str], methods: Sequence[Chosen], ratios: Sequence[float], seeds: Sequence[int]
) -> Iterator[Point]:
    """All measurements of a table, task by task."""
    for task in tasks:
        for method in methods:
            for asked in ratios if method.recipe is None else (None,):
                for seed in seeds if method.seeded else (None,):
                    yield Point(task, method, asked, seed)
