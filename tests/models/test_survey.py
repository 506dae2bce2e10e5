"""Which model types are taken: the survey of all that transformers has, and refusals that name the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from deltacompress.cli.main import main
from deltacompress.errors import InputError, UnsupportedModelError
from deltacompress.models.architectures import survey
from deltacompress.models.architectures.survey import Verdict, causal_types, default_config, saved_names
from deltacompress.models.architectures.trial import try_walk
from deltacompress.models.skeleton import Skeleton
from deltacompress.models.support import outline, read_decoder

AT_LEAST = 150
"""Of the causal types of transformers 5.23; each that is taken on raises it."""
BIDIRECTIONAL = ["bert", "big_bird", "electra", "megatron-bert", "roberta", "roformer", "xlm-roberta"]


def refuse(folder: Path, raw: dict[str, Any]) -> str:
    """What is said of a checkpoint with this config."""
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError) as refused:
        Skeleton.from_config(folder, [f"t{i}" for i in range(9)], device="cpu")
    return str(refused.value)


def test_every_type_is_judged(judged: Callable[[str], Verdict]) -> None:
    """No type ends in another error than a refusal, and none is refused without a reason."""
    verdicts = [judged(name) for name in causal_types()]
    assert len(verdicts) == len(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for one in verdicts:
        assert one.taken == (one.reason is None) == (one.linears > 0), one
        assert one.reason is None or (one.reason.strip() and "\n" not in one.reason and "/tmp" not in one.reason), one
    assert sum(one.taken for one in verdicts) >= AT_LEAST


@pytest.mark.parametrize(
    ("name", "linears"),
    [("llama", 14), ("bert", 12), ("phi3", 8), ("gpt_neox", 8), ("gpt2", 8), ("mamba", 6), ("bart", 12)],
)
def test_what_is_taken_is_counted(judged: Callable[[str], Verdict], name: str, linears: int) -> None:
    assert judged(name).linears == linears


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("blt", "made of several models (BltGlobalTransformer, BltLocalDecoder, BltLocalEncoder, BltPatcher)"),
        ("mllama", "'mllama_text_model' has layers that only images run (cross_attention_layers)"),
        ("git", "'git', run layer by layer, is not what it is run whole"),
        ("emu3", "transformers cannot make a model of it (AttributeError"),
        ("musicgen", "'musicgen' is multimodal, with several language models"),
        ("xlm", "'xlm' is bidirectional with causal false"),
        ("jetmoe", "what JetMoeForCausalLM runs depends on the values that it meets"),
        ("zaya", "ZayaForCausalLM changes the hidden states between its layers, or has several"),
        ("inkling2_text", "experts.gate_up_proj is made of tensors that transformers converts (Interleave)"),
        ("gemma4_assistant", "its default config is none (Class validation error"),
        ("cpmant", "CpmAntForCausalLM takes no hidden states in the place of tokens (inputs_embeds)"),
        ("gemma4_text", "'gemma4_text' embeds the tokens for each layer anew (hidden_size_per_layer_input)"),
        ("prophetnet", "ProphetNetForCausalLM changes the hidden states between its layers, or has several"),
        ("xlnet", "'xlnet' is bidirectional with attn_type 'bi'"),
        ("xmod", "what XmodForCausalLM runs depends on the values that it meets"),
    ],
)
def test_reasons(judged: Callable[[str], Verdict], name: str, reason: str) -> None:
    assert reason in (judged(name).reason or "taken")


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_an_encoder_is_refused_and_the_same_as_a_decoder_is_not(tmp_path: Path, name: str) -> None:
    raw = default_config(name)
    assert raw["is_decoder"] is True
    Skeleton.from_config(_written(tmp_path, raw), saved_names(raw, tmp_path / "config.json"), device="cpu")
    told = refuse(tmp_path, raw | {"is_decoder": False})
    assert f"'{name}' is bidirectional with is_decoder false" in told
    assert "--recipe lossless" in told
    raw.pop("is_decoder")
    assert "is bidirectional" in refuse(tmp_path, raw)


@pytest.mark.parametrize("name", ["gpt_neox", "trocr"])
def test_is_decoder_means_nothing_to_some(tmp_path: Path, name: str) -> None:
    raw = default_config(name) | {"is_decoder": False}
    assert saved_names(raw, _written(tmp_path, raw) / "config.json")


def test_gemma_as_an_embedding_model_is_refused(tmp_path: Path) -> None:
    told = refuse(tmp_path, default_config("gemma3_text") | {"use_bidirectional_attention": True})
    assert "use_bidirectional_attention True" in told


def test_a_type_with_two_kinds_of_layers_is_tried_on_both() -> None:
    assert default_config("gemma2")["layer_types"] == ["sliding_attention", "full_attention"]
    assert default_config("gemma3_text")["layer_types"] == ["sliding_attention", "full_attention"]
    assert default_config("llama")["num_hidden_layers"] == 2


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "architectures", "llama", "blt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["types"], found["taken"], found["refused"]) == (2, 1, 1)
    assert found["rows"][0] == {"model_type": "llama", "taken": True, "linears": 14, "reason": None}
    assert found["rows"][1]["reason"].startswith("BltForCausalLM is made of several models")
    assert main(["bench", "architectures", "llama", "blt"]) == 0
    assert "BltForCausalLM" in capsys.readouterr().out
    assert main(["bench", "architectures", "nix"]) == 2
    assert "no model type 'nix'" in capsys.readouterr().err


def test_an_unknown_type_is_told_before_any_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "judge", pytest.fail)
    with pytest.raises(InputError, match="leave it out to try all"):
        survey.run(["llama", "nix"])


def llama(folder: Path) -> Any:
    raw = default_config("llama")
    file = _written(folder, raw) / "config.json"
    return outline(read_decoder(raw, file, tensors=100), file, tensors=100)


def test_hidden_states_that_change_between_layers_are_seen_on_the_trial(tmp_path: Path) -> None:
    model = llama(tmp_path)
    assert try_walk(model, "model.layers", tmp_path / "config.json").width == 0
    model.model.layers[1].register_forward_pre_hook(lambda _module, args: (args[0] * 1, *args[1:]))
    with pytest.raises(UnsupportedModelError, match="changes the hidden states between its layers"):
        try_walk(model, "model.layers", tmp_path / "config.json")


@pytest.mark.parametrize("change", [lambda hidden: hidden[0], lambda hidden: hidden.repeat(1, 2, 1)])
def test_one_state_a_token_is_what_a_layer_takes(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    model = llama(tmp_path)
    model.model.layers[0].register_forward_pre_hook(lambda _module, args: (change(args[0]), *args[1:]))
    with pytest.raises(UnsupportedModelError, match="has several for a token"):
        try_walk(model, "model.layers", tmp_path / "config.json")


def _written(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
