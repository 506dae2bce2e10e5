"""Whatever a user can get wrong, through the command line: one line that names it, the exit code, nothing left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pairs import Pair, Weights, edit, files_of, make_pair, write_tokenizer

from deltacompress.artifact import verify
from deltacompress.cli.main import main

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
        before = files_of(tmp_path)
        capsys.readouterr()
        assert main(argv) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, captured.err
        assert "internal error" not in captured.err
        assert "Traceback" not in captured.err
        assert files_of(tmp_path) == before
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
    assert "train.jsonl: not a regular file" in refused(mine.argv(tmp_path / "out"))


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


def test_the_tokenizer_of_another_model(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    write_tokenizer(mine.finetuned, [f"x{i}" for i in range(100)] + [f"w{i}" for i in range(90)])
    told = refused(mine.argv(tmp_path / "out"))
    assert "its embedding has 96 rows; the tokenizer is not this model's" in told


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
    told = refused(mixture.argv(tmp_path / "out"))
    assert "expert" in told
    assert "lossless" in told


# --- the output ------------------------------------------------------------------------------------------------


def test_an_output_that_exists(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    restore = ["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out"]
    for out in (taken, taken / "file", mine.base):
        for argv in (mine.argv(out), [*restore, str(out)]):
            assert f"{out}: exists already" in refused(argv)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link: exists already" in refused(mine.argv(tmp_path / "link"))


def test_below_a_file(tmp_path: Path, refused: Refused, mine: Pair, artifact: Path) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "out"
    assert "file" in refused(mine.argv(out))
    assert "file" in refused(["restore", str(artifact), "--base", str(mine.base), "--quiet", "--out", str(out)])


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
        "import transformers, deltacompress.driver\n"
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
    import errno

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
    assert "not the base" in refused(["verify", str(copy), "--base", str(mine.finetuned), "--quiet"], code=3)
    assert "no such artifact" in refused(["inspect", str(tmp_path / "gone")], code=3)
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
    assert "cuda" in refused([*mine.argv(tmp_path / "out"), "--device", "cuda"])


@pytest.mark.parametrize("value", [0, -1])
def test_a_model_that_can_read_nothing(tmp_path: Path, refused: Refused, mine: Pair, value: int) -> None:
    for directory in (mine.base, mine.finetuned):
        edit(directory, lambda weights: weights, max_position_embeddings=value)
    assert f"max_position_embeddings {value}" in refused(mine.argv(tmp_path / "out"))


def test_an_error_is_text_on_stderr_under_json_too(tmp_path: Path, refused: Refused, mine: Pair) -> None:
    assert "gone: no such directory" in refused(["--json", "analyze", str(mine.base), str(tmp_path / "gone")])


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
