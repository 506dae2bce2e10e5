"""Whatever an adapter's directory holds, it is read or refused in one line.

More inputs: DELTACOMPRESS_FUZZ=200000 pytest --timeout=0 (a test may not take so long otherwise).
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
from adapters.made import AT, BASE, LORA, ROSA, Q, config, lora, numbers, rosa
from adapters.test_changes import TOKENS, boft, dora, rows, shira
from adapters.test_rosa import ENTRIES
from safetensors.numpy import save

from deltacompress.adapters.adapter import open_adapter
from deltacompress.adapters.fields import FIELDS
from deltacompress.adapters.values import check_values, entries
from deltacompress.errors import BaseMismatchError, CheckpointError

INPUTS = int(os.environ.get("DELTACOMPRESS_FUZZ", "1500"))
SEEDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LORA, lora() | {f"{AT}{Q}.base_layer.bias": numbers(4)}),
    (LORA | {"use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"self_attn\.q_proj": 3}}, dora()),
    (TOKENS | {"modules_to_save": ["lm_head"]}, lora() | rows() | {f"{AT}lm_head.weight": numbers(13, 8)}),
    (config("BOFT", boft_block_size=2, boft_n_butterfly_factor=2), boft(2)),
    (config("SHIRA", r=1), shira()),
    (
        ROSA | {"density_pattern": {"q_proj": 0.25}},
        rosa(ENTRIES),
    ),
]
ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**70,
    0.5,
    -0.0,
    1e300,
    "",
    "q_proj",
    "(a+)+$",
    ".*",
    "\u202e",
    "0" * 400,
]
ODD += [
    [],
    {},
    [[]],
    ["q_proj"],
    [1, 5],
    [0.5],
    [True],
    {"q_proj": 2},
    {"a|b": 1},
    {"": []},
    {"lm_head": [0]},
    [{}],
    ["norm"],
]
FIELD_NAMES = sorted({name for one in FIELDS.values() for name in (*one.read, *one.inert, *one.off)})
TAILS = [
    "lora_A.weight",
    "lora_B.bias",
    "boft_s",
    "shira_indices",
    "rosa_spa.col_idx",
    "weight",
    "base_layer.bias",
    "x",
]
TAILS += [
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
    "modules_to_save.weight",
    "base_layer.weight",
]
TYPES = [np.float32, np.float16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float64]


def change_config(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    name = draw.choice([draw.choice(FIELD_NAMES), draw.choice(sorted(settings)), "new_field"])
    if draw.random() < 0.15:
        return {key: value for key, value in settings.items() if key != name}
    return settings | {name: draw.choice(ODD)}


def change_tensors(draw: random.Random, tensors: dict[str, Any]) -> dict[str, Any]:
    name = draw.choice(sorted(tensors))
    array = tensors[name]
    kind = draw.randrange(6)
    if kind == 0:
        return {key: one for key, one in tensors.items() if key != name}
    if kind == 1:
        module = draw.choice(
            [Q, "lm_head", "model.embed_tokens", "model.norm", "model.layers.0.mlp.experts.0.up_proj", ""]
        )
        return tensors | {f"{AT}{module}.{draw.choice(TAILS)}": array}
    if kind == 2:
        with np.errstate(all="ignore"):
            return tensors | {name: array.astype(draw.choice(TYPES))}
    if kind == 3:
        shape = [draw.choice([0, 1, 2, 4, 8, 12, size]) for size in (*array.shape, 1)][: draw.randrange(4)]
        return tensors | {name: np.resize(array, shape) if array.size else array}
    if kind == 4:
        broken = array.copy().reshape(-1)
        if broken.size:
            bits = broken.view(np.uint8)
            bits[draw.randrange(bits.size)] ^= 1 << draw.randrange(8)
        return tensors | {name: broken.reshape(array.shape)}
    return {draw.choice([AT, "", AT + AT]) + key.removeprefix(AT): one for key, one in tensors.items()}


def change_bytes(draw: random.Random, raw: bytes) -> bytes:
    if draw.random() < 0.3:
        return raw[: draw.randrange(len(raw))]
    at = draw.randrange(min(len(raw), 600))
    return raw[:at] + bytes([draw.randrange(256)]) + raw[at + draw.randrange(3) :]


def test_what_is_changed_is_read_or_refused(tmp_path: Path) -> None:
    outcomes = {"read": 0, "refused": 0}
    for number in range(INPUTS):
        draw = random.Random(number)
        settings, tensors = draw.choice(SEEDS)
        for _ in range(draw.randrange(3)):
            settings = change_config(draw, settings)
        for _ in range(draw.randrange(3)):
            tensors = change_tensors(draw, tensors)
        text = json.dumps(settings).encode()
        raw = save({key: np.ascontiguousarray(one) for key, one in tensors.items()})
        if draw.random() < 0.1:
            text = change_bytes(draw, text)
        if draw.random() < 0.1:
            raw = change_bytes(draw, raw)
        (tmp_path / "adapter_config.json").write_bytes(text)
        (tmp_path / "adapter_model.safetensors").write_bytes(raw)
        try:
            adapter = open_adapter(tmp_path, BASE)
            check_values(adapter)
        except (CheckpointError, BaseMismatchError) as error:
            assert "\n" not in str(error), number  # noqa: PT017
            assert str(error).startswith(str(tmp_path)), number  # noqa: PT017
            assert len(str(error)) < 1500, number  # noqa: PT017
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        _holds(adapter, number)
    assert min(outcomes.values()) > INPUTS // 10


def _holds(adapter: Any, number: int) -> None:
    """What is read is usable: every tensor is one of the file's, every entry is inside, every scale a number."""
    for change in adapter.changes.values():
        assert change.tensors, number
        assert set(change.tensors) <= set(adapter.tensors), number
        if change.low_rank is not None:
            assert np.isfinite(change.low_rank.scale), number
            assert adapter.tensors[change.low_rank.A].info.shape == (change.low_rank.rank, change.inputs), number
        if change.sparse is not None:
            rows, columns = entries(adapter, change)
            assert rows.size == change.sparse.count, number
            assert 0 <= rows.min() <= rows.max() < change.outputs, number
            assert 0 <= columns.min() <= columns.max() < change.inputs, number
