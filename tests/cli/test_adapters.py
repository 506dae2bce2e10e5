"""Verbs over an adapter: what is inspected and verified, and what is refused, in one line with the right exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft_models
import pytest
import torch

from deltacompress.adapters.adapter import digest_in
from deltacompress.zoo import Zoo

if TYPE_CHECKING:
    from pairs import Pair


@pytest.fixture
def adapter(pair: Pair, tmp_path: Path) -> Path:
    """LoRA of two linears of each layer, with a norm that was trained whole."""
    options: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"]}
    return peft_models.write(pair.base, tmp_path / "bot", "Lora", **options)


def test_inspect_lists_what_changes(adapter: Path, pair: Pair, command: Callable[..., tuple[int, str, str]]) -> None:
    (adapter / "optimizer.pt").write_bytes(b"x")
    code, out, err = command("inspect", adapter, "--json")
    data = json.loads(out)
    assert (code, data["kind"], data["modules"], data["base"]) == (0, "lora", 4, str(pair.base))
    assert data["left_out"] == ["optimizer.pt"]
    assert "not the adapter's own, and passed over: optimizer.pt" in err
    own = ("adapter_config.json", "adapter_model.safetensors", "README.md")
    assert data["bytes"] == sum((adapter / name).stat().st_size for name in own)
    assert data["digest"] == digest_in(adapter)
    tensors = peft_models.load_file(adapter / "adapter_model.safetensors")
    assert data["parameters"] == sum(one.numel() for one in tensors.values())
    assert sum(row["bytes"] for row in data["changes"]) == sum(one.nbytes for one in tensors.values())
    found = {row["module"]: (row["what"], row["size"]) for row in data["changes"]}
    assert found["model.layers.1.mlp.down_proj"] == ("low rank", "rank 3")
    (hidden,) = tensors["base_model.model.model.norm.weight"].shape
    assert found["model.norm"] == ("replaces weight", str(hidden))
    code, out, _ = command("inspect", adapter)
    assert "model.norm" in out
    assert "replaces weight" in out


@pytest.mark.parametrize(
    ("kind", "config", "what", "size"),
    [
        ("BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 2}, "rotation", "2 factors of 8 blocks of 4 x 4"),
        ("Shira", {"r": 2}, "sparse", "128 entries"),
        ("Lora", {"r": 2, "use_dora": True}, "DoRA", "rank 2"),
    ],
)
def test_inspect_knows_each_kind(
    pair: Pair, tmp_path: Path, command: Callable[..., Any], kind: str, config: dict[str, Any], what: str, size: str
) -> None:
    path = peft_models.write(pair.base, tmp_path / "x", kind, target_modules=["q_proj"], **config)
    _, out, _ = command("inspect", path, "--json")
    rows = json.loads(out)["changes"]
    assert {(row["what"], row["size"]) for row in rows} == {(what, size)}
    assert len(rows) == 2


def test_inspect_notes_what_disagrees_with_its_config(
    adapter: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": config["r"] + 1}))
    code, out, err = command("inspect", adapter)
    assert (code, "low rank" in out) == (0, True)
    assert f"by the config it is {config['r'] + 1}; save it again" in err


def test_verify_says_what_it_compared(adapter: Path, pair: Pair, command: Callable[..., tuple[int, str, str]]) -> None:
    for base in ([], ["--base", pair.base]):
        code, out, err = command("verify", adapter, *base, "--json")
        assert (code, json.loads(out)["verified"], json.loads(out)["compared_with"]) == (0, True, None)
        assert ("shapes" in err) == bool(base)
        assert "directory has no recorded hashes: its config, names" in err
        assert ("checked; whether its tensors fit, --base tells" in err) == (not base)


def test_verify_holds_it_against_a_base(
    adapter: Path, make_pair: Callable[..., Pair], command: Callable[..., tuple[int, str, str]]
) -> None:
    other = make_pair("llama", hidden_size=64, intermediate_size=64)
    code, _, err = command("verify", adapter, "--base", other.base)
    assert (code, err.count("\n")) == (3, 1)
    assert f"(base {other.base}); give the base it was trained on" in err
    assert command("verify", adapter)[0] == 0  # which nobody was asked about


@pytest.mark.parametrize(
    ("claimed", "told"),
    [
        (None, "its config does not say which base it is of; its shapes fit"),
        ("acme/else", "its config calls its base 'acme/else', and this is 'base'; its shapes fit"),
        ("acme/Base", None),
    ],
)
def test_a_base_that_the_config_does_not_name_is_noted_once_a_load(
    adapter: Path, pair: Pair, command: Callable[..., tuple[int, str, str]], claimed: str | None, told: str | None
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": claimed}))
    for verb in (("verify", adapter), ("generate", adapter, "w1", "--max-new-tokens", 1)):
        code, _, err = command(*verb, "--base", pair.base)
        assert (code, err.count("its shapes fit")) == (0, 0 if told is None else 1)
        assert told is None or told in err


def test_half_a_file_is_noted(adapter: Path, pair: Pair, command: Callable[..., tuple[int, str, str]]) -> None:
    def half(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in tensors.items() if ".layers.1." not in name or "lora" not in name}

    peft_models.change(adapter, half)
    code, _, err = command("generate", adapter, "w1", "--max-new-tokens", 1, "--base", pair.base)
    assert code == 0
    assert err.count("modules that its config names (model.layers.1.") == 1


def test_what_was_to_be_saved_whole_is_missed(
    adapter: Path, pair: Pair, command: Callable[..., tuple[int, str, str]]
) -> None:
    peft_models.change(adapter, lambda tensors: {name: one for name, one in tensors.items() if ".norm." not in name})
    code, _, err = command("generate", adapter, "w1", "--max-new-tokens", 1, "--base", pair.base)
    assert (code, err.count("\n")) == (2, 1)
    assert "has nothing of model.norm, which modules_to_save names; get the whole file" in err


def test_verify_finds_what_cannot_be(adapter: Path, pair: Pair, command: Callable[..., tuple[int, str, str]]) -> None:
    def broken(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[min(tensors)].view(-1)[-1] = torch.nan
        return tensors

    peft_models.change(adapter, broken)
    for base in ([], ["--base", pair.base]):
        code, _, err = command("verify", adapter, *base)
        assert (code, err.count("\n")) == (2, 1)
        assert "holds NaN or an infinity; train it again, or get it again" in err


def test_an_entry_is_compared_with_its_digests(
    adapter: Path,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(pair.base, "team/base")
    zoo.add(adapter, "team/bot", base="team/base")
    own = ["--zoo", tmp_path / "zoo"]
    code, out, err = command("verify", "team/bot", "--base", pair.base, *own, "--json")
    assert (code, json.loads(out)["compared_with"]) == (0, "the digests of team/bot")
    assert json.loads(out)["adapter"] == "team/bot"
    assert "no recorded hashes" not in err
    shown = json.loads(command("inspect", "team/bot", *own, "--json")[1])
    assert (shown["adapter"], shown["modules"]) == ("team/bot", 4)
    more = ["w1", "--base", pair.base, "--max-new-tokens", 2, "--also", "other=team/bot", "--json"]
    answers = json.loads(command("generate", "team/bot", *own, *more)[1])["answers"]
    assert [one["name"] for one in answers] == ["team/bot", "other"]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    shutil.rmtree(tmp_path / "cache")
    weights = zoo.show("team/bot")[1].files()["adapter_model.safetensors"][0].digest
    (blob,) = [path for path in (tmp_path / "zoo").rglob(f"*{weights[2:]}*") if path.is_file()]
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    code, _, err = command("verify", "team/bot", *own)
    assert code == 3
    assert "team/bot" in err.splitlines()[-1], err


@pytest.mark.parametrize("verb", ["restore", "export", "dequantize", "analyze"])
def test_what_takes_no_adapter_says_what_to_do(
    adapter: Path, pair: Pair, tmp_path: Path, verb: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    out = ["--out", tmp_path / "out"]
    more = {"restore": ["--base", pair.base, *out], "export": out, "dequantize": out, "analyze": []}[verb]
    code, _, err = command(verb, *([pair.base] if verb == "analyze" else []), adapter, *more)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{adapter}: a PEFT adapter" in err
    assert "merge it into its base" in err


@pytest.mark.parametrize("verb", ["inspect", "verify", "generate"])
@pytest.mark.parametrize("wrong", ["pissa", "pickle"])
def test_what_is_not_read_is_one_line(
    adapter: Path, pair: Pair, verb: str, wrong: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    if wrong == "pissa":
        peft_models.change(adapter, lambda tensors: tensors, init_lora_weights="pissa")
    else:
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    more = ["w1", "--base", pair.base] if verb == "generate" else []
    code, _, err = command(verb, adapter, *more)
    assert (code, err.count("\n")) == (2, 1)
    assert {"pissa": "init_lora_weights", "pickle": "only pickled weights (adapter_model.bin)"}[wrong] in err
