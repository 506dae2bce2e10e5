"""One family of variants, and a runtime with all of it: made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pairs import Pair
from runtime.adapters.family import Family, make_family

from deltacompress.runtime import Runtime


@pytest.fixture(scope="session")
def family(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Of a Llama, wide enough for all rotations."""
    pair = make_pair("llama", hidden_size=64, intermediate_size=64)
    return make_family(pair, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="session")
def everyone(family: Family) -> Runtime:
    """A runtime with all kinds loaded; whoever loads more unloads it."""
    made = Runtime.from_base(family.pair.base)
    for name, kind in family.kinds.items():
        made.load(kind.path, name)
    return made
