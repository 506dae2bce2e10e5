"""A base and variants of it that captured forwards serve."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pairs import Pair, Weights, changed
from runtime_cases import noise, serve


def but_tokens(seed: int) -> Callable[[Weights], Weights]:
    """Another fine-tuning, of all but embedding and head, whose rows on a CPU are decided on at every step."""

    def change(weights: Weights) -> Weights:
        made = noise(seed, 0.05)(weights)
        return {name: weights[name] if "embed" in name or "lm_head" in name else one for name, one in made.items()}

    return change


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    """A base and five variants of it in two formats."""
    pair, root = make_pair(getattr(request, "param", "llama")), tmp_path_factory.mktemp("fleet")
    found = {}
    for seed, name in enumerate("abcde", start=5):
        (root / name).mkdir()
        shutil.copytree(pair.base, root / name / "base")
        made = changed(replace(pair, finetuned=pair.base), root / name, but_tokens(seed))
        found[name] = serve(made, root / name, "int4-24" if seed % 2 else "int2-24").artifact
    return pair.base, found
