"""Whatever a user can get wrong, through the command line: one line that names it, the exit code, nothing left."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pairs import Pair, Recorder, Weights, edit, files_of, make_pair, write_tokenizer

from deltacompress.artifact.delta import verify
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.compression.workspace import Workspace

UP = "model.layers.1.mlp.up_proj.weight"
Refused = Callable[..., str]


@pytest.fixture
def mine(pair: Pair, tmp_path: Path) -> Pair:
    """A copy of the pair that a test may spoil."""
    for name in ("base", "finetuned"):
        shutil.copytree(pair.base.parent / name, tmp_path / "in" / name)
    shutil.copy(pair.data, tmp_path / "in" / "train.jsonl")
    return Pair(*(tmp_path / "in" / name for name in ("base", "finetuned", "train.jsonl")))


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail; returns its one line on stderr."""

    def run(argv: list[str], *, code: int = 2) -> str:
        before, places = files_of(tmp_path), sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main(argv) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, captured.err
        assert "internal error" not in captured.err
        assert "Traceback" not in captured.err
        assert re.search(r"[;:,(] ?[a-z]", captured.err.partition(": ")[2]), f"no way out: {captured.err}"
        assert not captured.err.rstrip().endswith((":", ",", ";")), captured.err
        assert files_of(tmp_path) == before
        assert sorted(tmp_path.rglob("*")) == places  # no empty directory either
        assert not any(path.name.startswith((".out", "out")) for path in tmp_path.iterdir())
        return captured.err

    return run


def changed_argv(argv: list[str], option: str, value: str | None) -> list[str]:
    """argv with another value of an option, or without it."""
    at = argv.index(option)
    return argv[:at] + ([] if value is None else [option, value]) + argv[at + 2 :]


# --- models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["base", "finetuned"])
@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
def test_not_a_model_directory(mine: Pair, tmp_path: Path, refused: Refused, which: str, recipe: str) -> None:
    directory: Path = getattr(mine, which)
    argv = mine.argv(tmp_path / "out", recipe=recipe)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert str(directory) in refused(argv)
    (directory / "pytorch_model.bin").unlink()
    assert str(directory) in refused(argv)
    (directory / "config.json").unlink()
    assert f"{directory}: no config.json" in refused(argv)
    shutil.rmtree(directory)
    assert f"{directory}: no such directory" in refused(argv)
    directory.write_text("a file")
    assert f"{directory}: not a directory" in refused(argv)


@pytest.mark.parametrize("which", ["base", "finetuned"])
def test_weights_cut_short(mine: Pair, tmp_path: Path, refused: Refused, which: str) -> None:
    file = getattr(mine, which) / "model.safetensors"
    raw = file.read_bytes()
    for length in (0, 100, len(raw) - 1):
        file.write_bytes(raw[:length])
        assert str(file) in refused(mine.argv(tmp_path / "out"))


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
def test_another_architecture(tmp_path: Path, refused: Refused, mine: Pair, recipe: str) -> None:
    other = make_pair(tmp_path / "other", "mistral")
    told = refused(Pair(other.base, mine.finetuned, mine.data).argv(tmp_path / "out", recipe=recipe))
    assert "model_type llama" in told
    assert "mistral" in told


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
def test_another_shape(tmp_path: Path, refused: Refused, mine: Pair, recipe: str) -> None:
    for name, sizes in (("wide", {"intermediate_size": 64}), ("long", {"num_hidden_layers": 3})):
        other = make_pair(tmp_path / name, "llama", **sizes)
        told = refused(Pair(other.base, mine.finetuned, mine.data).argv(tmp_path / "out", recipe=recipe))
        assert "mlp." in told or "num_hidden_layers" in told


