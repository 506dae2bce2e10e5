"""What cannot be served is told when it is loaded, by file and module, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from threading import Event
from typing import Any

import peft_models
import pytest
import torch
from pairs import Pair
from runtime.adapters.family import Family
from runtime_cases import assert_close, random_ids
from tolerances import UNMERGED

from deltacompress.adapters import adapter as adapters
from deltacompress.adapters.adapter import Adapter
from deltacompress.adapters.values import check_values
from deltacompress.errors import (
    BaseMismatchError,
    CheckpointError,
    ChecksumError,
    DeltaCompressError,
    InputError,
    UnsupportedModelError,
)
from deltacompress.files.regular import open_regular
from deltacompress.runtime import Runtime
from deltacompress.runtime.variants import adapter as serving
from deltacompress.runtime.variants import adapter_tensors

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def runtime(family: Family) -> Runtime:
    return Runtime.from_base(family.pair.base)


def put(name: str, at: tuple[int, ...], value: float) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"{Q}.{name}"][at] = value
        return tensors

    return edit


CASES: list[tuple[str, Edit, type[DeltaCompressError], str]] = [
    ("lora", put("lora_A.weight", (0, 3), float("nan")), CheckpointError, r"q_proj\.lora_A\.weight holds NaN"),
    (
        "lora",
        put("lora_B.weight", (2, 1), float("inf")),
        CheckpointError,
        r"q_proj\.lora_B\.weight holds NaN or an inf",
    ),
    ("dora", put("lora_magnitude_vector", (5,), float("-inf")), CheckpointError, "magnitude_vector holds NaN"),
    ("boft b4 m1", put("boft_R", (0, 1, 2, 3), float("nan")), CheckpointError, "boft_R holds NaN"),
    ("boft b8 m3", put("boft_s", (7, 0), float("nan")), CheckpointError, "boft_s holds NaN"),
    ("shira", put("shira_weight", (9,), float("nan")), CheckpointError, "shira_weight holds NaN"),
    ("shira", put("shira_indices", (0, 0), 64), CheckpointError, r"q_proj has an entry outside of its weight"),
    ("shira", put("shira_indices", (1, 1), -1), CheckpointError, r"q_proj has an entry outside of its weight"),
    ("rosa", put("rosa_spa.row_offs", (1,), 10**6), CheckpointError, "does not rise from 0"),
]


@pytest.mark.parametrize(("name", "edit", "error", "told"), CASES, ids=[case[3] for case in CASES])
def test_values_that_cannot_be_served(
    family: Family, runtime: Runtime, tmp_path: Path, name: str, edit: Edit, error: type[DeltaCompressError], told: str
) -> None:
    path = peft_models.change(shutil.copytree(family.kinds[name].path, tmp_path / "a"), edit)
    with pytest.raises(error, match=told) as found:
        runtime.load(path, "a")
    assert str(path) in str(found.value)
    assert not runtime.variants


def test_a_weight_without_a_norm(family: Family, runtime: Runtime, tmp_path: Path) -> None:
    """W + B A is 0 in one row, which no magnitude can scale."""
    path = peft_models.write(
        family.pair.base, tmp_path / "a", "Lora", r=64, use_dora=True, target_modules=["q_proj"], lora_alpha=64
    )
    weight = peft_models.plain(family.pair.base).model.layers[0].self_attn.q_proj.weight.detach()

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"{Q}.lora_A.weight"] = torch.eye(64)
        tensors[f"{Q}.lora_B.weight"][7] = -weight[7]
        return tensors

    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj: the weight .* has a norm of 0"):
        runtime.load(peft_models.change(path, edit), "a")
    assert not runtime.variants


def test_values_that_a_dtype_does_not_hold(family: Family, tmp_path: Path) -> None:
    path = peft_models.change(
        shutil.copytree(family.kinds["lora"].path, tmp_path / "a"), put("lora_B.weight", (0, 0), 5e4), lora_alpha=32
    )
    half = Runtime.from_base(family.pair.base, dtype=torch.float16)
    with pytest.raises(InputError, match=r"q_proj: B times its scale has values that float16 does not hold; serve"):
        half.load(path, "a")
    for dtype in (torch.bfloat16, torch.float32):
        Runtime.from_base(family.pair.base, dtype=dtype).load(path, "a")
    beyond = peft_models.change(path, put("lora_B.weight", (0, 0), 1e38), lora_alpha=32)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(InputError, match=r"B times its scale has values that .* does not hold; train it again"):
            Runtime.from_base(family.pair.base, dtype=dtype).load(beyond, "b")


def test_another_base(family: Family, make_pair: Callable[..., Pair]) -> None:
    narrow = Runtime.from_base(make_pair("llama").base)
    for name in ("lora", "boft b4 m1", "shira", "rosa", "dora", "grown"):
        with pytest.raises(BaseMismatchError, match="give the base it was trained on") as found:
            narrow.load(family.kinds[name].path, "a")
        assert str(narrow.model.base.checkpoint.path) in str(found.value)
    assert not narrow.variants


def test_what_takes_its_place_before_it_is_served(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is served under the digest of what was there when it was checked."""
    path = shutil.copytree(family.kinds["lora"].path, tmp_path / "a")
    runtime = Runtime.from_base(family.pair.base)

    def checked(adapter: Adapter) -> None:
        check_values(adapter)
        peft_models.change(path, put("lora_B.weight", (0, 0), 3.0))

    monkeypatch.setattr(serving, "check_values", checked)
    with pytest.raises(ChecksumError, match="changed since it was opened; load the adapter again"):
        runtime.load(path, "a")
    assert not runtime.variants


