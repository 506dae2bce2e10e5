"""RoSA as its authors' fork of PEFT saves it: low rank and compressed rows, whose columns are 16 bits, unsigned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.made import AT, BASE, ROSA, Q, numbers, rosa, write

from deltacompress.adapters.adapter import open_adapter
from deltacompress.adapters.records import LowRank, Sparse
from deltacompress.adapters.values import check_values, entries
from deltacompress.errors import BaseMismatchError, CheckpointError

ENTRIES = [(0, 1), (0, 7), (1, 0), (1, 3), (3, 0), (3, 2), (3, 5), (3, 7)]  # a quarter of 4 x 8; row 2 has none
NAME = f"{AT}{Q}.rosa_spa."


def test_both_parts_of_a_module(tmp_path: Path) -> None:
    adapter = open_adapter(write(tmp_path, ROSA, rosa(ENTRIES)), BASE)
    check_values(adapter)
    change = adapter.changes[Q]
    at = f"{AT}{Q}.rosa_"
    assert change.low_rank == LowRank(f"{at}A.weight", f"{at}B.weight", 2, 1.5)
    assert change.sparse == Sparse(NAME + "values", 8, row_offsets=NAME + "row_offs", columns=NAME + "col_idx")
    assert (adapter.kind, adapter.modules) == ("rosa", 1)
    rows, columns = entries(adapter, change)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == ENTRIES


def test_columns_beyond_32767_are_there_though_they_look_negative(tmp_path: Path) -> None:
    wide = BASE | {f"{Q}.weight": (2, 50_000)}
    places = [(0, 0), (0, 32_767), (0, 32_768), (0, 49_999), (1, 40_000)]
    tensors = rosa(places, 2, 50_000, rank=0)
    assert tensors[NAME + "col_idx"].min() < 0
    adapter = open_adapter(write(tmp_path, ROSA | {"r": 0, "d": 5e-5}, tensors), wide)
    check_values(adapter)
    rows, columns = entries(adapter, adapter.changes[Q])
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == places
    with pytest.raises(BaseMismatchError, match="16 bits do not number its 70000 columns"):
        open_adapter(write(tmp_path, ROSA | {"r": 0, "d": 4e-5}, tensors), BASE | {f"{Q}.weight": (2, 70_000)})
    at_the_edge = rosa([(0, 0), (0, 45_000)], 2, 40_000, rank=0)
    adapter = open_adapter(
        write(tmp_path, ROSA | {"r": 0, "d": 2.5e-5}, at_the_edge), BASE | {f"{Q}.weight": (2, 40_000)}
    )
    with pytest.raises(CheckpointError, match="has an entry outside of its weight"):
        check_values(adapter)


def test_one_part_alone(tmp_path: Path) -> None:
    alone = open_adapter(write(tmp_path / "s", ROSA | {"r": 0}, rosa(ENTRIES, rank=0)), BASE).changes[Q]
    assert alone.low_rank is None
    assert alone.sparse is not None
    dense = {name: one for name, one in rosa(ENTRIES).items() if "spa" not in name}
    alone = open_adapter(write(tmp_path / "l", ROSA | {"d": 0}, dense), BASE).changes[Q]
    assert alone.low_rank is not None
    assert alone.sparse is None


def test_the_transposed_copy_is_left_alone(tmp_path: Path) -> None:
    copy = {NAME + f"tr_{one}": numbers(3).astype(np.int16) for one in ("perm", "row_offs", "row_idx", "col_idx")}
    check_values(open_adapter(write(tmp_path, ROSA | {"spa_store_transpose": True}, rosa(ENTRIES) | copy), BASE))


def changed(**parts: Any) -> dict[str, Any]:
    return rosa(ENTRIES) | {NAME + name: one for name, one in parts.items()}


OFFS, COLS = [0, 2, 4, 4, 8], [1, 7, 0, 3, 0, 2, 5, 7]
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no mask yet": ({}, changed(row_offs=np.zeros(5, np.int32)), r"to the 8 entries \(all 0: .*before its mask"),
    "begins late": ({}, changed(row_offs=np.array([1, 2, 4, 4, 8], np.int32)), "does not rise from 0"),
    "falls": ({}, changed(row_offs=np.array([0, 4, 2, 4, 8], np.int32)), "does not rise"),
    "ends early": ({}, changed(row_offs=np.array([0, 2, 4, 4, 7], np.int32)), "does not rise"),
    "twice": ({}, changed(col_idx=np.array([1, 1, *COLS[2:]], np.int16)), "has an entry twice"),
    "twice, apart": ({}, changed(col_idx=np.array([*COLS[:4], 7, 2, 5, 7], np.int16)), "has an entry twice"),
    "column 8": ({}, changed(col_idx=np.array([*COLS[:-1], 8], np.int16)), "outside of its weight"),
    "column -1": ({}, changed(col_idx=np.array([*COLS[:-1], -1], np.int32)), "outside of its weight"),
    "values of NaN": ({}, changed(values=np.full(8, np.nan, np.float32)), "values holds NaN or an infinity"),
    "another density": (
        {"d": 0.5},
        changed(),
        r"values has shape \[8\], the base and d 0\.5 of the config need \[16\]",
    ),
    "no density": ({"d": 0}, changed(), "has a sparse part, but its density is 0"),
    "no rank": ({"r": 0}, changed(), "has A and B, but its rank is 0"),
    "no columns": ({}, {k: v for k, v in changed().items() if "col_idx" not in k}, "row_offs and col_idx belong"),
    "no values": ({}, {k: v for k, v in changed().items() if "values" not in k}, "without values"),
    "no B": ({}, {k: v for k, v in changed().items() if "_B" not in k}, "without A, B"),
    "offsets of 16 bits": ({}, changed(row_offs=np.array(OFFS, np.int16)), "row_offs has dtype I16"),
    "columns as floats": ({}, changed(col_idx=np.array(COLS, np.float32)), "col_idx has dtype F32"),
    "one offset less": ({}, changed(row_offs=np.array(OFFS[1:], np.int32)), r"row_offs has shape \[4\]"),
    "whole values": ({}, changed(values=np.zeros(8, np.int32)), "values has dtype I32"),
    "d": ({"d": 1.5}, changed(), "d must be a number from 0 to 1"),
    "d as text": ({"d": "0.25"}, changed(), "d must be a number from 0 to 1"),
    "densities": ({"density_pattern": {"q_proj": -1}}, changed(), "density_pattern must map module names to densities"),
    "whole key": ({"rank_pattern": {"^model.x": 2}}, changed(), "which RoSA's fork reads otherwise"),
    "transposed": ({"fan_in_fan_out": True}, changed(), "fan_in_fan_out is set, which is not read of RoSA"),
    "quantized": ({"loftq_config": {"loftq_bits": 4}}, changed(), "loftq_config is set"),
    "began in the base": ({"init_lora_weights": "loftq"}, changed(), "LoftQ changes the weights of the base"),
    "unknown": ({"use_dora": True}, changed(), "'use_dora' is set, and no field of rosa"),
    "of an embedding": (
        {"target_modules": ["embed_tokens"]},
        {f"{AT}model.embed_tokens.rosa_embedding_A": numbers(2, 12)},
        "is no tensor of a rosa adapter that is read here",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused(tmp_path: Path, case: str) -> None:
    fields, tensors, told = WRONG[case]
    with pytest.raises((CheckpointError, BaseMismatchError), match=told) as error:
        check_values(open_adapter(write(tmp_path, ROSA | fields, tensors), BASE))
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_density_of_its_own(tmp_path: Path) -> None:
    """The number of entries is the share, rounded down."""
    fields = ROSA | {"d": 0.9, "density_pattern": {"q_proj": 0.28}}  # 8.96 of 32
    assert open_adapter(write(tmp_path, fields, rosa(ENTRIES)), BASE).changes[Q].sparse is not None