def test_what_may_not_be_read(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    """Each file that is needed late is looked at first; no permission to read an artifact says nothing of its bytes."""
    copy = shutil.copytree(artifact, tmp_path / "artifact")
    real = os.open

    def locked(path: Any, *args: Any, **options: Any) -> int:  # the test itself looks by Path.open
        if str(path).endswith(("tokenizer_config.json", "delta-00001-of-00001.safetensors")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", locked)
        patch.setattr(Workspace, "open", lambda *args, **options: pytest.fail("work began"))
        told = refused(mine.argv(tmp_path / "new" / "out", recipe="lossless"))
        assert f"{mine.finetuned / 'tokenizer_config.json'}: cannot be read (Permission denied); make it" in told
        for verb in ("inspect", "verify"):
            assert "safetensors: cannot be read (Permission denied); make it" in refused([verb, str(copy), "--quiet"])


def test_config_and_weights_disagree(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    edit(mine.finetuned, lambda weights: weights, intermediate_size=64)
    assert "mlp." in refused(mine.argv(tmp_path / "out"))


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_tensor_is_missing(tmp_path: Path, refused: Refused, mine: Pair, recipe: str, name: str) -> None:
    edit(mine.finetuned, lambda weights: {key: w for key, w in weights.items() if key != name})
    told = refused(mine.argv(tmp_path / "out", recipe=recipe))
    assert f"tensor {name} of the base is missing; save the whole fine-tuned model" in told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["base", "finetuned"])
@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_nan_and_inf(tmp_path: Path, refused: Refused, mine: Pair, value: float, which: str, name: str) -> None:
    def spoil(weights: Weights) -> Weights:
        weights[name].view(-1)[3] = value
        return weights

    directory = edit(getattr(mine, which), spoil)
    told = refused(mine.argv(tmp_path / "out"))
    assert name in told
    assert str(directory) in told
    assert ("1 NaN and 0 Inf" if value != value else "0 NaN and 1 Inf") in told
    assert ("get the base again" if which == "base" else "take an earlier checkpoint") in told


@pytest.mark.parametrize("recipe", ["int4-24", "rtn"])
@pytest.mark.parametrize("large", [(1e300, 0.0), (3e38, -3e38), (2e38, -2e38)])
def test_weights_beyond_all_measure(
    tmp_path: Path, refused: Refused, mine: Pair, recipe: str, large: tuple[float, float]
) -> None:
    def spoil(weights: Weights) -> Weights:
        wide = weights[UP].to(torch.float64 if large[0] > 1e38 and large[1] == 0 else weights[UP].dtype)
        wide.view(-1)[:2] = torch.tensor(large, dtype=wide.dtype)
        return weights | {UP: wide}

    edit(mine.finetuned, spoil)
    rtn = tmp_path / "rtn.yaml"
    rtn.write_text("name: rtn\nrules: [{codec: rtn, bits: 4}]\n")
    told = refused(mine.argv(tmp_path / "out", recipe=str(rtn) if recipe == "rtn" else recipe))
    assert f"tensor {UP}: weights, or their differences from the base's, are beyond 1e+30" in told
    assert "lossless" in told


def test_nan_in_the_base_is_no_obstacle_to_scope_full(tmp_path: Path, mine: Pair) -> None:
    def spoil(weights: Weights) -> Weights:
        weights[UP].view(-1)[3] = float("nan")
        return weights

    edit(mine.base, spoil)
    assert main(mine.argv(tmp_path / "out", recipe="sparsegpt-direct-4bit")) == 0


def test_nan_is_no_obstacle_to_lossless(tmp_path: Path, mine: Pair) -> None:
    def spoil(weights: Weights) -> Weights:
        weights[UP].view(-1)[3] = float("nan")
        return weights

    edit(mine.finetuned, spoil)
    assert main(mine.argv(tmp_path / "out", recipe="lossless")) == 0


def test_a_side_file_with_an_odd_name(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    shutil.copy(mine.finetuned / "tokenizer.json", mine.finetuned / "tokenizer (1).json")
    assert "tokenizer (1).json: not a file name" in refused(mine.argv(tmp_path / "out"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "no-such-model"}', "{}"])
def test_a_config_that_is_none(tmp_path: Path, refused: Refused, mine: Pair, text: str) -> None:
    (mine.finetuned / "config.json").write_text(text)
    assert str(mine.finetuned) in refused(mine.argv(tmp_path / "out"))


WRONG_KINDS = [
    ("architectures", 5),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", [None]),
    ("architectures", {}),
    ("model_type", ["llama"]),
    ("model_type", {}),
    ("tie_word_embeddings", "no"),
    ("tie_word_embeddings", 5),
    ("hidden_size", "32"),
    ("hidden_size", 0),
    ("num_hidden_layers", 2.5),
    ("num_hidden_layers", True),
    ("num_hidden_layers", -1),
    ("text_config", 5),
]


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
@pytest.mark.parametrize(("field", "value"), WRONG_KINDS)
def test_a_config_field_of_the_wrong_kind(
    tmp_path: Path, refused: Refused, mine: Pair, recipe: str, field: str, value: Any
) -> None:
    for directory in (mine.finetuned, mine.base):  # then both
        edit(directory, lambda weights: weights, **{field: value})
        told = refused(mine.argv(tmp_path / "out", recipe=recipe))
        assert f"{directory / 'config.json'}: {field} is {value!r}, not " in told
        assert "mend it, or get the file that came with the weights" in told


MISFITS = [
    ({"vocab_size": "x"}, "expected int, got str"),
    ({"vocab_size": -1}, "negative dimension"),
    ({"vocab_size": 10**30}, "vocab_size is beyond 2^62"),
    ({"num_attention_heads": 0}, "by zero"),
    ({"num_attention_heads": 3}, "not a multiple"),
    ({"hidden_act": "nope"}, "KeyError: 'nope'"),
    ({"head_dim": 0}, "negative power"),
    ({"rope_parameters": {"rope_type": "nope"}}, "KeyError: 'nope'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "TypeError"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers is above 10000"),
    ({"num_labels": 10**30}, "num_labels is above 10000"),
    ({"dtype": "float13"}, "no attribute 'float13'"),
]


@pytest.mark.parametrize(("fields", "said"), MISFITS)
def test_a_config_that_transformers_cannot_use(
    tmp_path: Path, refused: Refused, mine: Pair, fields: dict[str, Any], said: str
) -> None:
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: weights, **fields)
    told = refused(mine.argv(tmp_path / "out"))
    assert f"{mine.finetuned / 'config.json'}: transformers cannot make a model of it (" in told
    assert said in told
    assert told.rstrip().endswith("mend config.json, or get the file that came with the weights")
    assert len(told) < len(str(mine.finetuned)) + 450


@pytest.mark.parametrize("name", ["flash_attention_2", "someone/kernel"])
def test_a_checkpoint_does_not_choose_the_code_of_attention(
    tmp_path: Path, mine: Pair, artifact: Path, name: str
) -> None:
    edit(mine.finetuned, lambda weights: weights, _attn_implementation=name, attn_implementation=name)
    mine.compress(tmp_path / "out")
    shards = [next(out.glob("delta-*")).read_bytes() for out in (tmp_path / "out", artifact)]
    assert shards[0] == shards[1]


def test_shapes_are_compared_before_the_work_begins(
    tmp_path: Path, refused: Refused, mine: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(weights: Weights) -> Weights:
        return weights | {UP: weights[UP].T.contiguous()}

    monkeypatch.setattr(Workspace, "open", lambda *args, **options: pytest.fail("work began"))
    for directory in (mine.base, mine.finetuned):
        edit(directory, spoil)
    told = refused(mine.argv(tmp_path / "out"))
    assert f"tensor {UP!r} has shape (32, 48), config.json implies (48, 32); get the config.json" in told


def test_a_shape_beyond_any_memory_is_told_as_any_other(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: weights, intermediate_size=10**15)
    told = refused(mine.argv(tmp_path / "out"))
    assert f"has shape (32, 48), config.json implies (32, {10**15}); get the config.json" in told


def test_a_tensor_whose_parts_would_have_no_name(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    edit(mine.finetuned, lambda weights: weights | {"x" * 1010: torch.ones(2)})
    assert "has a name of 1010 characters, more than 1000; rename it" in refused(mine.argv(tmp_path / "out"))
    edit(mine.finetuned, lambda weights: {name[:1000]: w for name, w in weights.items()})
    mine.compress(tmp_path / "out", recipe="lossless")
    verify(tmp_path / "out", base=mine.base)


@pytest.mark.parametrize("kind", ["directory", "broken link"])
def test_weights_that_are_no_file(tmp_path: Path, refused: Refused, mine: Pair, kind: str) -> None:
    file = mine.finetuned / "model.safetensors"
    file.unlink()
    file.mkdir() if kind == "directory" else file.symlink_to("nowhere")
    assert f"{file}: no regular file, maybe a broken link" in refused(mine.argv(tmp_path / "out"))


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
@pytest.mark.parametrize("saved", ["the same directory", "again", "with a copy of the embedding as head"])
def test_a_pair_of_one_model(tmp_path: Path, refused: Refused, mine: Pair, recipe: str, saved: str) -> None:
    tuned = mine.base
    if saved != "the same directory":
        tuned = shutil.copytree(mine.base, tmp_path / "again")
        edit(tuned, lambda weights: weights, transformers_version="0.0")
    if saved.endswith("head"):
        embedding = "model.embed_tokens.weight"
        for directory in (mine.base, tuned):
            edit(directory, lambda weights: weights | {"lm_head.weight": weights[embedding].clone()})
    told = refused(Pair(mine.base, tuned, mine.data).argv(tmp_path / "out", recipe=recipe))
    digest = Checkpoint.open(tuned).fingerprint()[:12]
    assert f"{tuned}: has the weights of the base {mine.base} (content hash {digest}), so there is nothing" in told


def test_one_model_is_compressed_on_its_own(tmp_path: Path, mine: Pair) -> None:
    """Scope full never looks at the base."""
    argv = Pair(mine.base, mine.base, mine.data).argv(tmp_path / "out", recipe="sparsegpt-direct-4bit")
    assert main(argv) == 0


@pytest.mark.parametrize("recipe", ["lossless", "int4-24"])
@pytest.mark.parametrize("given", ["gone.jsonl", "gone/deeper.txt", "data.csv", "", "a.b"])
def test_calibration_data_is_looked_for_first(
    tmp_path: Path, refused: Refused, mine: Pair, recipe: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the recipe reads it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("text\n")
    monkeypatch.setattr(Checkpoint, "open", lambda path: pytest.fail("work began"))
    told = refused(changed_argv(mine.argv(tmp_path / "out", recipe=recipe), "--calibration", given))
    assert (given or "--calibration is empty") in told


def test_calibration_data_that_is_not_read_is_noted(tmp_path: Path, mine: Pair) -> None:
    seen = Recorder()
    mine.compress(tmp_path / "out", recipe="lossless", reporter=seen)
    why = "since recipe lossless does not calibrate"
    assert seen.notes == [f"{mine.data}: not read, {why}", f"samples: not used, {why}", f"seq_len: not used, {why}"]


@pytest.mark.parametrize("which", ["base", "finetuned"])
@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_in_the_place_of_a_model(
    tmp_path: Path, refused: Refused, mine: Pair, which: str, weights: str, config: bool
) -> None:
    directory: Path = getattr(mine, which)
    (directory / "model.safetensors").rename(directory / weights)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if not config:
        (directory / "config.json").unlink()
    told = refused(mine.argv(tmp_path / "out"))
    assert f"{directory}: a PEFT adapter (LoRA and the like), not a whole model; merge it into its base (" in told
    assert ".merge_and_unload().save_pretrained(DIR)) and give that, or serve it beside its base" in told


def test_links_in_a_checkpoint(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    """Weights may be linked into place; what is copied for others must lie in the checkpoint."""
    weights = mine.finetuned / "model.safetensors"
    weights.rename(tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    mine.compress(tmp_path / "plain", recipe="lossless")
    secret, place = tmp_path / "secret", mine.finetuned / "tokenizer.json"
    place.rename(secret)
    for target in (secret, Path("..") / ".." / "secret"):
        place.symlink_to(target)
        told = refused(mine.argv(tmp_path / "out", recipe="lossless"))
        assert f"{place}: cannot be read (a link that leads away, to {secret}); put a copy" in told
        place.unlink()
    (mine.finetuned / "store").mkdir()
    secret.rename(mine.finetuned / "store" / "kept")
    place.symlink_to("store/kept")
    mine.compress(tmp_path / "linked", recipe="lossless")
    assert files_of(tmp_path / "linked") == files_of(tmp_path / "plain")
    assert not (tmp_path / "linked" / "tokenizer.json").is_symlink()


def test_a_snapshot_of_the_hub(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    """All of its files are links, into the blobs beside it; no other links pass there either."""
    repository = tmp_path / "hub" / "models--team--bot"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(mine.finetuned.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    Pair(mine.base, snapshot, mine.data).compress(tmp_path / "hubs", recipe="lossless")
    mine.compress(tmp_path / "plain", recipe="lossless")
    assert files_of(tmp_path / "hubs").keys() == files_of(tmp_path / "plain").keys()
    (tmp_path / "secret").write_text("{}")
    for target in (tmp_path / "secret", repository / "refs"):
        (snapshot / "generation_config.json").unlink()
        (repository / "refs").write_text("{}")
        (snapshot / "generation_config.json").symlink_to(target)
        told = refused(Pair(mine.base, snapshot, mine.data).argv(tmp_path / "out", recipe="lossless"))
        assert f"a link that leads away, to {target}" in told
    (snapshot / "generation_config.json").unlink()
    (repository / "blobs").rename(tmp_path / "elsewhere")
    (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    told = refused(Pair(mine.base, snapshot, mine.data).argv(tmp_path / "out", recipe="lossless"))
    assert f"a link that leads away, to {tmp_path / 'elsewhere'}" in told


def test_weights_that_no_codec_rounds_are_noted(tmp_path: Path, mine: Pair) -> None:
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: {name: (w * 100).to(torch.int8) for name, w in weights.items()})
    seen = Recorder()
    mine.compress(tmp_path / "out", reporter=seen)
    assert "16 weights are I8: stored exactly" in seen.notes


def test_a_forward_that_fails_on_its_config(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    """Validation passes, the layer's own forward divides by null."""
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: weights, model_type="ministral3", architectures=["Ministral3ForCausalLM"])
    told = refused(mine.argv(tmp_path / "new" / "out"))
    assert f"{mine.finetuned / 'config.json'}: transformers cannot make a model of it (TypeError: " in told


def test_a_model_of_several_texts(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: weights, model_type="musicgen")
    assert "'musicgen' is multimodal" in refused(mine.argv(tmp_path / "out"))


# --- calibration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "train.jsonl"),
        ("\n\n", "train.jsonl"),
        ('{"label": 1}\n', "text"),
        ('{"prompt": "w1"}\n', "completion"),
        ('{"text": 7}\n', "text"),
        ('{"text": "w1 w2"\n', "train.jsonl"),
        ("no json\n", "train.jsonl"),
        ('{"text": "w1 w2"}\n', "--samples"),
        ('{"text": ""}\n', "blank"),
    ],
)
def test_calibration_data(tmp_path: Path, refused: Refused, mine: Pair, text: str, told: str) -> None:
    mine.data.write_text(text)
    message = refused(mine.argv(tmp_path / "out"))
    assert told in message
    assert "train.jsonl" in message


def test_too_few_tokens_says_how_many(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    argv = changed_argv(mine.argv(tmp_path / "out"), "--samples", "1000")
    assert "--samples 1000 x --seq-len 16 needs 16000" in refused(argv)


def test_a_named_pipe_is_not_waited_for(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    mine.data.unlink()
    os.mkfifo(mine.data)
    assert "train.jsonl: a named pipe, not a regular file" in refused(mine.argv(tmp_path / "out"))


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_compressed_data(tmp_path: Path, refused: Refused, mine: Pair, name: str) -> None:
    packed = mine.data.with_name(name)
    packed.write_bytes(gzip.compress(mine.data.read_bytes()))
    told = refused(changed_argv(mine.argv(tmp_path / "out"), "--calibration", str(packed)))
    assert f"{packed}: is compressed (gzip); unpack it" in told


def test_data_without_a_name(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    assert "--calibration is empty" in refused(changed_argv(mine.argv(tmp_path / "out"), "--calibration", ""))


def test_no_calibration(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    argv = mine.argv(tmp_path / "out")
    assert "give --calibration FILE" in refused(changed_argv(argv, "--calibration", None))
    assert "gone.jsonl" in refused(changed_argv(argv, "--calibration", str(tmp_path / "gone.jsonl")))


def test_longer_than_the_model_can_read(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    told = refused(changed_argv(mine.argv(tmp_path / "out"), "--seq-len", "65"))
    assert "--seq-len 65: the model has 64 positions" in told


@pytest.mark.parametrize(
    ("option", "value"),
    [("--samples", "0"), ("--samples", "1e9"), ("--seq-len", "1"), ("--seed", "-1"), ("--seed", str(2**60))],
)
def test_counts_out_of_range(tmp_path: Path, refused: Refused, mine: Pair, option: str, value: str) -> None:
    argv = [*mine.argv(tmp_path / "out"), option, value]
    assert option in refused(argv)


def test_no_tokenizer(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    for file in mine.finetuned.glob("tokenizer*"):
        file.unlink()
    assert f"{mine.finetuned}: holds no tokenizer" in refused(mine.argv(tmp_path / "out"))
    assert main(mine.argv(tmp_path / "fine", recipe="lossless")) == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_max_length": "x"}, "says model_max_length 'x', not a whole number above 0; mend it"),
        ({"model_max_length": 1.5}, "model_max_length 1.5, not"),
        ({"model_max_length": []}, "model_max_length [], not"),
        ({"model_max_length": 0}, "model_max_length 0, not"),
        ({"padding_side": "up"}, "the tokenizer cannot be loaded"),
    ],
)
def test_tokenizer_configs(tmp_path: Path, refused: Refused, mine: Pair, fields: dict[str, Any], told: str) -> None:
    file = mine.finetuned / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    message = refused(mine.argv(tmp_path / "out"))
    assert told in message
    assert str(mine.finetuned) in message


def test_a_tokenizer_that_fails(tmp_path: Path, refused: Refused, mine: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a word-piece model without its [UNK] does; the Rust tokenizers raise bare Exception."""

    def fail(*args: Any, **options: Any) -> None:
        raise Exception("WordPiece error: Missing [UNK] token from the vocabulary")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", fail)
    told = refused(mine.argv(tmp_path / "out"))
    assert f"{mine.finetuned}: the tokenizer fails on the calibration data: WordPiece error: Missing [UNK]" in told


def test_the_tokenizer_of_another_model(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    write_tokenizer(mine.finetuned, [f"x{i}" for i in range(100)] + [f"w{i}" for i in range(90)])
    told = refused(mine.argv(tmp_path / "out"))
    assert "its embedding has 96 rows; the tokenizer is not this model's" in told


def test_a_token_beyond_the_last_row(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    mine.data.write_text((json.dumps({"text": "w87 " * 12}) + "\n") * 60)
    write_tokenizer(mine.finetuned, [f"x{i}" for i in range(5)] + [f"w{i}" for i in range(88)])
    assert "its tokenizer gives token 96, its embedding has 96 rows" in refused(mine.argv(tmp_path / "out"))
    write_tokenizer(mine.finetuned, [f"x{i}" for i in range(4)] + [f"w{i}" for i in range(88)])
    mine.compress(tmp_path / "out")


# --- recipes ---------------------------------------------------------------------------------------------------


def test_unknown_recipe(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    assert "no recipe named 'int5'; did you mean int" in refused(mine.argv(tmp_path / "out", recipe="int5"))
    assert "gone.yaml" in refused(mine.argv(tmp_path / "out", recipe=str(tmp_path / "gone.yaml")))


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ([{"codec": "exact", "bitz": 1}], "bitz"),
        ([{"codec": "obs", "bits": 4, "kind": "linear"}], "no rule matches"),
        ([{"codec": "obs", "bits": 4}], "codec obs on"),
        ([{"codec": "obs", "bits": 4, "kind": "linear", "group_size": 64}, {"codec": "exact"}], "group_size 64"),
        ([{"codec": "rtn", "bits": 4, "kind": "linear", "group_size": 128}, {"codec": "exact"}], "group_size 128"),
    ],
)
def test_recipes_that_do_not_fit(
    tmp_path: Path, refused: Refused, mine: Pair, rules: list[dict[str, Any]], told: str
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump({"name": "mine", "rules": rules}))
    assert told in refused(mine.argv(tmp_path / "out", recipe=str(recipe)))


def test_experts(tmp_path: Path, refused: Refused) -> None:
    mixture = make_pair(tmp_path / "moe", "mixtral")
    edit(mixture.finetuned, lambda weights: weights, num_local_experts=5)
    told = refused(mixture.argv(tmp_path / "out"))
    assert "but config.json says that there are 5 experts; get the config.json" in told


# --- the output ------------------------------------------------------------------------------------------------


def test_an_output_that_exists(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    restore = ["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out"]
    for out in (taken, taken / "file", mine.base):
        assert f"{out}: exists already" in refused(mine.argv(out))
        why = f"is {out}, which is read" if out == mine.base else "exists already"
        assert f"{out}: {why}" in refused([*restore, str(out)])
        assert refused([*restore, str(out), "--force"])
        assert refused([*mine.argv(out), "--force"])
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link: exists already" in refused(mine.argv(tmp_path / "link"))


def test_a_mount_point(
    tmp_path: Path, refused: Refused, mine: Pair, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one looks free, but no directory can be renamed to it."""
    out = tmp_path / "mount"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == out)
    for argv in (mine.argv(out), ["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out", str(out)]):
        assert f"{out}: is a mount point; choose a new directory inside it" in refused(argv)


def test_below_a_file(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "out"
    assert "file" in refused(mine.argv(out))
    assert "file" in refused(["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out", str(out)])


def test_inside_what_is_read(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    """Also where a link or `..` hides it."""
    mine_too = shutil.copytree(artifact, tmp_path / "artifact")
    (tmp_path / "link").symlink_to(mine.base)
    for inside in (mine.base / "out", mine.finetuned / "new" / "out", tmp_path / "link" / "out"):
        told = refused(mine.argv(inside))
        assert f"{inside}: lies inside " in told
        assert "which is read; choose another --out" in told
    restore = ["restore", str(mine_too), "--base", str(mine.base), "--quiet", "--out"]
    for inside in (mine.base / "out", mine_too / "out", mine_too / "new" / ".." / "out"):
        assert f"{inside}: lies inside " in refused([*restore, str(inside)])


def test_parents_made_for_nothing_are_removed(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    out = tmp_path / "new" / "deep" / "out"
    edit(mine.finetuned, lambda weights: weights, rms_norm_eps=float("nan"))  # shows in the Hessian, mid-way
    assert "the Hessian is not finite" in refused(mine.argv(out))
    (tmp_path / "new").mkdir()  # not ours: stays
    assert "the Hessian is not finite" in refused(mine.argv(out))
    damaged = shutil.copytree(artifact, tmp_path / "damaged")
    with next(damaged.glob("delta-*")).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"!!!")
    argv = ["restore", str(damaged), "--base", str(mine.base), "--quiet", "--out", str(out)]
    assert "the file is damaged, fetch it again" in refused(argv, code=3)


def test_parents_of_what_is_published_stay(tmp_path: Path, mine: Pair) -> None:
    out = tmp_path / "new" / ".." / "deep" / "out"
    assert main(mine.argv(out)) == 0
    restored = tmp_path / "other" / ".." / "restored"
    assert main(["restore", str(out), "--base", str(mine.base), "--quiet", "--out", str(restored)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "in", "new", "other", "restored"]


def test_a_path_that_is_no_text(tmp_path: Path, mine: Pair) -> None:
    out = tmp_path / os.fsdecode(b"d\xe9lta \xff")
    assert main(mine.argv(out)) == 0
    restored = tmp_path / os.fsdecode(b"\xfe")
    assert main(["restore", str(out), "--base", str(mine.base), "--quiet", "--out", str(restored)]) == 0


@pytest.mark.parametrize("length", [245, 255, 300])
def test_a_name_too_long(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path, length: int) -> None:
    out = tmp_path / ("x" * length)
    assert "cannot be written (File name too long); choose another" in refused(
        mine.argv(out).copy()
        if length > 247
        else ["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out", str(tmp_path / ("x" * 250))]
    )


@pytest.mark.parametrize("call", range(4))
def test_disk_full_before_the_first_step_is_done(
    tmp_path: Path, refused: Refused, mine: Pair, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """There is nothing to resume yet, so nothing stays."""
    calls, real = iter(range(99)), os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "new" / "out"
    if call < 3:
        assert "No space left on device" in refused(mine.argv(out))
        return
    assert main(mine.argv(out)) == 2  # the step has its name, only its directory is not synced
    assert (out.with_name("out.partial") / "step-outer.safetensors").is_file()


def test_no_name(tmp_path: Path, refused: Refused, mine: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "name of its own" in refused(mine.argv(Path()))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that nobody may write to")
def test_no_write_permission(refused: Refused, mine: Pair, artifact: Path) -> None:
    """/proc takes no new entries, not even from root."""
    out = Path("/proc/deltacompress-out")
    for argv in (mine.argv(out), ["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out", str(out)]):
        told = refused(argv)
        assert str(out) in told
        assert "cannot be written" in told


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in refused(mine.argv(tmp_path / "locked" / "out"))


def test_files_that_may_not_grow(mine: Pair, tmp_path: Path, artifact: Path) -> None:
    """A real limit of the system, at the size of a shard: resumable once there is room, and the same bytes."""
    room = next(artifact.glob("delta-*")).stat().st_size - 1
    limited = (
        "import resource, signal, sys\n"
        "from deltacompress.cli.main import main\n"
        "import transformers, deltacompress.compression.driver\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))\n"
        f"sys.exit(main({mine.argv(tmp_path / 'out')!r}))\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(torch.get_num_threads())
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", limited], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "cannot be written (File too large)" in done.stderr
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "step-layer-00001.safetensors").is_file()
    assert main(mine.argv(tmp_path / "out", "--resume")) == 0
    verify(tmp_path / "out", base=mine.base)
    assert files_of(tmp_path / "out") == files_of(artifact)


@pytest.mark.parametrize("call", range(3))
def test_disk_full_during_restore(
    tmp_path: Path, refused: Refused, mine: Pair, artifact: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls, real = iter(range(99)), os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    told = refused(["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out", str(tmp_path / "out")])
    assert "No space left on device" in told
    assert "free some space" in told


# --- artifacts and bases (exit code 3) ------------------------------------------------------------------------


def test_integrity_failures_exit_with_3(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    told = refused(["verify", str(copy), "--base", str(mine.finetuned), "--quiet"], code=3)
    wanted, found = (Checkpoint.open(one).fingerprint()[:12] for one in (mine.base, mine.finetuned))
    assert f"{mine.finetuned}: not the base of this delta (base {wanted}, this is {found}): tensor" in told
    assert "no such artifact" in refused(["inspect", str(tmp_path / "gone")])
    (copy / "config.json").unlink()
    assert "config.json: missing" in refused(["inspect", str(copy)], code=3)
    assert "config.json: missing" in refused(["verify", str(copy), "--quiet"], code=3)


def test_a_base_that_is_no_model_exits_with_2(tmp_path: Path, refused: Refused, artifact: Path) -> None:
    for verb in (["verify"], ["restore", "--out", str(tmp_path / "out")]):
        assert "nowhere: no such directory" in refused(
            [verb[0], str(artifact), "--base", str(tmp_path / "nowhere"), "--quiet", *verb[1:]]
        )


@pytest.mark.parametrize("missing", ["--recipe", "--out"])
def test_options_that_must_be_given(tmp_path: Path, refused: Refused, mine: Pair, missing: str) -> None:
    assert missing in refused(changed_argv(mine.argv(tmp_path / "out"), missing, None))


def test_a_codec_this_machine_lacks(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU machine may have it")
    for codec in ("gdeflate", "ans"):
        assert codec in refused(mine.argv(tmp_path / "out", "--lossless", codec)).lower()
    assert "cuda" in refused(changed_argv(mine.argv(tmp_path / "out"), "--device", "cuda"))


@pytest.mark.parametrize("value", [0, -1])
def test_a_model_that_can_read_nothing(tmp_path: Path, refused: Refused, mine: Pair, value: int) -> None:
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: weights, max_position_embeddings=value)
    assert f"max_position_embeddings {value}" in refused(mine.argv(tmp_path / "out"))


def test_an_error_is_json_on_stderr_under_json(tmp_path: Path, mine: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "analyze", str(mine.base), str(tmp_path / "gone")]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.err)["error"]
    assert (captured.out, error["where"], error["what"]) == ("", str(tmp_path / "gone"), "no such directory")


def test_analyze_leaves_no_empty_directory(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    out = tmp_path / "new" / "out"
    assert "gone" in refused(["analyze", str(mine.base), str(tmp_path / "gone"), "--out", str(out), "--quiet"])
    assert not out.exists()


def test_json_of_what_worked(tmp_path: Path, mine: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The other side of the contract: results on stdout, as JSON, nothing on stderr under --quiet."""
    assert main(mine.argv(tmp_path / "out", "--json")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert {"ratio", "artifact_bytes", "seconds", "peak_memory_bytes"} <= json.loads(captured.out).keys()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"ratio", "artifact_bytes", "finetuned_bytes", "linear_bits_per_weight", "tensors"} <= data.keys()
    assert main(["inspect", str(tmp_path / "out"), "--entropy", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    linears = [row["over_entropy"] for row in told["tensors"] if row["kind"] == "linear"]
    assert all(1 < over < 8 for over in linears)  # tiny tensors: tables and frames weigh
    assert all("over_entropy" not in row for row in data["tensors"])
