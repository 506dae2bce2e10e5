"""Every tensor of an adapter changes something of its base, or is refused by name."""

from __future__ import annotations

import json
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.made import AT, BASE, LORA, ROSA, Q, config, lora, numbers, rosa, write
from blake3 import blake3
from numpy.typing import NDArray

from deltacompress.adapters.adapter import Adapter, check_alone, open_adapter, read_adapter
from deltacompress.adapters.changes import check_saved, half_note, modules_of
from deltacompress.adapters.directory import is_adapter
from deltacompress.adapters.records import Change, EmbeddingLowRank, LowRank, Rotation, Sparse, TokenRows, Whole
from deltacompress.adapters.settings import parse_settings
from deltacompress.adapters.values import check_values
from deltacompress.errors import BaseMismatchError, CheckpointError

Tensors = dict[str, NDArray[Any]]
TABLE, HEAD = f"{AT}model.embed_tokens", f"{AT}lm_head"
TOKENS = LORA | {"trainable_token_indices": [1, 5]}
K = "model.layers.0.self_attn.k_proj"
BOFT = config("BOFT", boft_block_size=2)
SHIRA = config("SHIRA", r=1)


def opened(root: Path, settings: dict[str, Any], tensors: Tensors, base: Any = BASE) -> Adapter:
    return open_adapter(write(root, settings, tensors), base, base_name="team/llama@1")


def boft(factors: int = 1, blocks: int = 4, block: int = 2, outputs: int = 4) -> Tensors:
    return {f"{AT}{Q}.boft_R": numbers(factors, blocks, block, block), f"{AT}{Q}.boft_s": numbers(outputs, 1)}


def shira(count: int = 12, indices: Any = None) -> Tensors:
    found = np.stack(np.unravel_index(np.arange(count), (4, 8))).astype(np.int32) if indices is None else indices
    return {f"{AT}{Q}.shira_weight": numbers(count), f"{AT}{Q}.shira_indices": found}


def embedded(rows: int = 12) -> Tensors:
    return {f"{TABLE}.lora_embedding_A": numbers(2, rows), f"{TABLE}.lora_embedding_B": numbers(8, 2)}


def rows(count: int = 2) -> Tensors:
    return {f"{TABLE}.token_adapter.trainable_tokens_delta": numbers(count, 8)}


def dora(shape: tuple[int, ...] = (4,), tail: str = "") -> Tensors:
    return lora() | {f"{AT}{Q}.lora_magnitude_vector{tail}": numbers(*shape)}


def test_records(tmp_path: Path) -> None:
    """Each kind, field by field."""
    at = f"{AT}{Q}."
    settings = LORA | {"use_rslora": True, "lora_alpha": 3, "rank_pattern": {"q_proj": 4}, "lora_bias": True}
    found = opened(tmp_path, settings, lora(rank=4) | {f"{at}lora_B.bias": numbers(4)}).changes
    part = LowRank(f"{at}lora_A.weight", f"{at}lora_B.weight", 4, 1.5, bias=f"{at}lora_B.bias")
    assert found == {Q: Change(Q, f"{Q}.weight", (4, 8), low_rank=part)}
    assert (found[Q].outputs, found[Q].inputs) == (4, 8)
    assert found[Q].tensors == (f"{at}lora_A.weight", f"{at}lora_B.weight", f"{at}lora_B.bias")
    table = opened(tmp_path, LORA | {"target_modules": ["embed_tokens"]}, embedded()).changes["model.embed_tokens"]
    assert table.embedding == EmbeddingLowRank(f"{TABLE}.lora_embedding_A", f"{TABLE}.lora_embedding_B", 2, 2.0)
    assert (table.outputs, table.inputs) == (8, 12)
    turned = opened(tmp_path, BOFT, boft()).changes[Q]
    assert turned.rotation == Rotation(f"{at}boft_R", f"{at}boft_s", 1, 2)
    sparse = opened(tmp_path, SHIRA, shira()).changes[Q]
    assert sparse.sparse == Sparse(f"{at}shira_weight", 12, indices=f"{at}shira_indices")
    single = opened(tmp_path, TOKENS, lora() | rows()).changes["model.embed_tokens"]
    assert single.rows == TokenRows((1, 5), f"{TABLE}.token_adapter.trainable_tokens_delta")