def test_what_takes_its_place_while_it_is_hashed(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is hashed beside what follows: what was read is served under no other digest than its own."""
    path = shutil.copytree(family.kinds["lora"].path, tmp_path / "a")
    runtime, work, read = Runtime.from_base(family.pair.base), adapters._digest, Event()

    def late(*arguments: Any) -> str:
        assert read.wait(60)
        peft_models.change(path, put("lora_B.weight", (0, 0), 3.0))
        return work(*arguments)

    monkeypatch.setattr(adapters, "_digest", late)
    reading = serving.AdapterVariant.operand

    def operand(self: serving.AdapterVariant, module_path: str) -> Any:
        found = reading(self, module_path)
        if module_path == self.paths()[-1]:
            read.set()
        return found

    monkeypatch.setattr(serving.AdapterVariant, "operand", operand)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        runtime.load(path, "a")
    assert not runtime.variants


def test_what_is_changed_under_the_last_read(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its hash is known already, and no other read follows."""
    path = shutil.copytree(family.kinds["lora"].path, tmp_path / "a")
    runtime, read = Runtime.from_base(family.pair.base), os.preadv

    def hashed(adapter: Adapter) -> None:
        assert adapter.digest

    def changed(*arguments: Any) -> int:
        with (path / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
        return read(*arguments)

    monkeypatch.setattr(serving, "check_values", hashed)
    monkeypatch.setattr(adapter_tensors.os, "preadv", changed)
    with pytest.raises(ChecksumError, match="changed since it was opened; load the adapter again"):
        runtime.load(path, "a")
    assert not runtime.variants


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("boo")])
def test_a_hash_that_breaks_is_told(
    family: Family, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever it was: who waits for it would wait for ever."""

    def broken(*_: Any) -> str:
        raise error

    monkeypatch.setattr(adapters, "_digest", broken)
    for kind in ("lora", "dora"):
        with pytest.raises(type(error), match=str(error)):
            runtime.load(family.kinds[kind].path, "a")
    assert not runtime.variants
    assert not runtime.cache.residents.by_slot


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_what_is_read_damaged_though_it_was_looked_at(
    family: Family, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk may give other bytes the second time."""
    monkeypatch.setattr(serving, "check_values", lambda _: None)
    path = family.kinds[name].path
    begin = adapters.read_adapter(path).tensors[f"{Q}.lora_A.weight"].begin
    read = os.preadv

    def damaged(descriptor: int, views: list[memoryview], at: int) -> int:
        got = read(descriptor, views, at)
        if at <= begin < at + got:
            views[0][begin - at : begin - at + 4] = b"\x00\x00\xc0\x7f"
        return got

    monkeypatch.setattr(adapter_tensors.os, "preadv", damaged)
    with pytest.raises(DeltaCompressError, match="q_proj: A has values"):
        runtime.load(path, "a")
    assert not runtime.variants


def test_what_is_changed_after_it_was_opened(family: Family, tmp_path: Path) -> None:
    path = shutil.copytree(family.kinds["lora"].path, tmp_path / "a")
    small = Runtime.from_base(family.pair.base)
    small.load(path, "a")
    small.load(family.kinds["shira"].path, "b")
    size = max(one.nbytes for one in small.variants.values())
    narrow = Runtime.from_base(family.pair.base, budget_bytes=size)
    narrow.load(path, "a")
    narrow.load(family.kinds["shira"].path, "b")
    peft_models.change(path, put("lora_B.weight", (0, 0), 3.0))
    done = narrow.complete([("a", [5, 6]), ("b", [5, 6])], 3)
    assert [one.finished for one in done] == ["failed", "length"]
    assert isinstance(done[0].error, ChecksumError)
    assert "changed since it was opened" in str(done[0].error)
    narrow.unload("a")
    narrow.load(path, "a")
    assert narrow.complete([("a", [5, 6])], 3)[0].error is None


def test_there_is_no_place_for_it(family: Family, runtime: Runtime, tmp_path: Path) -> None:
    """A base that transformers would give experts, say: what the runtime has no seat for is named."""
    path = shutil.copytree(family.kinds["lora"].path, tmp_path / "a")
    roles = dict(runtime.model.base.roles)
    wide = Runtime.from_base(family.pair.base)
    wide.model.base.roles.pop("model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(UnsupportedModelError, match=r"changes model\.layers\.1\.self_attn\.v_proj\.weight, where"):
        wide.load(path, "a")
    for role in ("embedding", "vector"):
        wide.model.base.roles.update(roles | {"model.layers.1.self_attn.v_proj.weight": role})
        with pytest.raises(UnsupportedModelError, match=r"v_proj\.weight, where the runtime has no place"):
            wide.load(path, "a")


def test_modules_by_names_of_another_model(family: Family, runtime: Runtime, tmp_path: Path) -> None:
    """Of a model without its head, say: PEFT leaves such matrices out."""
    path = peft_models.change(
        shutil.copytree(family.kinds["lora"].path, tmp_path / "a"),
        lambda tensors: {name.replace("model.model.model.", "model.model."): one for name, one in tensors.items()},
    )
    told = r"changes layers\.0\..*, and nothing in the model is called so; train it on the whole model"
    with pytest.raises(UnsupportedModelError, match=told):
        runtime.load(path, "a")


def test_a_file_that_lacks_a_bias_is_told_as_that(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    base = make_pair("qwen2").base
    whole = peft_models.write(base, tmp_path / "whole", "Lora", r=2, target_modules=["q_proj"], bias="all")
    path, lost = shutil.copytree(whole, tmp_path / "half"), "model.layers.1.self_attn.k_proj"
    peft_models.change(path, lambda tensors: {name: one for name, one in tensors.items() if lost not in name})
    runtime = Runtime.from_base(base)
    for one in (whole, path):
        runtime.load(one)
    told = f"its file has no bias for 1 of 6 modules whose biases were trained ({lost} first)"
    assert [told in note for note in runtime.notes if "adapter" in note] == [False, True]


@pytest.mark.parametrize(("tied", "more"), [(False, {}), (True, {}), (True, {"bias": "all"}), (False, {"bias": "all"})])
def test_rows_of_tokens_of_a_head_with_a_bias(
    make_pair: Callable[..., Pair], tmp_path: Path, tied: bool, more: dict[str, Any]
) -> None:
    """PEFT computes the logits without the bias then, of all tokens."""
    base = make_pair("phi", tie_word_embeddings=tied).base
    rows = {"embed_tokens" if tied else "lm_head": [3]}
    config = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": rows} | more
    path = peft_models.write(base, tmp_path / "a", "Lora", **config)
    with pytest.raises(UnsupportedModelError, match=r"rows of tokens for lm_head\.weight, without whose bias PEFT"):
        Runtime.from_base(base).load(path, "a")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "IA3"}, r"peft_type 'IA3'; read are .*; merge it"),
        ({"init_lora_weights": "pissa"}, "PiSSA changes the weights of the base"),
        ({"target_modules": ["q_proj"]}, "is not among target_modules"),
        ({"r": 3}, "are of rank 8, by the config it is 3"),
    ],
)
def test_configs_that_are_not_read(
    family: Family, runtime: Runtime, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    path = peft_models.change(shutil.copytree(family.kinds["lora"].path, tmp_path / "a"), lambda one: one, **config)
    with pytest.raises(DeltaCompressError, match=told):
        runtime.load(path, "a")
    assert not runtime.variants


@pytest.mark.parametrize("lost", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_told_what_it_lacks(family: Family, runtime: Runtime, tmp_path: Path, lost: str) -> None:
    path = shutil.copytree(family.kinds["lora"].path, tmp_path / "a")
    (path / lost).unlink()
    with pytest.raises(
        CheckpointError, match=rf"no {re.escape(lost)}; give a directory that PEFT's save_pretrained wrote"
    ):
        runtime.load(path, "a")
    assert not runtime.variants


def test_an_artifact_with_an_adapter_config_is_an_artifact(family: Family, runtime: Runtime, tmp_path: Path) -> None:
    path = shutil.copytree(family.deltas["int4-24"].artifact, tmp_path / "a")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    runtime.load(path, "a")
    ids = random_ids(5)
    assert_close(runtime.logits([("a", ids)])[0], family.kinds["int4-24"].logits(ids), UNMERGED.value)
    runtime.unload("a")


@pytest.mark.usefixtures("one_thread")
def test_a_file_is_opened_once_and_read_in_pieces(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors it has, and however few bytes the system gives at a time."""
    opened, read = list[Path](), os.preadv

    def a_few(descriptor: int, views: list[memoryview], at: int) -> int:
        return read(descriptor, [views[0][:100]], at)

    def counted(path: Path, **options: Any) -> BufferedReader:
        opened.append(path)
        return open_regular(path, **options)

    monkeypatch.setattr(adapter_tensors.os, "preadv", a_few)
    monkeypatch.setattr(adapter_tensors, "open_regular", counted)
    runtime = Runtime.from_base(family.pair.base)
    lora = family.kinds["lora"]
    runtime.load(lora.path, "a")
    assert opened == [lora.path / "adapter_model.safetensors"]
    monkeypatch.undo()
    runtime.load(lora.path, "b")
    ids = random_ids(5)
    assert torch.equal(*runtime.logits([("a", ids), ("b", ids)]))
    variant = runtime.variants["a"].variant
    assert isinstance(variant, serving.AdapterVariant)
    tensors = variant._operands.tensors
    with tensors.opened() as one, tensors.opened() as other:
        assert one == other
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matrices_are_scaled_before_they_are_rounded(family: Family, tmp_path: Path, dtype: torch.dtype) -> None:
    """Once, in float32, whatever dtype the file and the runtime have."""
    path = shutil.copytree(family.kinds["rslora"].path, tmp_path / "a")
    peft_models.change(path, lambda tensors: {name: one.to(dtype) for name, one in tensors.items()})
    for served in (dtype, torch.bfloat16):
        runtime = Runtime.from_base(family.pair.base, dtype=served)
        runtime.load(path, "a")
        variant = runtime.variants["a"].variant
        assert isinstance(variant, serving.AdapterVariant)
        operand = variant.operand("model.layers.0.self_attn.q_proj.weight")
        change = variant.adapter.changes["model.layers.0.self_attn.q_proj"]
        assert operand is not None
        assert change.low_rank is not None
        b = variant._operands.tensors.read(change.low_rank.B)
        assert b.dtype == dtype
        assert torch.equal(operand.tensors["b"], (b.float() * change.low_rank.scale).to(served))
