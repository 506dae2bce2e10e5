"""The methods that `compare` knows, by name; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import InputError, option
from deltacompress.files.content import shipped_yaml

METHODS = (
    "sparsegpt-direct-4bit,gptq-direct-4bit,rtn-direct-4bit,rtn-4bit,sign-rtn,bitdelta,low-rank,int4-24,int2-24,sign-24"
)
DONORS = {"bitdelta": "sign-rtn", "low-rank": "int2-24"}
"""Recipe of the artifact that a baseline takes everything but the linear weights from. Low rank gets, matrix by matrix,
the bytes that its donor spends there."""


def load_methods(names: Sequence[str]) -> dict[str, Recipe | None]:
    """The recipes of methods by their labels, None for one of DONORS; without names: of all baselines and of ours.

    Raises:
        InputError: no such method, or one is named twice.
    """
    chosen = list(names) if names else METHODS.split(",")
    recipes = {Path(name).stem: None if name in DONORS else load_method(name) for name in chosen}
    if len(recipes) != len(chosen):
        raise InputError("a method is named twice", where=f"{option('methods')} {','.join(chosen)}")
    return recipes


def load_method(name: str) -> Recipe:
    """The recipe of a method, by name or path.

    Raises:
        InputError: no such method.
    """
    baselines, shipped = shipped_yaml("evals/baselines"), shipped_yaml("calibration/recipes")
    if name in baselines:
        return Recipe.load(baselines[name])
    if name in shipped or Path(name).suffix in (".yaml", ".yml"):
        return Recipe.load(name)
    known = sorted({*baselines, *shipped, *DONORS})
    close = get_close_matches(name, known, n=2)
    told = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise InputError(
        f"unknown method {name!r}", where=option("methods"), way_out=f"{told} (or give the path of a recipe)"
    )