def test_the_digest_is_of_config_and_weights_only(tmp_path: Path) -> None:
    one = opened(tmp_path / "a", LORA, lora())
    assert one.digest  # waits for it, before the file is written again
    (tmp_path / "a" / "README.md").write_text("a card")
    assert opened(tmp_path / "a", LORA, lora()).digest == opened(tmp_path / "b", LORA, lora()).digest == one.digest
    raw = [(tmp_path / "a" / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    told = [
        ["adapter_config.json", blake3(raw[0]).hexdigest()],
        ["adapter_model.safetensors", blake3(raw[1]).hexdigest()],
    ]
    assert one.digest == sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()
    assert opened(tmp_path / "c", LORA | {"lora_alpha": 8}, lora()).digest != one.digest
    assert opened(tmp_path / "d", LORA, lora() | {f"{AT}{Q}.lora_A.weight": numbers(2, 8, seed=1)}).digest != one.digest


@pytest.mark.parametrize("tail", ["", ".weight"])
def test_magnitudes_under_both_their_names(tmp_path: Path, tail: str) -> None:
    change = opened(tmp_path, LORA | {"use_dora": True}, dora(tail=tail)).changes[Q]
    assert change.low_rank is not None
    assert change.low_rank.magnitude == f"{AT}{Q}.lora_magnitude_vector{tail}"


def test_what_is_trained_whole(tmp_path: Path) -> None:
    beside = lora() | {f"{AT}{Q}.base_layer.bias": numbers(4)}
    assert opened(tmp_path, LORA, beside).changes[Q].whole == Whole(bias=f"{AT}{Q}.base_layer.bias")
    older = lora() | {f"{AT}{Q}.bias": numbers(4)}  # of a PEFT whose layers were linears themselves
    assert opened(tmp_path, LORA, older).changes[Q].whole == Whole(bias=f"{AT}{Q}.bias")
    norm = opened(tmp_path, LORA | {"modules_to_save": ["norm"]}, lora() | {f"{AT}model.norm.weight": numbers(8)})
    assert norm.changes["model.norm"].whole == Whole(f"{AT}model.norm.weight")
    assert norm.modules == 1
    saved = LORA | {"modules_to_save": ["lm_head"]}
    copies = {f"{HEAD}.{one}weight": numbers(15, 8) for one in ("", "modules_to_save.", "original_module.")}
    grown = {f"{TABLE}.weight": numbers(15, 8)}
    head = opened(tmp_path, saved, lora() | copies | grown).changes["lm_head"]
    assert (head.whole, head.shape) == (Whole(f"{HEAD}.weight"), (15, 8))
    short = {f"{TABLE}.weight": numbers(14, 8)}
    for more, rows in (({}, 12), (short, 14)):
        told = f"its head has 15 rows, its embedding {rows}: it is served where the model ties the two only"
        assert opened(tmp_path, saved, lora() | copies | more).lacking == (told,)
    assert opened(tmp_path, saved, lora() | copies | grown).lacking == ()
    assert opened(tmp_path, LORA, lora() | grown).lacking == ()
    tied = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}
    as_embedding = opened(tmp_path, saved, lora() | copies, tied)
    assert (as_embedding.changes["lm_head"].tensor, as_embedding.lacking) == ("model.embed_tokens.weight", ())
    wide = embedded(15) | {f"{TABLE}.base_layer.weight": numbers(15, 8)}
    assert (
        opened(tmp_path, LORA | {"target_modules": ["embed_tokens"]}, wide).changes["model.embed_tokens"].inputs == 15
    )


def test_names_of_the_base_that_leave_out_the_prefix(tmp_path: Path) -> None:
    settings = LORA | {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    found = opened(tmp_path, settings, lora("transformer.h.0.c_attn", outputs=24), {"h.0.c_attn.weight": (8, 24)})
    change = found.changes["transformer.h.0.c_attn"]
    assert (change.tensor, change.outputs, change.inputs, change.transposed) == ("h.0.c_attn.weight", 24, 8, True)
    assert opened(tmp_path, LORA, lora(), {f"model.{Q}.weight": (4, 8)}).changes[Q].tensor == f"model.{Q}.weight"


SAVED = LORA | {"modules_to_save": ["lm_head"]}
NORM = LORA | {"modules_to_save": ["lm_head", "model.norm"]}
NOT_THE_BASES: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "outputs": (LORA, lora(outputs=8), r"lora B has shape \[8, 2\], the base needs \[4, 2\] \(base team/llama@1\)"),
    "inputs": (LORA, lora(inputs=4), r"lora A has shape \[2, 4\]"),
    "swapped": (LORA | {"fan_in_fan_out": True}, lora(inputs=9), r"the base needs \[2, 4\]"),
    "module": (LORA | {"target_modules": ["w"]}, lora("model.w"), "module model.w is not in the base"),
    "vector": (LORA | {"target_modules": ["norm"]}, lora("model.norm"), "not a matrix"),
    "table": (LORA | {"target_modules": ["embed_tokens"]}, embedded(13), r"lora embedding A has shape \[2, 13\]"),
    "magnitude": (LORA | {"use_dora": True}, dora((8,)), r"the magnitude has shape \[8\], the base needs \[4\]"),
    "magnitudes in a row": (LORA | {"use_dora": True}, dora((1, 4)), r"the magnitude has shape \[1, 4\]"),
    "bias of B": (
        LORA | {"lora_bias": True},
        lora() | {f"{AT}{Q}.lora_B.bias": numbers(8)},
        r"lora B bias has shape \[8\], the base needs \[4\]",
    ),
    "bias": (LORA, lora() | {f"{AT}{Q}.base_layer.bias": numbers(5)}, r"bias has shape \[5\], the base needs \[4\]"),
    "no bias there": (LORA, lora() | {f"{AT}model.norm.bias": numbers(8)}, r"tensor model\.norm\.bias is not in"),
    "shrunk": (SAVED, lora() | {f"{HEAD}.weight": numbers(11, 8)}, r"weight has shape \[11, 8\]"),
    "wider": (SAVED, lora() | {f"{HEAD}.weight": numbers(12, 9)}, r"weight has shape \[12, 9\]"),
    "grown norm": (
        LORA | {"modules_to_save": ["norm"]},
        lora() | {f"{AT}model.norm.weight": numbers(9)},
        r"weight has shape \[9\], the base needs \[8\]",
    ),
    "grown linear": (
        LORA | {"modules_to_save": ["k_proj"]},
        lora() | {f"{AT}model.layers.0.self_attn.k_proj.weight": numbers(5, 8)},
        r"weight has shape \[5, 8\]",
    ),
    "blocks": (config("BOFT", boft_block_size=3), boft(block=3), "4 blocks of 3 are not its 8 columns"),
    "other columns": (BOFT, boft(blocks=3), "3 blocks of 2 are not its 8 columns"),
    "s": (BOFT, boft(outputs=8), r"boft_s has shape \[8, 1\], the base needs \[4, 1\]"),
    "entries": (SHIRA, shira(13), r"shape \[13\], the base and r 1 of the config need \[12\]"),
    "indices": (SHIRA, shira(12, np.zeros((12, 2), np.int32)), r"shira_indices has shape \[12, 2\]"),
    "too many": (config("SHIRA", r=3), shira(36, np.zeros((2, 36), np.int32)), "36 entries, but the weight has 32"),
    "token": (TOKENS | {"trainable_token_indices": [1, 12]}, lora() | rows(), "token 12 is beyond the 12 rows"),
}
AT_ODDS: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "block": (
        BOFT,
        boft(block=4, blocks=2),
        "boft_R has blocks of 4 columns, by the config blocks of 2 columns; save it again",
    ),
    "factors": (BOFT | {"boft_n_butterfly_factor": 3}, boft(2), "boft_R has 2 factors, by the config 3 factors"),
    "flat": (
        BOFT,
        boft() | {f"{AT}{Q}.boft_R": numbers(16)},
        r"boft_R has shape \[16\], not factors of so many square blocks",
    ),
    "rows": (
        TOKENS,
        lora() | rows(3),
        r"trainable_tokens_delta has shape \[3, 8\], by the config 2 rows; save it again",
    ),
    "rank": (LORA | {"r": 3}, lora(), "q_proj: A and B are of rank 2, by the config it is 3"),
    "rank of one": (LORA | {"rank_pattern": {"q_proj": 3}}, lora(), "are of rank 2, by the config it is 3"),
    "rank of an embedding": (LORA | {"r": 3, "target_modules": ["embed_tokens"]}, embedded(12), "are of rank 2"),
    "A alone": (LORA, {f"{AT}{Q}.lora_A.weight": numbers(2, 8)}, "has A only; A and B belong together"),
    "B alone": (LORA, {f"{AT}{Q}.lora_B.weight": numbers(4, 2)}, "has B only"),
    "mixed": (LORA, lora() | {f"{AT}{Q}.lora_embedding_A": numbers(2, 8)}, "A and B belong together"),
    "R alone": (BOFT, {f"{AT}{Q}.boft_R": numbers(1, 4, 2, 2)}, "boft_R and boft_s belong together"),
    "indices alone": (SHIRA, {f"{AT}{Q}.shira_indices": np.zeros((2, 12), np.int32)}, "belong together"),
    "not asked for": (LORA | {"target_modules": ["k_proj"]}, lora(), "q_proj is not among target_modules"),
    "excluded": (LORA | {"exclude_modules": ["self_attn.q_proj"]}, lora(), "q_proj is among exclude_modules"),
    "other layer": (LORA | {"layers_to_transform": [1]}, lora(), "q_proj is left out by layers_to_transform"),
    "saved too": (LORA | {"modules_to_save": ["self_attn"]}, lora(), "q_proj is among modules_to_save, or part"),
    "left out": (
        LORA | {"target_modules": ["q_proj", "k_proj"]},
        lora(),
        "has no matrices for its target module k_proj",
    ),
    "empty": (SAVED, {f"{HEAD}.weight": numbers(12, 8)}, "holds no lora matrices"),
    "no prefix": (LORA, {f"{Q}.lora_A.weight": numbers(2, 8)}, "does not begin with base_model.model"),
    "stranger": (LORA, lora() | {f"{AT}{Q}.lora_E": numbers(2)}, "lora_E is no tensor of a lora adapter"),
    "fused": (LORA, lora() | {f"{AT}model.layers.0.mlp.experts.gate_up_proj": numbers(2, 4, 8)}, "is no tensor of"),
    "of another kind": (BOFT, boft() | lora(), "among modules_to_save|is no tensor of a boft adapter"),
    "no magnitude": (LORA | {"use_dora": True}, lora(), "has no magnitude, but use_dora is set"),
    "magnitude": (LORA, dora(), "has a magnitude, but use_dora is not set"),
    "two magnitudes": (
        LORA | {"use_dora": True},
        dora() | dora((5,), ".weight"),
        "are both the magnitude of .*, and not alike",
    ),
    "B with a bias": (LORA, lora() | {f"{AT}{Q}.lora_B.bias": numbers(4)}, "lora_B.bias, but lora_bias is not set"),
    "B without": (LORA | {"lora_bias": True}, lora(), "no lora_B.bias, but lora_bias is set"),
    "both": (LORA | {"lora_bias": True, "use_dora": True}, dora(), "which PEFT does not take together"),
    "whole": (LORA, lora() | {f"{AT}model.norm.weight": numbers(8)}, "model.norm is not among modules_to_save"),
    "whole beside": (LORA, lora() | {f"{AT}{Q}.base_layer.weight": numbers(4, 8)}, "not among modules_to_save"),
    "beside nothing": (
        LORA,
        lora() | {f"{AT}model.layers.0.self_attn.k_proj.base_layer.bias": numbers(4)},
        "is whole, but model.layers.0.self_attn.k_proj has no matrices",
    ),
    "two weights": (
        LORA | {"target_modules": ["lm_head"]},
        lora("lm_head", outputs=12) | {f"{HEAD}.{one}weight": numbers(12, 8) for one in ("", "base_layer.")},
        "are both the weight of lm_head",
    ),
    "whole and matrices": (
        LORA | {"target_modules": ["lm_head"]},
        lora("lm_head", outputs=12) | {f"{HEAD}.weight": numbers(12, 8)},
        "lm_head has matrices or rows too",
    ),
    "a copy alone": (SAVED, lora() | {f"{HEAD}.modules_to_save.weight": numbers(12, 8)}, "is a copy of a weight that"),
    "a copy of another size": (
        SAVED,
        lora() | {f"{HEAD}.weight": numbers(12, 8), f"{HEAD}.modules_to_save.weight": numbers(13, 8)},
        "is no copy of",
    ),
    "rows unasked": (LORA, lora() | rows(), "trainable_token_indices names none"),
    "rows of the other": (
        TOKENS | {"trainable_token_indices": {"lm_head": [1, 5]}},
        lora() | rows(),
        "trainable_token_indices names none",
    ),
    "no rows": (TOKENS, lora(), "names the embedding, of which 0 are in the file"),
    "rows of an untied head": (
        TOKENS,
        lora() | rows() | {f"{HEAD}.token_adapter.trainable_tokens_delta": numbers(2, 8)},
        "names none, or several, for lm_head",
    ),
    "rows and matrices": (
        TOKENS | {"target_modules": ["embed_tokens"]},
        embedded() | rows(),
        "has rows of single tokens and matrices",
    ),
    "bytes": (
        LORA,
        lora() | {f"{AT}{Q}.lora_A.weight": np.zeros((2, 8), np.int8)},
        "lora A has dtype I8; read",
    ),
    "indices of bytes": (SHIRA, shira(12, np.zeros((2, 12), np.uint8)), "shira_indices has dtype U8"),
    "shira transposed": (SHIRA | {"fan_in_fan_out": True}, shira(), "SHiRA is for nn.Linear only"),
    "bias of an embedding": (
        LORA | {"target_modules": ["embed_tokens"], "lora_bias": True},
        embedded() | {f"{TABLE}.lora_B.bias": numbers(8)},
        "A and B belong together",
    ),
    "fan_in_fan_out": (
        LORA | {"fan_in_fan_out": True},
        lora(),
        r"q_proj: what is there fits a weight \[out, in\]; make fan_in_fan_out of the config false",
    ),
    "no block": (
        config("BOFT", boft_block_size=0),
        boft(),
        "boft_block_size is 0 and boft_block_num 0, of which PEFT takes one",
    ),
    "number of blocks": (
        config("BOFT", boft_block_size=0, boft_block_num=3),
        boft(),
        "boft_R has 4 blocks, by the config 3 blocks",
    ),
    "blocks of both": (
        BOFT | {"boft_block_num": 2},
        boft(),
        "boft_block_size is 2 and boft_block_num 2, of which PEFT",
    ),
    "blocks of others": (
        config("BOFT", boft_block_size=3),
        boft(),
        "boft_R has blocks of 2 columns, by the config blocks of 3 columns",
    ),
    "odd blocks": (
        config("BOFT", boft_block_size=1, boft_n_butterfly_factor=2),
        boft(2, 8, 1),
        "8 blocks of 1 columns cannot be halved 1 times",
    ),
    "few blocks": (
        BOFT | {"boft_n_butterfly_factor": 4},
        boft(4),
        "4 blocks of 2 columns cannot be halved 3 times, as 4 butterfly factors need",
    ),
    "a name": (LORA | {"target_modules": "q_proj"}, lora(), "q_proj is not among target_modules"),
    "saved nothing": (LORA | {"modules_to_save": ["norm"]}, lora(), "has nothing of norm, which modules_to_save names"),
    "shira of rank 0": (SHIRA | {"r": 0}, shira(), "r must be at least 1"),
}


