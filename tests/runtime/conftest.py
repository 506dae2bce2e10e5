"""Compressed tiny pairs, made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pairs import Pair, changed
from runtime_cases import Served, noise, serve
from torch import Tensor

from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.steps.decoder import Decoder


@pytest.fixture(scope="session")
def served(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """served(architecture, recipe=..., seed=...): compressed and restored once."""
    made: dict[tuple[str, str, int], Served] = {}

    def make(architecture: str = "llama", recipe: str = "int4-24", seed: int = 0) -> Served:
        key = (architecture, recipe, seed)
        if key not in made:
            root = tmp_path_factory.mktemp("served")
            pair = make_pair(architecture)
            made[key] = serve(pair if seed == 0 else changed(pair, root, noise(seed)), root, recipe)
        return made[key]

    return make


@pytest.fixture(scope="session")
def trio(served: Callable[..., Served]) -> dict[str, Served]:
    """Three variants of one Llama, packed differently."""
    return {"a": served(recipe="int4-24"), "b": served(recipe="int2-24", seed=2), "c": served(recipe="int4", seed=3)}


@pytest.fixture
def runtime(trio: dict[str, Served]) -> Runtime:
    """The base of `trio` with all three loaded."""
    made = Runtime.from_base(trio["a"].pair.base)
    for name, one in trio.items():
        made.load(one.artifact, name)
    return made


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each decode step that is launched here: whether the host did not know its tokens."""
    real, found = Decoder.step, list[bool]()

    def step(self: Decoder, chosen: Tensor | None = None) -> Tensor:
        found.append(chosen is not None)
        return real(self, chosen)

    monkeypatch.setattr(Decoder, "step", step)
    return found
