"""The methods that `compare` knows, by name; needs no torch."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deltacompress.artifact.records import Manifest, TensorRecord
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import InputError, option
from deltacompress.files.content import shipped_yaml

METHODS = (
    "sparsegpt-direct-4bit,gptq-direct-4bit,rtn-direct-4bit,rtn-4bit,sign-rtn,bitdelta,low-rank,int4-24,int2-24,sign-24"
)
DONORS = {"low-rank": "int2-24"}
"""Methods whose recipe is made from the artifact of another one, the donor: low rank spends, matrix by matrix, the
bytes that its donor spends there."""
_FACTOR_BYTES = 2  # of an element: factors are fp16


def load_methods(names: Sequence[str]) -> dict[str, Recipe | None]:
    """The recipes of methods by their labels, None for those of DONORS; without names: of all baselines and of ours.

    Raises:
        InputError: no such method, or one is named twice.
    """
    chosen = list(names) if names else METHODS.split(",")
    recipes = {Path(name).stem: None if name in DONORS else load_method(name) for name in chosen}
    if len(recipes) != len(chosen):
        where = f"{option('methods')} {','.join(chosen)}"
        raise InputError("a method is named twice", where=where, way_out="name each once")
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


def at_equal_bytes(method: str, donor: Recipe, made: Manifest) -> Recipe:
    """The recipe of a method of DONORS: ranks by the bytes that the donor's artifact `made` spends, all else as there.

    Raises:
        InputError: it codes no linear weight.
    """
    linears = [one for one in made.tensors if one.kind == "linear" and one.status == "coded" and len(one.shape) == 2]
    if not linears:
        raise InputError(f"codes no linear weight, so {method} has nothing to do", where=f"recipe {donor.name}")
    rules = [_low_rank_rule(one) for one in linears]
    told = f"A baseline, the linear deltas by truncated SVD, of no more bytes than {donor.name} spends on each."
    rest = donor.model_dump(mode="json", include={"scope", "sequential", "rules", "calibration"})
    return Recipe.parse(rest | {"name": method, "description": told, "rules": [*rules, *rest["rules"]]})


def _low_rank_rule(linear: TensorRecord) -> dict[str, Any]:
    """The largest rank whose factors take at most the bytes of `linear`; the base's weight where not even one fits."""
    rows, columns = linear.shape
    rank = min(linear.bytes // (_FACTOR_BYTES * (rows + columns)), rows, columns)
    name = glob.escape(linear.name)
    return {"name": name, "codec": "low-rank", "rank": rank} if rank else {"name": name, "codec": "skip"}