def test_what_no_file_has_is_not_lacking(tmp_path: Path) -> None:
    """Matrices of experts are one parameter; what sees has names that its model has not, and parts beside its text."""
    experts = {f"model.layers.0.mlp.experts.{k}.q_proj.weight": (4, 8) for k in range(3)}
    assert opened(tmp_path / "experts", LORA, lora(), BASE | experts).lacking == ()
    text = "model.language_model.layers.{}.self_attn.q_proj"
    sees = {
        "language_model.model.embed_tokens.weight": (12, 8),
        "language_model.model.layers.0.self_attn.q_proj.weight": (4, 8),
        "vision_tower.layers.0.self_attn.q_proj.weight": (4, 8),
    }
    assert opened(tmp_path / "sees", LORA, lora(text.format(0)), sees).lacking == ()
    more = sees | {"language_model.model.layers.1.self_attn.q_proj.weight": (4, 8)}
    (told,) = opened(tmp_path / "half", LORA, lora(text.format(0)), more).lacking
    assert "nothing for 1 of 2 modules" in told
    assert "layers.1.self_attn.q_proj first" in told


def test_half_a_file_is_told(tmp_path: Path) -> None:
    """Two layers have q; nothing is told of targets by expression, nor of what the config leaves out."""
    second = "model.layers.1.self_attn.q_proj"
    base = BASE | {f"{second}.weight": (4, 8), f"{second}.bias": (4,), "model.norm.bias": (8,)}

    def note(name: str, settings: dict[str, Any], tensors: Tensors) -> str | None:
        found = opened(tmp_path / name, settings, tensors, base)
        told = half_note(found.changes, found.settings, *modules_of(found.changes, base))
        assert found.lacking == (() if told is None else (told,))
        return told

    told = f"nothing for 1 of 2 modules that its config names ({second} first): they are served as they are without it"
    assert (note("half", LORA, lora()) or "").endswith(told)
    assert note("whole", LORA, lora() | lora(second)) is None
    both = note("bias", LORA | {"bias": "all"}, lora() | {f"{AT}{second}.bias": numbers(4)}) or ""
    assert f"{told}; its file has no bias for 2 of 3 modules" in both
    unless = ", unless the expression of exclude_modules leaves them out"
    assert (note("expression", LORA | {"exclude_modules": ".*layers.1.*"}, lora()) or "").endswith(told + unless)
    fields: list[dict[str, Any]] = [
        {"target_modules": ".*q_proj"},
        {"layers_to_transform": [0]},
        {"exclude_modules": [second]},
    ]
    for k, one in enumerate(fields):
        assert note(str(k), LORA | one, lora()) is None
    empty = {"peft_type": "ROSA", "rank_pattern": {second: 0}, "density_pattern": {second: 0}}
    assert (
        half_note(
            {Q: opened(tmp_path / "e", LORA, lora()).changes[Q]}, parse_settings(LORA | empty, "c"), [Q, second], []
        )
        is None
    )

    def biases(*of: str) -> Tensors:
        each = (f"{AT}{one}.base_layer.bias" if one in (Q, second) else f"{AT}{one}.bias" for one in of)
        return lora() | lora(second) | {name: numbers(8 if "norm" in name else 4) for name in each}

    told = "its file has no bias for {} of {} modules whose biases were trained ({} first): "
    told += "they keep those that they have without it"
    cases: list[tuple[str, str, list[str], str | None]] = [
        ("all", "q_proj", [Q, second, "model.norm"], None),
        ("all", "q_proj", [Q, second], told.format(1, 3, "model.norm")),
        ("all", ".*q_proj", [Q], told.format(2, 3, second)),
        ("lora_only", "q_proj", [Q, second], None),
        ("lora_only", "q_proj", [], told.format(2, 2, Q)),
        ("none", "q_proj", [], None),
    ]
    for k, (bias, targets, there, wanted) in enumerate(cases):
        fields = {"bias": bias, "target_modules": targets if "*" in targets else [targets]}
        assert note(f"bias{k}", LORA | fields, biases(*there)) == wanted
    saved = LORA | {"bias": "all", "modules_to_save": ["norm"]}
    whole = biases(Q, second) | {f"{AT}model.norm.weight": numbers(8)}  # without its bias
    assert note("saved", saved, whole) == told.format(1, 3, "model.norm")
    assert note("targets", LORA | {"bias": "lora_only", "target_modules": ".*q_proj"}, biases()) is None
    assert parse_settings(LORA | {"peft_type": "ROSA", "bias": "rosa_only"}, "c").biases == "none"


