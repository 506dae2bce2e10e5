"""Loading: the same model as plain transformers makes, from the files whose headers were checked and bytes hashed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from models.watch import Watch
from pairs import edit
from safetensors.torch import load_file, save_file
from torch import nn

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import BackendError, CheckpointError, UnsupportedModelError
from deltacompress.evaluation.scoring.checkpoints import PlainServing
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Row
from deltacompress.models.load import load_model

CPU = torch.device("cpu")
Tiny = Callable[..., Path]


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    return load_model(Checkpoint.open(path), device=CPU, dtype=dtype)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint of random weights in several shards, made once; copy it before changing it."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def make(architecture: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (architecture, dtype) not in made:
            path = tmp_path_factory.mktemp(architecture)
            tiny_models.save_random(path, architecture, dtype)
            made[architecture, dtype] = path
        return made[architecture, dtype]

    return make


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Path:
    """A Llama in one file, to be changed."""
    tiny_models.save_random(tmp_path / "copy", "llama", shard="1GB")
    return tmp_path / "copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", tiny_models.CONFIGS)
def test_it_is_what_transformers_makes(tiny: Tiny, architecture: str, dtype: torch.dtype) -> None:
    path = tiny(architecture)
    ours = loaded(path, dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    assert type(ours) is type(theirs)
    assert not ours.training
    for mine, other in (
        (ours.state_dict(), theirs.state_dict()),
        (dict(ours.named_buffers()), dict(theirs.named_buffers())),
    ):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value.dtype == other[name].dtype
            assert torch.equal(value, other[name])
    ids = torch.arange(4, 16).unsqueeze(0)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.config.name_or_path == ours.name_or_path == str(path)


def test_tied_weights_stay_one(tiny: Tiny) -> None:
    model = loaded(tiny("qwen2-tied"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_a_type_keeps_in_fp32_stays(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["norm"])
    model = loaded(tiny("llama"), torch.bfloat16)
    assert {str(p.dtype) for n, p in model.named_parameters() if "norm" in n} == {"torch.float32"}
    assert {str(p.dtype) for n, p in model.named_parameters() if "norm" not in n} == {"torch.bfloat16"}


def test_a_base_saved_without_its_head_s_prefix(copy: Path) -> None:
    wanted = loaded(copy)
    edit(copy, lambda weights: {name.removeprefix("model."): w for name, w in weights.items()})
    assert all(map(torch.equal, loaded(copy).parameters(), wanted.parameters()))


def test_tensors_that_nothing_takes_are_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "of.nobody": torch.ones(2)}
    edit(copy, lambda weights: weights | spare)
    read, plain = [], Checkpoint.read

    def counted(self: Checkpoint, name: str, **options: bool) -> torch.Tensor:
        read.append(name)
        return plain(self, name, **options)

    monkeypatch.setattr(Checkpoint, "read", counted)
    loaded(copy)
    assert sorted(read) == sorted(load_file(copy / "model.safetensors").keys() - spare.keys())  # and each of them once


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
def test_a_missing_tensor_is_named_before_any_is_read(
    tiny: Tiny, tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save_random(tmp_path, architecture, shard="1GB")
    lost = {"llama": "model.norm.weight", "mixtral": "model.norm.weight", "gpt2": "transformer.ln_f.weight"}[
        architecture
    ]
    edit(tmp_path, lambda weights: {name: w for name, w in weights.items() if name != lost})
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: no weight {lost} in it; give a whole checkpoint$"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"vocab_size": 10**9}),
        ("llama", {"intermediate_size": 64}),
        ("mixtral", {"num_local_experts": 10**6}),
        ("gpt2", {"n_positions": 10**9}),
    ],
)
def test_another_shape_is_named_before_any_is_read(
    tiny: Tiny, tmp_path: Path, architecture: str, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny(architecture), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("read"))
    told = rf"tensor '.*' has shape \(.*\), config\.json implies \(.*{next(iter(fields.values()))}.*\); get the config"
    with pytest.raises(CheckpointError, match=told):
        loaded(tmp_path)


def test_what_is_scored_is_what_was_hashed(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    checkpoint.fingerprint()
    edit(copy, lambda weights: {name: w * 0 for name, w in weights.items()})
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        Scorer(PlainServing.open(checkpoint))


def test_a_config_that_changes_after_it_was_read_does_not_matter(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    (copy / "config.json").write_text("{}")
    assert load_model(checkpoint, device=CPU, dtype=torch.float32).config.hidden_size == 32


def test_no_causal_language_model(copy: Path) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps({"model_type": "bit"}))
    with pytest.raises(UnsupportedModelError, match="model type 'bit' is no causal language model; give a checkpoint"):
        loaded(copy)


def test_a_full_gpu_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Checkpoint, "read", full)
    with pytest.raises(BackendError, match=r"\d+ bytes of weights do not fit into the memory of cpu; use a smaller"):
        loaded(copy)


def test_a_forward_that_fails_is_told_before_weights_are_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, *_: object, **__: object) -> None:
        raise RuntimeError("shape '[1, 2]' is invalid for input of size 3")

    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(CheckpointError, match=r"config\.json: transformers cannot make a model of it \(shape"):
        loaded(copy)


def test_only_the_checked_files_are_opened(tiny: Tiny, tmp_path: Path) -> None:
    """Beside the shards lie others of every name that transformers looks for."""
    path = tmp_path / "model"
    shutil.copytree(tiny("llama"), path)
    shards = {file.name for file in path.glob("*.safetensors")}
    assert len(shards) > 2
    wanted = loaded(path)
    zeros = {name: torch.zeros_like(w) for name, w in wanted.state_dict().items()}
    save_file(zeros, path / "adapter_model.safetensors")
    for name in ("adapter_config.json", "pytorch_model.bin", "model.gguf", "tf_model.h5", "custom_generate", "x.py"):
        (path / name).write_text("{}")
    with Watch(path) as seen:
        found = loaded(path)
    assert seen.opened[path] == {"config.json", "model.safetensors.index.json", *shards}
    assert (seen.elsewhere, seen.deeds) == (set(), [])
    assert all(map(torch.equal, found.parameters(), wanted.parameters()))


def test_the_library_is_as_loud_as_before(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    edited = os.environ.copy()
    loaded(tiny("llama"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert os.environ == edited
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("architecture", "more"),
    [("mixtral", {"num_experts_per_tok": 1000}), ("mixtral", {"num_experts_per_tok": -1})],
)
def test_a_forward_that_a_config_breaks_is_told_as_that(
    tmp_path: Path, architecture: str, more: dict[str, object]
) -> None:
    """Where no outline can be tried: a router looks at values."""
    tiny_models.save_random(tmp_path, architecture, shard="1GB")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    scorer = Scorer(PlainServing.open(tmp_path))
    told = r"config\.json: transformers cannot make a model of it \(.*\); mend config"
    with pytest.raises(CheckpointError, match=told):
        scorer.loglikelihood([Row(None, (5, 6), (7,))])
