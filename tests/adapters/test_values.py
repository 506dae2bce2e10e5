"""What tensors hold: finite numbers, entries inside of the weight, each once; read in pieces."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.made import AT, BASE, LORA, Q, config, lora, numbers, write
from numpy.typing import NDArray
from safetensors.torch import save_file

from deltacompress.adapters import values
from deltacompress.adapters.adapter import Adapter, open_adapter
from deltacompress.adapters.values import check_values, entries
from deltacompress.errors import CheckpointError

SHIRA = config("SHIRA", r=1)
SORTED = np.stack(np.unravel_index(np.arange(4, 28, 2), (4, 8))).astype(np.int32)  # 12 of 4 x 8


def shira(root: Path, indices: NDArray[Any], base: Any = BASE) -> Adapter:
    tensors = {f"{AT}{Q}.shira_weight": numbers(indices.shape[1]), f"{AT}{Q}.shira_indices": indices}
    return open_adapter(write(root, SHIRA, tensors), base)


@pytest.fixture(params=[1 << 20, 5], ids=["one piece", "many pieces"])
def _piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_PIECE", request.param)


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("order", [range(12), (11, 3, 0, 7, 1, 2, 4, 5, 6, 8, 9, 10)], ids=["rising", "in disorder"])
@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<f4"])
def test_entries_in_any_order_and_type(tmp_path: Path, order: Any, dtype: str) -> None:
    adapter = shira(tmp_path, SORTED[:, list(order)].astype(dtype))
    check_values(adapter)
    rows, columns = entries(adapter, adapter.changes[Q])
    assert np.array_equal(np.stack([rows, columns]), SORTED[:, list(order)])
    assert rows.dtype == columns.dtype == np.int64


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("band", [1 << 27, 8])
def test_entries_twice(tmp_path: Path, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_BAND", band)
    for first, second in ((0, 1), (0, 11), (4, 5), (11, 2)):
        indices = SORTED.copy()
        indices[:, first] = indices[:, second]
        adapter = shira(tmp_path, indices)
        for ask in (check_values, lambda one: entries(one, one.changes[Q])):
            with pytest.raises(CheckpointError, match=rf"module {Q} has an entry twice; get the adapter again"):
                ask(adapter)
    check_values(shira(tmp_path, SORTED[:, ::-1]))  # falling, none twice


@pytest.mark.parametrize(("row", "column"), [(4, 0), (-1, 0), (0, 8), (0, -1)])
def test_entries_outside(tmp_path: Path, row: int, column: int) -> None:
    indices = SORTED.copy()
    indices[:, 5] = row, column
    with pytest.raises(CheckpointError, match="outside of its weight"):
        check_values(shira(tmp_path, indices))


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, 3e9])
def test_floats_that_are_no_indices(tmp_path: Path, value: float) -> None:
    indices = SORTED.astype(np.float32)
    indices[1, 3] = value
    with pytest.raises(CheckpointError, match=r"shira_indices holds (what is no index|NaN or an infinity)"):
        check_values(shira(tmp_path, indices))


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [(0, 0), (1, 7)])
def test_numbers_that_are_none(tmp_path: Path, dtype: torch.dtype, value: float, at: tuple[int, int]) -> None:
    tensors = {name: torch.from_numpy(one).to(dtype) for name, one in lora().items()}
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    tensors[f"{AT}{Q}.lora_A.weight"][0, 1] = most  # the largest is a number
    write(tmp_path, LORA, {})
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    check_values(open_adapter(tmp_path, BASE))
    tensors[f"{AT}{Q}.lora_A.weight"][at] = value
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lora_A\.weight holds NaN or an infinity"):
        check_values(open_adapter(tmp_path, BASE))


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("value", [2.0**128, -1e300])
def test_what_float32_does_not_hold(tmp_path: Path, value: float) -> None:
    tensors = {name: torch.from_numpy(one).double() for name, one in lora().items()}
    tensors[f"{AT}{Q}.lora_B.weight"][1, 1] = value
    write(tmp_path, LORA, {})
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lora_B\.weight holds NaN or an infinity, or a number beyond float32"):
        check_values(open_adapter(tmp_path, BASE))


def test_whole_tensors_and_rows_are_looked_at_too(tmp_path: Path) -> None:
    brought = {f"{AT}lm_head.weight": numbers(12, 8)}
    brought |= {f"{AT}model.embed_tokens.token_adapter.trainable_tokens_delta": numbers(1, 8)}
    settings = LORA | {"modules_to_save": ["lm_head"], "trainable_token_indices": [3]}
    check_values(open_adapter(write(tmp_path, settings, lora() | brought), BASE))
    for name in brought:
        broken = brought | {name: np.full_like(brought[name], np.inf)}
        with pytest.raises(CheckpointError, match="holds NaN or an infinity"):
            check_values(open_adapter(write(tmp_path, settings, lora() | broken), BASE))


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("sizes", [{"weight": (12, 8), "bias": (12,)}, {"weight": (13, 8)}])
def test_copies_are_copies(tmp_path: Path, sizes: dict[str, tuple[int, ...]]) -> None:
    """The second is of a vocabulary that has grown."""
    base, settings = BASE | {"lm_head.bias": (12,)}, LORA | {"modules_to_save": ["lm_head"], "bias": "all"}
    for part in sizes:
        kept = ("", "modules_to_save.")
        head = {f"{AT}lm_head.{one}{name}": numbers(*size) for one in kept for name, size in sizes.items()}
        check_values(open_adapter(write(tmp_path, settings, lora() | head), base))
        head[f"{AT}lm_head.modules_to_save.{part}"].reshape(-1)[-1] += 1
        with pytest.raises(CheckpointError, match=rf"lm_head\.{part} differ, so which one is meant is not told"):
            check_values(open_adapter(write(tmp_path, settings, lora() | head), base))


def test_a_magnitude_that_is_there_twice(tmp_path: Path) -> None:
    """As PEFT writes it of an embedding that has grown: under both its names."""
    names = [f"{AT}{Q}.lora_magnitude_vector{end}" for end in ("", ".weight")]
    settings, file = LORA | {"use_dora": True}, lora() | dict.fromkeys(names, numbers(4))
    adapter = open_adapter(write(tmp_path / "a", settings, file), BASE)
    check_values(adapter)
    part = adapter.changes[Q].low_rank
    assert part is not None
    assert part.magnitude == names[0]
    differs = open_adapter(write(tmp_path / "b", settings, file | {names[1]: numbers(4) + 1}), BASE)
    with pytest.raises(CheckpointError, match="lora_magnitude_vector differ, so which one is meant is not told"):
        check_values(differs)
    alone = open_adapter(write(tmp_path / "c", settings, lora() | {names[1]: numbers(4)}), BASE)
    check_values(alone)


def test_a_file_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    adapter = open_adapter(write(tmp_path, LORA, lora()), BASE)
    adapter.weights.write_bytes(adapter.weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="changed since it was opened; run it again"):
        check_values(adapter)
    adapter.weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_values(adapter)


def test_memory_does_not_grow_with_the_adapter(tmp_path: Path) -> None:
    """40 MB of entries, in disorder, of a weight of 100 million."""
    outputs, inputs, rank = 10_000, 10_000, 167
    count = rank * (outputs + inputs)
    places = np.random.default_rng(0).permutation(outputs * inputs // 29)[:count] * 29
    indices = np.stack([places // inputs, places % inputs]).astype(np.int32)
    tensors = {f"{AT}{Q}.shira_weight": np.zeros(count, np.float32), f"{AT}{Q}.shira_indices": indices}
    adapter = open_adapter(write(tmp_path, SHIRA | {"r": rank}, tensors), {f"{Q}.weight": (outputs, inputs)})
    tracemalloc.start()
    check_values(adapter)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 120 << 20  # a piece of 2^20 entries in some arrays of 8 bytes each, and a bit for each place


def test_what_is_whole_when_it_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then which of both was read."""
    tensors = lora()
    next(iter(tensors.values())).flat[0] = np.nan
    adapter, look = open_adapter(write(tmp_path / "a", LORA, tensors), BASE), values._are_finite
    whole = (write(tmp_path / "b", LORA, lora()) / "adapter_model.safetensors").read_bytes()

    def replaced(file: Any, pieces: Any) -> bool:
        found = look(file, pieces)
        adapter.weights.write_bytes(whole)
        return found

    monkeypatch.setattr(values, "_are_finite", replaced)
    with pytest.raises(CheckpointError, match="changed while it was read; run it again"):
        check_values(adapter)