@pytest.mark.parametrize(
    "left_out",
    [
        {"exclude_modules": ["embed_tokens"]},
        {"exclude_modules": ".*tokens"},
        {"layers_to_transform": [0]},
        {"modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_target_that_is_left_out_everywhere(tmp_path: Path, left_out: dict[str, Any]) -> None:
    """As PEFT does with `all-linear`, whose names it lists before it leaves any out."""
    both = LORA | {"target_modules": ["q_proj", "embed_tokens"]}
    whole = {f"{AT}model.embed_tokens.weight": numbers(12, 8)} if "modules_to_save" in left_out else {}
    found = opened(tmp_path / "a", both | left_out, lora() | whole).changes
    assert [name for name, one in found.items() if one.low_rank] == [Q]
    with pytest.raises(CheckpointError, match="has no matrices for its target module embed_tokens"):
        opened(tmp_path / "b", both, lora())
    nowhere = (
        "has no matrices for its target module nothing, and the base no such module.*; take it out of target_modules"
    )
    with pytest.raises(CheckpointError, match=nowhere):
        opened(tmp_path / "c", both | left_out | {"target_modules": ["q_proj", "nothing"]}, lora())


@pytest.mark.parametrize("called", [None, "embed_out.weight"])
def test_a_head_that_is_left_out_by_the_name_that_the_model_has_for_it(tmp_path: Path, called: str | None) -> None:
    """called: in the checkpoint; None: tied."""
    base = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}
    base |= {} if called is None else {called: BASE["lm_head.weight"]}
    both = LORA | {"target_modules": ["q_proj", "lm_head"]}
    for k, left_out in enumerate(({"exclude_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]})):
        whole = {f"{HEAD}.weight": numbers(12, 8)} if "modules_to_save" in left_out else {}
        found = opened(tmp_path / str(k), both | left_out, lora() | whole, base).changes
        assert [name for name, one in found.items() if one.low_rank] == [Q]
    has_none = (
        nullcontext() if called == "embed_out.weight" else pytest.raises(CheckpointError, match="nothing of lm_head")
    )
    with has_none:
        opened(tmp_path / "b", both | {"modules_to_save": ["lm_head"]}, lora(), base)
    with pytest.raises(CheckpointError, match="has no matrices for its target module lm_head"):
        opened(tmp_path / "c", both, lora(), base)


def test_a_head_by_the_name_that_the_checkpoint_has_for_it(tmp_path: Path) -> None:
    """PEFT saves nothing for it where the model calls it otherwise, however often; models of before did not."""
    base = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"} | {"embed_out.weight": (12, 8)}
    both = LORA | {"target_modules": ["q_proj", "embed_out"]}
    with pytest.raises(CheckpointError, match=r"no matrices for its target module embed_out.*; take it out of"):
        opened(tmp_path / "a", both, lora(), base)
    assert list(opened(tmp_path / "b", LORA | {"modules_to_save": ["embed_out"]}, lora(), base).changes) == [Q]
    of_model: dict[str, tuple[dict[str, Any], Tensors]] = {
        "matrices": ({}, lora("embed_out", outputs=12)),
        "saved": ({"modules_to_save": ["embed_out"]}, {f"{AT}embed_out.weight": numbers(12, 8)}),
        "left out": ({"exclude_modules": ["embed_out"]}, {}),
    }
    for name, (fields, brought) in of_model.items():
        found = opened(tmp_path / name, both | fields, lora() | brought, base).changes
        assert {*found} == ({Q, "embed_out"} if brought else {Q})


def test_what_is_left_out_of_a_base_without_prefixes(tmp_path: Path) -> None:
    """Names of the config, and numbers of layers, are those of the model."""
    base = {name.removeprefix("model."): shape for name, shape in BASE.items()}
    base |= {f"layers.{k}.self_attn.v_proj.weight": (4, 8) for k in (0, 1)}
    both = LORA | {"target_modules": ["q_proj", "v_proj"]}
    every = [f"model.layers.{k}.self_attn.v_proj" for k in (0, 1)]
    assert opened(tmp_path / "a", both | {"exclude_modules": every}, lora(), base).changes.keys() == {Q}
    for k, some in enumerate(({"exclude_modules": every[:1]}, {"layers_to_transform": [0]})):
        with pytest.raises(CheckpointError, match="has no matrices for its target module v_proj"):
            opened(tmp_path / f"b{k}", both | some, lora(), base)


def test_a_target_of_rosa_that_is_empty(tmp_path: Path) -> None:
    empty = {"rank_pattern": {"lm_head": 0}, "density_pattern": {"lm_head": 0}}
    both = ROSA | {"target_modules": ["q_proj", "lm_head"]}
    file = rosa([(k % 4, k) for k in range(8)])
    assert opened(tmp_path / "a", both | empty, file).changes.keys() == {Q}
    with pytest.raises(CheckpointError, match="has no matrices for its target module lm_head"):
        opened(tmp_path / "b", both, file)


def test_copies_of_what_the_base_does_not_have(tmp_path: Path) -> None:
    odd = {f"{AT}model.other.original_module.part.weight": numbers(3, 3)}
    with pytest.raises(BaseMismatchError, match=r"module model\.other\.part is not in the base"):
        opened(tmp_path, LORA, lora() | odd)


def test_a_bias_beside_rows_of_tokens(tmp_path: Path) -> None:
    """PEFT's name for it, where all biases were trained."""
    at = f"{HEAD}.token_adapter"
    file = lora() | {f"{at}.trainable_tokens_delta": numbers(1, 8), f"{at}.base_layer.bias": numbers(12)}
    settings = LORA | {"bias": "all", "trainable_token_indices": {"lm_head": [3]}}
    change = opened(tmp_path, settings, file, BASE | {"lm_head.bias": (12,)}).changes["lm_head"]
    assert (change.whole, change.rows) == (
        Whole(bias=f"{at}.base_layer.bias"),
        TokenRows((3,), f"{at}.trainable_tokens_delta"),
    )


def test_tokens_of_a_tied_head_are_those_of_the_embedding(tmp_path: Path) -> None:
    tied = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}
    neox = tied | {"embed_out.weight": BASE["lm_head.weight"]}
    cases = [(tied, [1, 5], True), (tied, [1, 6], False), (BASE, [1, 5], False), (neox, [1, 5], False)]
    for k, (base, of_head, fits) in enumerate(cases):
        both = LORA | {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": of_head}}
        with nullcontext() if fits else pytest.raises(CheckpointError, match="names lm_head, of which 0 are in the"):
            opened(tmp_path / str(k), both, lora() | rows(), base)


def test_a_table_beside_rows_of_another(tmp_path: Path) -> None:
    """PEFT writes it where a tied head is saved whole beside tokens of the embedding, and cannot read it."""
    settings = LORA | {"trainable_token_indices": {"embed_tokens": [1, 5]}, "modules_to_save": ["lm_head"]}
    file = lora() | rows() | {f"{HEAD}.token_adapter.base_layer.weight": numbers(12, 8)}
    with pytest.raises(CheckpointError, match="is whole, but lm_head has no matrices"):
        opened(tmp_path, settings, file)


def test_what_fits_and_is_not_read(tmp_path: Path) -> None:
    up = "model.layers.0.mlp.experts.0.up_proj"
    told = "is an expert's, whose matrices are one parameter in the model; merge it"
    with pytest.raises(CheckpointError, match=told):
        opened(tmp_path / "a", LORA | {"target_modules": ["up_proj"]}, lora(up), BASE | {f"{up}.weight": (4, 8)})
    dense = {name: shape for name, shape in BASE.items() if "experts" not in name}
    with pytest.raises(BaseMismatchError, match="is not in the base"):
        opened(tmp_path / "dense", LORA | {"target_modules": ["up_proj"]}, lora(up), dense)
    base = BASE | {"lm_head.bias": (12,)}
    grown = lora() | {f"{HEAD}.weight": numbers(15, 8), f"{HEAD}.bias": numbers(15)}
    for k, rows in enumerate((15, 12)):
        with pytest.raises(
            CheckpointError, match="module lm_head: a bias beside rows that the vocabulary has grown by"
        ):
            opened(tmp_path / f"b{k}", SAVED, grown | {f"{HEAD}.bias": numbers(rows)}, base)
    with pytest.raises(BaseMismatchError, match=r"bias has shape \[15\], the base needs \[12\]"):
        opened(tmp_path / "c", SAVED, grown | {f"{HEAD}.weight": numbers(12, 8)}, base)
    with pytest.raises(BaseMismatchError, match=r"tensor lm_head\.bias is not in the base"):
        opened(tmp_path / "d", SAVED, grown)


def test_copies_in_what_is_saved_whole(tmp_path: Path) -> None:
    """A container's parts, each under the name of the adapter; only the bias of a part that has one."""
    at = f"{AT}model.layers.0.self_attn"
    own, copy, of_base = (f"{at}.{one}q_proj.bias" for one in ("", "modules_to_save.mine.", "original_module."))
    weight = {f"{AT}{Q}.weight": numbers(4, 8)}
    settings = LORA | {"target_modules": ["lm_head"], "modules_to_save": ["self_attn"], "bias": "all"}
    file = lora("lm_head", outputs=12) | weight | dict.fromkeys((own, copy, of_base), numbers(4))
    found = opened(tmp_path / "a", settings, file)
    assert found.changes[Q].whole == Whole(f"{AT}{Q}.weight", own)
    check_values(found)
    differs = opened(tmp_path / "b", settings, file | {copy: numbers(4) + 1})
    with pytest.raises(CheckpointError, match="differ, so which one is meant is not told"):
        check_values(differs)
    for k, odd in enumerate(("modules_to_save.mine.q_proj.lora_A.weight", "original_module.q_proj.lora_A.weight")):
        with pytest.raises(CheckpointError, match="is no tensor of a lora adapter"):
            opened(tmp_path / f"odd{k}", settings, file | {f"{at}.{odd}": numbers(2, 8)})


def test_what_was_saved_whole_is_there(tmp_path: Path) -> None:
    """Of modules that the model has: PEFT saves nothing for other names."""
    file = lora() | {f"{HEAD}.weight": numbers(12, 8), f"{AT}model.norm.weight": numbers(8)}
    found = opened(tmp_path / "a", NORM, file)
    there = [f"{Q}.weight", f"{Q}.bias", "lm_head.weight", "model.norm.weight"]
    check_saved(found.changes, found.settings, there)
    opened(tmp_path / "b", NORM | {"modules_to_save": ["lm_head", "norm", "score"]}, file)  # the base has no score
    without = {name: one for name, one in found.changes.items() if name != "model.norm"}
    with pytest.raises(ValueError, match=r"has nothing of model\.norm, which modules_to_save names"):
        check_saved(without, found.settings, there)
    with pytest.raises(ValueError, match="has no bias of lm_head, which modules_to_save names"):
        check_saved(found.changes, found.settings, [*there, "lm_head.bias"])


def test_a_target_that_is_saved_whole_has_no_matrices(tmp_path: Path) -> None:
    """So PEFT writes a module that both lists name."""
    both = LORA | {"target_modules": ["q_proj", "lm_head"]}
    file = lora() | {f"{HEAD}.weight": numbers(12, 8)}
    found = opened(tmp_path / "a", both | {"modules_to_save": ["lm_head"]}, file)
    assert found.lacking == ()
    second = "model.layers.1.self_attn.q_proj"
    with pytest.raises(CheckpointError, match="has no matrices for its target module lm_head"):
        opened(tmp_path / "b", both, file)
    one = {"target_modules": ["q_proj", "lm_head"], "modules_to_save": [Q]}
    rest = {f"{AT}{Q}.weight": numbers(4, 8)} | lora("lm_head", outputs=12)
    opened(tmp_path / "c", LORA | one, rest)
    with pytest.raises(CheckpointError, match="has no matrices for its target module q_proj"):  # of the second layer
        opened(tmp_path / "d", LORA | one, rest, BASE | {f"{second}.weight": (4, 8)})


@pytest.mark.parametrize("case", NOT_THE_BASES)
def test_what_does_not_fit_the_base(tmp_path: Path, case: str) -> None:
    settings, tensors, told = NOT_THE_BASES[case]
    with pytest.raises(BaseMismatchError, match=told) as error:
        opened(tmp_path, settings, tensors)
    assert str(error.value).startswith(str(tmp_path / "adapter_model.safetensors"))


@pytest.mark.parametrize("case", AT_ODDS)
def test_what_is_at_odds_with_itself(tmp_path: Path, case: str) -> None:
    settings, tensors, told = AT_ODDS[case]
    with pytest.raises(CheckpointError, match=told) as error:
        opened(tmp_path, settings, tensors)
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["adapter_config.json"], True),
        (["adapter_model.safetensors"], True),
        (["config.json", "model.safetensors", "adapter_model.safetensors"], False),
        (["config.json", "adapter_config.json", "adapter_model.safetensors"], True),
        (["manifest.json", "adapter_config.json"], False),
        ([], False),
    ],
)
def test_what_looks_like_an_adapter(tmp_path: Path, files: list[str], wanted: bool) -> None:
    """Half of one does; a model with stray matrices beside it, or an artifact, does not."""
    for name in files:
        (tmp_path / name).write_text("{}")
    assert is_adapter(tmp_path) == wanted


@pytest.mark.parametrize("there", ["link", "directory"])
def test_weights_that_are_no_file(tmp_path: Path, there: str) -> None:
    weights = write(tmp_path / "a", LORA, lora()) / "adapter_model.safetensors"
    weights.unlink()
    if there == "link":
        weights.symlink_to(tmp_path / "nowhere")
    else:
        weights.mkdir()
    told = r"adapter_model\.safetensors: no regular file, or a link that leads nowhere; get the adapter again"
    with pytest.raises(CheckpointError, match=told):
        open_adapter(tmp_path / "a", BASE)


def test_an_expression_is_told(tmp_path: Path) -> None:
    """Which modules it means is not known; a name means one module, and is no expression."""
    told = "target_modules is an expression, which is not run: all 1 modules of its file are served"
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"target_modules": ".*q_proj"}, told),
        ({"exclude_modules": ".*k_proj"}, told.replace("target", "exclude")),
        ({"target_modules": Q}, None),
        ({"target_modules": Q.replace("0", ".")}, None),  # any sign, as in an expression
        ({"exclude_modules": K}, None),
        ({"exclude_modules": "q_proj"}, None),  # not all of a name, so it means no module
        ({}, None),
    ]
    for k, (fields, wanted) in enumerate(cases):
        found = opened(tmp_path / str(k), LORA | fields, lora())
        assert (found.unread_note, found.notes) == (wanted, [] if wanted is None else [wanted])


