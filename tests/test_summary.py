"""What `inspect` tells: the order of its rows."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from pairs import make_pair

from deltacompress.artifact import load_delta
from deltacompress.summary import natural


def test_layers_are_sorted_as_numbers() -> None:
    names = [f"model.layers.{i}.mlp.{j}.weight" for i in (0, 2, 9, 10, 11, 100) for j in ("down_proj", "up_proj")]
    mixed = random.Random(0).sample(names, len(names))
    assert sorted(mixed, key=natural) == names


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_names_can_be_compared(names: list[str]) -> None:
    """Names may begin with a digit, hold none, be empty, or hold digits of other scripts."""
    assert sorted(sorted(names, key=natural)) == sorted(names)


def test_the_rows_of_an_artifact(tmp_path: Path) -> None:
    deep = make_pair(tmp_path, "llama", num_hidden_layers=11)
    deep.compress(tmp_path / "out", recipe="lossless")
    rows = [row["name"] for row in load_delta(tmp_path / "out").summary()["tensors"]]
    layers = [int(name.split(".")[2]) for name in rows if ".layers." in name]
    assert layers == sorted(layers)
    assert 10 in layers
