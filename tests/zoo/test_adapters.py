"""PEFT adapters: what fits is registered as it is, everything else is refused in one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zoo.checkpoints import (
    BOFT,
    KINDS,
    LORA,
    Tensor,
    boft,
    files_of,
    lora,
    tensor,
    weights,
    write_adapter,
    write_base,
)

from deltacompress.adapters import values
from deltacompress.adapters.adapter import digest_in
from deltacompress.errors import BaseMismatchError, CheckpointError, DeltaCompressError
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.artifact import Described
from deltacompress.zoo.errors import ConflictError, DamagedRecordError, NotFoundError
from deltacompress.zoo.store import osfs

PATH = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash does is tested elsewhere."""
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    made = Zoo.init(tmp_path / "zoo")
    linking.add(made, write_base(tmp_path / "base"), "team/llama", hub_id="acme/llama", revision="c0ffee")
    return made


def test_a_base_has_one_name_however_it_was_given(tmp_path: Path, zoo: Zoo) -> None:
    """Its hub id, or the name of its directory, and not that of its entry."""
    linking.add(zoo, write_base(tmp_path / "plain", weights(1)), "team/plain")
    for name, base, told in (
        ("a", None, "acme/llama"),
        ("b", "team/llama", "acme/llama"),
        ("c", "team/plain", "plain"),
    ):
        linking.add(zoo, write_adapter(tmp_path / name), f"team/{name}", base=base)
        assert zoo.show(f"team/{name}")[1].lineage.base_name == told


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_comes_back_byte_for_byte(tmp_path: Path, zoo: Zoo, kind: str) -> None:
    config, tensors, recipe = KINDS[kind]
    source = write_adapter(tmp_path / "adapter", config, tensors)
    added = linking.add(zoo, source, "team/tuned")
    assert (added.kind, added.base) == ("adapter", "team/llama@1")
    found, entry = zoo.show("team/tuned")
    assert entry.lineage.relation == "adapter"
    assert entry.lineage.parents == (zoo.resolve("team/llama").manifest,)
    assert (entry.summary["adapter"], entry.summary["recipe"]) == (kind, recipe)
    assert entry.summary["modules"] == (2 if kind == "lora" else 1)
    assert entry.summary["adapter_digest"] == digest_in(source)
    assert files_of(zoo.pull(str(found), tmp_path / "out")) == files_of(source)
    assert zoo.verify().ok


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("", "its adapter_digest is not that of its files"),
        ("adapter_model.safetensors", "not the files of an adapter: no adapter_model.safetensors"),
    ],
)
def test_an_entry_whose_digest_is_that_of_other_files(
    tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, lost: str, told: str
) -> None:
    """Reports would be taken for another adapter's."""
    source, described = write_adapter(tmp_path / "adapter"), linking.describe_adapter

    def forged(*arguments: Any) -> Described:
        made = described(*arguments)
        summary = dict(made.entry.summary) | {"adapter_digest": "0" * 64}
        layers = tuple(one for one in made.entry.layers if one.annotations["file"] != lost)
        blobs = [one for one in made.blobs if one.digest in {layer.digest for layer in layers}]
        return Described(made.entry.model_copy(update={"summary": summary, "layers": layers}), blobs)

    monkeypatch.setattr(linking, "describe_adapter", forged)
    linking.add(zoo, source, "team/tuned")
    with pytest.raises(DamagedRecordError, match=f"team/tuned@1: {told}"):
        zoo.pull("team/tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Noting:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str, total: int | None = None) -> None: ...
    def step(self, label: str, **_: object) -> None: ...
    def note(self, message: str) -> None:
        self.notes.append(message)


def test_what_a_trainer_leaves_beside_stays_behind(tmp_path: Path, zoo: Zoo) -> None:
    noting = Noting()
    source = write_adapter(tmp_path / "adapter")
    (source / "training_args.bin").write_bytes(b"\x80\x04.")
    linking.add(zoo, source, "team/tuned", reporter=noting)
    assert [note.rpartition(": ")[2] for note in noting.notes] == ["training_args.bin"]
    assert "training_args.bin" not in files_of(zoo.pull("team/tuned", tmp_path / "out"))


@pytest.mark.parametrize(
    ("claimed", "told"),
    [
        ("/models/Llama", None),
        ("acme/other", "its config calls its base 'acme/other', and this is 'acme/llama'; its shapes fit"),
        (None, "its config does not say which base it is of; its shapes fit"),
    ],
)
def test_a_base_that_it_does_not_name_is_told(tmp_path: Path, zoo: Zoo, claimed: str | None, told: str | None) -> None:
    noting, source = Noting(), write_adapter(tmp_path / "adapter", LORA | {"base_model_name_or_path": claimed})
    linking.add(zoo, source, "team/tuned", base="team/llama", reporter=noting)
    assert noting.notes == ([] if told is None else [f"{source}: {told}"])


def test_what_loading_would_note_is_noted(tmp_path: Path, zoo: Zoo) -> None:
    noting, source = Noting(), write_adapter(tmp_path / "adapter", LORA | {"target_modules": ".*_proj"})
    linking.add(zoo, source, "team/tuned", base="team/llama", reporter=noting)
    told = "target_modules is an expression, which is not run: all 2 modules of its file are served"
    assert noting.notes == [f"{source}: {told}"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Tensor] | None, str]] = {
    "dora": (LORA | {"use_dora": True}, None, "has no magnitude, but use_dora is set"),
    "kind": (LORA | {"peft_type": "VERA"}, {}, "peft_type 'VERA'; read are LORA, BOFT, SHIRA, ROSA"),
    "rank": (LORA | {"r": 3}, None, "A and B are of rank 2, by the config it is 3"),
    "no rank": (LORA | {"r": 0}, None, "r must be at least 1"),
    "rank as text": (LORA | {"r": "2"}, None, "r must be a whole number"),
    "rank pattern": (LORA | {"rank_pattern": {"q_proj": "x"}}, None, "rank_pattern"),
    "no targets": (LORA | {"target_modules": []}, None, "target_modules must be"),
    "module of none": (LORA | {"target_modules": ["q_proj"]}, None, "k_proj is not among target_modules"),
    "target without": (LORA | {"target_modules": ["q_proj", "k_proj", "v_proj"]}, None, "no matrices for.*v_proj"),
    "half": (LORA | {"target_modules": ["q_proj"]}, {f"{PATH}.lora_A.weight": tensor(1, 2, 8)}, "A and B belong"),
    "other base": (LORA, lora(q_proj=(8, 8), k_proj=(8, 8)), r"lora B has shape \[8, 2\], the base needs \[4, 2\]"),
    "no such module": (
        LORA | {"target_modules": ["w"]},
        {f"base_model.model.w.lora_{x}.weight": tensor(x, 2, 2) for x in "AB"},
        "module w is not in the base",
    ),
    "a vector": (
        LORA | {"target_modules": ["input_layernorm"]},
        {f"base_model.model.model.layers.0.input_layernorm.lora_{x}.weight": tensor(x, 2, 2) for x in "AB"},
        "not a matrix",
    ),
    "stranger": (LORA, lora() | {f"{PATH}.lora_E": tensor(1, 8)}, "no tensor of a lora adapter"),
    "no prefix": (LORA, {"q_proj.lora_A.weight": tensor(1, 2, 8)}, "does not begin with base_model.model"),
    "empty": (LORA, {}, "holds no lora matrices"),
    "whole": (LORA, lora() | {f"{PATH}.weight": tensor(1, 8, 8)}, "not among modules_to_save"),
    "blocks": (BOFT | {"boft_block_size": 3}, None, "boft_R has blocks of 2 columns, by the config blocks of 3"),
    "factors": (BOFT | {"boft_n_butterfly_factor": 2}, boft(factors=3), "boft_R has 3 factors, by the config 2"),
    "a number that is none": (
        LORA,
        lora() | {f"{PATH}.lora_A.weight": ("F32", (2, 8), b"\x00\x00\xc0\x7f" * 16)},
        "holds NaN or an infinity",
    ),
    "an entry twice": (
        KINDS["shira"][0],
        KINDS["shira"][1] | {f"{PATH}.shira_indices": ("I32", (2, 16), b"\x01\x00\x00\x00" * 32)},
        "has an entry twice",
    ),
    "scale": (BOFT, boft() | {f"{PATH}.boft_s": tensor(1, 1, 8)}, "boft_s has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, zoo: Zoo, case: str) -> None:
    config, tensors, words = REFUSED[case]
    with pytest.raises((CheckpointError, BaseMismatchError), match=words) as error:
        linking.add(zoo, write_adapter(tmp_path / "adapter", config, tensors), "team/tuned")
    assert "\n" not in str(error.value)
    assert [one.name for one in zoo.list()] == ["team/llama"]


def test_what_changes_while_it_is_read_is_not_registered(
    tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_adapter(tmp_path / "adapter")

    def and_then(adapter: object) -> None:
        raw = (source / "adapter_model.safetensors").read_bytes()
        (source / "adapter_model.safetensors").write_bytes(raw[:-1] + b"\x7f")

    monkeypatch.setattr(values, "check_values", and_then)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        linking.add(zoo, source, "team/tuned")


def test_pickles_are_refused(tmp_path: Path, zoo: Zoo) -> None:
    source = write_adapter(tmp_path / "adapter")
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="only pickled weights"):
        linking.add(zoo, source, "team/tuned")
    (source / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        linking.add(zoo, source, "team/tuned")


def test_its_base_must_be_known(tmp_path: Path, zoo: Zoo) -> None:
    source = write_adapter(tmp_path / "adapter", LORA | {"base_model_name_or_path": "else/where"})
    with pytest.raises(NotFoundError, match=r"known as 'else/where', .* say which with --base \(team/llama\)"):
        linking.add(zoo, source, "team/tuned")
    nameless = write_adapter(tmp_path / "nameless", LORA | {"base_model_name_or_path": None})
    with pytest.raises(NotFoundError, match=r"does not say which base it is of; say which with --base \(team/llama\)"):
        linking.add(zoo, nameless, "team/tuned")
    assert linking.add(zoo, source, "team/tuned", base="team/llama").base == "team/llama@1"
    linking.add(zoo, write_base(tmp_path / "second", weights(1)), "team/second", hub_id="acme/llama")
    again = write_adapter(tmp_path / "again")
    with pytest.raises(ConflictError, match="say which with --base"):
        linking.add(zoo, again, "team/tuned")
    pinned = write_adapter(tmp_path / "pinned", LORA | {"revision": "0" * 40})
    with pytest.raises(DeltaCompressError):
        linking.add(zoo, pinned, "team/tuned", base="team/tuned")


def test_a_config_that_is_no_json_object(tmp_path: Path, zoo: Zoo) -> None:
    source = write_adapter(tmp_path / "adapter")
    told = "expected a JSON object", "not valid JSON", "key 'r' is given twice", "key 'q' is given twice"
    again = (', "r": 4}', ', "alpha_pattern": {"q": 1, "q": 2}}')  # at the top, and inside
    for text, why in zip(("[]", "{", *(json.dumps(LORA)[:-1] + more for more in again)), told, strict=True):
        (source / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {why}"):
            linking.add(zoo, source, "team/tuned")