@pytest.mark.parametrize("word", ["all-linear", "All-Linear"])
def test_all_linears_but_the_head(tmp_path: Path, word: str) -> None:
    """A table is not among them. PEFT saves the names that it stands for; which those are a checkpoint does not say."""
    settings = LORA | {"target_modules": word}
    half = opened(tmp_path / "half", settings, lora())
    assert (half.unread_note, half.notes) == (None, [])
    for k, table in enumerate((lora("lm_head", outputs=12), embedded())):
        with pytest.raises(CheckpointError, match="is not among target_modules, which are all linears but the head"):
            opened(tmp_path / str(k), settings, lora() | table)


def test_exclude_modules_as_text_is_one_module(tmp_path: Path) -> None:
    both = LORA | {"target_modules": ["q_proj", "k_proj"], "exclude_modules": Q}
    found = opened(tmp_path / "a", both, lora(K))
    assert (list(found.changes), found.notes) == ([K], [])
    with pytest.raises(CheckpointError, match=f"module {Q} is the one that exclude_modules names"):
        opened(tmp_path / "b", both, lora() | lora(K))


def test_all_rotations_have_as_many_factors(tmp_path: Path) -> None:
    """One, where PEFT's extension was missing, has the whole file."""
    settings = BOFT | {"boft_n_butterfly_factor": 2, "target_modules": ["q_proj", "k_proj"]}
    of_k = {name.replace(Q, K): one for name, one in boft().items()}
    assert len(opened(tmp_path / "a", settings, boft() | of_k).changes) == 2
    with pytest.raises(CheckpointError, match=f"module {Q}: boft_R has 2 factors, that of {K} 1"):
        opened(tmp_path / "b", settings, boft(2) | of_k)
    with pytest.raises(CheckpointError, match=f"module {Q}: boft_R has 2 factors, that of {K} 1"):
        check_alone(read_adapter(tmp_path / "b"))


def without(tensors: Tensors, end: str) -> Tensors:
    return {name: one for name, one in tensors.items() if not name.endswith(end)}


@pytest.mark.parametrize(
    ("settings", "tensors", "told"),
    [
        (LORA, {}, "holds no lora matrices"),
        (LORA, {f"{AT}{Q}.lora_A.weight": numbers(2, 8)}, "has A only; A and B belong together"),
        (
            LORA | {"target_modules": ["embed_tokens"]},
            {f"{TABLE}.lora_embedding_A": numbers(2, 12)},
            "has embedding A only",
        ),
        (config("BOFT"), {f"{AT}{Q}.boft_s": numbers(4, 1)}, "boft_R and boft_s belong together"),
        (SHIRA, {f"{AT}{Q}.shira_weight": numbers(12)}, "shira_weight and shira_indices belong together"),
        (LORA | {"r": 3}, lora(), "A and B are of rank 2, by the config it is 3; save it again"),
        (LORA | {"r": 3, "target_modules": ["embed_tokens"]}, embedded(12), "are of rank 2, by the config it is 3"),
        (LORA, lora() | {f"{AT}{Q}.lora_B.weight": numbers(4, 3)}, "A is of rank 2, B of 3, by the config it is 2"),
        (LORA | {"lora_bias": True}, lora(), "q_proj has no lora_B.bias, but lora_bias is set"),
        (LORA | {"target_modules": ["k_proj"]}, lora(), "q_proj is not among target_modules"),
        (
            LORA | {"target_modules": ["q_proj", "k_proj"]},
            lora(),
            "no matrices for its target module k_proj; take it out of target_modules .*, or save it again",
        ),
        (config("BOFT", boft_block_size=0, boft_block_num=2), boft(), "boft_R has 4 blocks, by the config 2 blocks"),
        (BOFT | {"boft_block_size": 4}, boft(), "boft_R has blocks of 2 columns, by the config blocks of 4"),
        (ROSA, without(rosa([(0, 1)]), "B.weight"), "without A, B"),
        (ROSA, without(rosa([(0, 1)]), "row_offs"), "values, row_offs and col_idx belong together"),
        (ROSA, rosa([(0, 1)], rank=3), "A and B are of rank 3, by the config it is 2"),
        (BOFT | {"boft_n_butterfly_factor": 2}, boft(2, 3), "3 blocks of 2 columns cannot be halved 1 times"),
    ],
)
def test_what_belongs_together_is_known_without_a_base(
    tmp_path: Path, settings: dict[str, Any], tensors: Tensors, told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        check_alone(read_adapter(write(tmp_path, settings, tensors)))
    check_alone(read_adapter(write(tmp_path / "whole", LORA, lora())))


@pytest.mark.parametrize(
    "fields",
    [
        {"exclude_modules": ["k_proj"]},
        {"exclude_modules": ".*k_proj"},
        {"layers_to_transform": [0]},
        {"modules_to_save": ["k_proj"]},
    ],
)
def test_what_a_base_has_to_say_is_not_asked_without(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Nothing is known of where k is: all that it means may be left out."""
    check_alone(read_adapter(write(tmp_path, LORA | {"target_modules": ["q_proj", "k_proj"]} | fields, lora())))
