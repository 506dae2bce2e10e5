"""Pairing: one test per rule of the module, and the guarantee that no fine-tuned tensor is ever dropped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltacompress.checkpoints.pairing import Pairing, TensorPair, is_embedding, is_head, pair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import PairError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
Tensors = dict[str, torch.Tensor]


def llama(rows: int = 6, *, head: bool = True, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    shapes = {EMBED: (rows, 4), "model.layers.0.mlp.up_proj.weight": (8, 4), "model.norm.weight": (4,)}
    if head:
        shapes[HEAD] = (rows, 4)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def save(root: Path, tensors: Tensors, **config: Any) -> Checkpoint:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    save_file(tensors, root / "model.safetensors")
    settled = {k: v for k, v in {**LLAMA, **config}.items() if v is not None}
    (root / "config.json").write_text(json.dumps(settled))
    return Checkpoint.open(root)


def assert_one_line(error: Exception) -> None:
    assert "\n" not in str(error)


class Pairer:
    """Saves a base and a fine-tuned model, pairs them, and checks what must hold for every pairing."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self, base: Tensors, finetuned: Tensors, base_config: dict[str, Any] | None = None, **config: Any
    ) -> Pairing:
        a = save(self.root / "base", base, **(config if base_config is None else base_config))
        b = save(self.root / "finetuned", finetuned, **config)
        pairing = pair(a, b)
        assert [p.info for p in pairing.pairs] == list(b.tensors.values())
        for p in pairing.pairs:
            assert (p.base_name is not None) == (p.status == "paired")
            assert (p.alias_of is not None) == (p.status == "alias")
            old, new = pairing.read(p)
            assert torch.equal(new, finetuned[p.info.name])
            assert new.dtype == finetuned[p.info.name].dtype
            if p.base_name is None:
                assert old is None
            else:
                assert old is not None
                whole = base[p.base_name].to(old.dtype)
                assert torch.equal(old, whole if p.base_rows is None else whole[: p.base_rows])
                assert old.shape[1:] == new.shape[1:]
        assert all("\n" not in note for note in pairing.notes)
        return pairing


@pytest.fixture
def do(tmp_path: Path) -> Pairer:
    return Pairer(tmp_path)


def get(pairing: Pairing, name: str) -> TensorPair:
    return next(p for p in pairing.pairs if p.info.name == name)


def test_same_names_and_shapes(do: Pairer) -> None:
    pairing = do(llama(), llama(seed=1))
    assert {(p.info.name, p.base_name, p.status, p.base_rows) for p in pairing.pairs} == {
        (name, name, "paired", None) for name in llama()
    }
    assert pairing.notes == ()


@pytest.mark.parametrize("a", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("b", [torch.float16, torch.bfloat16, torch.float32])
def test_float_dtypes_mix_and_the_base_comes_in_fp32(do: Pairer, a: torch.dtype, b: torch.dtype) -> None:
    pairing = do(llama(dtype=a), llama(dtype=b))
    for p in pairing.pairs:
        old, new = pairing.read(p)
        assert old is not None
        assert (old.dtype, new.dtype) == (torch.float32, b)
    assert len(pairing.notes) == (a != b)
    assert all("4 tensors are" in note and "fp32" in note for note in pairing.notes)


# --- vocabulary


@pytest.mark.parametrize(("base_rows", "rows"), [(6, 9), (9, 6)])
def test_vocabulary_growth_and_shrinkage(do: Pairer, base_rows: int, rows: int) -> None:
    pairing = do(llama(base_rows), llama(rows, seed=1))
    for name in (EMBED, HEAD):
        assert get(pairing, name) == TensorPair(pairing.finetuned.tensors[name], name, "paired", 6)
    assert len(pairing.notes) == 2
    assert all("the first 6" in note for note in pairing.notes)


@pytest.mark.parametrize("name", [
    "gpt_neox.embed_in.weight", "embed_out.weight", "transformer.wte.weight", "wte.weight", "output.weight",
    "transformer.word_embeddings.weight", "language_model.model.embed_tokens.weight", "language_model.lm_head.weight",
    "lm_head.bias",
])  # fmt: skip
def test_every_spelling_of_embedding_and_head_may_grow(do: Pairer, name: str) -> None:
    assert is_embedding(name) != is_head(name)
    columns = () if name.endswith("bias") else (4,)
    pairing = do({name: torch.ones(6, *columns)}, {name: torch.ones(8, *columns)})
    assert get(pairing, name).base_rows == 6


@pytest.mark.parametrize("name", [
    "model.layers.0.attention.output.weight", "transformer.wpe.weight", "model.embed_tokens_per_layer.weight",
    "word_embeddings_layernorm.weight", "model.layers.0.mlp.up_proj.weight", "my_lm_head.weight", "model.xwte.weight",
])  # fmt: skip
def test_nothing_else_may_grow(do: Pairer, name: str) -> None:
    assert not is_embedding(name)
    assert not is_head(name)
    with pytest.raises(PairError, match=rf"{name}: shape \[8, 4\] fine-tuned but \[6, 4\] in the base"):
        do({name: torch.ones(6, 4)}, {name: torch.ones(8, 4)})


@pytest.mark.parametrize("shape", [(6, 5), (9, 5), (6,), (6, 4, 1)])
def test_embeddings_of_another_width(do: Pairer, shape: tuple[int, ...]) -> None:
    with pytest.raises(PairError, match=r"embed_tokens\.weight: shape"):
        do(llama(), llama() | {EMBED: torch.ones(shape, dtype=torch.bfloat16)})


# --- tied heads


@pytest.mark.parametrize("config", [
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": None, "model_type": "gemma2"},  # ties when the config is silent
    {"tie_word_embeddings": None, "model_type": "llava", "text_config": {"tie_word_embeddings": True}},
])  # fmt: skip
@pytest.mark.parametrize("rows", [6, 8])
def test_tied_base_untied_finetuned(do: Pairer, config: dict[str, Any], rows: int) -> None:
    pairing = do(llama(head=False), llama(rows, seed=1), base_config=config, **config)
    assert get(pairing, HEAD) == TensorPair(pairing.finetuned.tensors[HEAD], EMBED, "paired", 6 if rows == 8 else None)
    assert any(HEAD in note and "tied" in note for note in pairing.notes)


def test_a_head_over_a_tied_base_with_two_embeddings(do: Pairer) -> None:
    """Which of them it is tied to is not known, so it is stored whole."""
    second = {"model.wte.weight": torch.ones(6, 4, dtype=torch.bfloat16)}
    pairing = do(llama(head=False) | second, llama(seed=1) | second, tie_word_embeddings=True)
    assert get(pairing, HEAD).status == "added"


@pytest.mark.parametrize("tie", [False, None])
def test_untied_base_without_a_head(do: Pairer, tie: bool | None) -> None:
    pairing = do(llama(head=False), llama(seed=1), tie_word_embeddings=tie)  # a silent llama config means untied
    assert get(pairing, HEAD).status == "added"


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"tie_word_embeddings": None, "model_type": "gemma"}]
)
def test_tied_finetuned_untied_base(do: Pairer, config: dict[str, Any]) -> None:
    pairing = do(llama(), llama(head=False), **config)
    assert any(HEAD in note and "nothing to store" in note for note in pairing.notes)


@pytest.mark.parametrize("tie", [False, None])
def test_untied_finetuned_that_lost_its_head(do: Pairer, tie: bool | None) -> None:
    with pytest.raises(PairError, match=r"tensor lm_head\.weight of the base is missing"):
        do(llama(), llama(head=False), tie_word_embeddings=tie)


def test_a_tied_model_that_lost_its_head_bias(do: Pairer) -> None:
    with pytest.raises(PairError, match=r"lm_head\.bias"):
        do(llama() | {"lm_head.bias": torch.ones(6)}, llama(), tie_word_embeddings=True)


def test_both_sides_tied(do: Pairer) -> None:
    pairing = do(llama(head=False), llama(head=False, seed=1), tie_word_embeddings=True)
    assert pairing.notes == ()


@pytest.mark.parametrize("base_head", [False, True])
def test_head_stored_twice_becomes_an_alias(do: Pairer, base_head: bool) -> None:
    tuned = llama(8, seed=1)
    tuned[HEAD] = tuned[EMBED].clone()
    pairing = do(llama(head=base_head), tuned, tie_word_embeddings=True)
    assert get(pairing, HEAD) == TensorPair(pairing.finetuned.tensors[HEAD], None, "alias", alias_of=EMBED)
    assert get(pairing, EMBED).base_name == EMBED


def test_only_bitwise_equality_makes_an_alias(do: Pairer) -> None:
    tuned = llama(seed=1)
    for twist in (
        lambda t: t.float(),  # same values, another dtype
        lambda t: torch.cat([t, t[:1]]),  # one row more
        lambda t: t + torch.tensor([[2.0**-7]], dtype=t.dtype),
    ):
        tuned[HEAD] = twist(tuned[EMBED])
        assert get(do(llama(), tuned, tie_word_embeddings=True), HEAD).status == "paired"
    tuned[EMBED] = torch.zeros(6, 4)
    tuned[HEAD] = -torch.zeros(6, 4)  # equal, but not the same bits
    assert get(do(llama(), tuned, tie_word_embeddings=True), HEAD).status == "paired"


# --- extra and missing tensors


def test_extra_tensor_is_added(do: Pairer) -> None:
    pairing = do(llama(), llama(seed=1) | {"score.weight": torch.ones(2, 4)})
    assert get(pairing, "score.weight") == TensorPair(pairing.finetuned.tensors["score.weight"], None, "added")
    assert pairing.notes == ("score.weight is not in the base: stored whole",)


def test_missing_tensors_are_named(do: Pairer) -> None:
    tuned = llama(seed=1)
    del tuned["model.norm.weight"]
    with pytest.raises(PairError, match=r"finetuned: tensor model\.norm\.weight of the base is missing"):
        do(llama(), tuned)
    del tuned["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(PairError, match=r"up_proj\.weight and 1 more"):
        do(llama(), tuned)


BUFFERS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
    "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
    "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_old_buffers(do: Pairer, name: str) -> None:
    buffer = {name: BUFFERS[name]}
    base_only = do(llama() | buffer, llama())
    assert [name in note and "buffer" in note for note in base_only.notes] == [True]
    assert get(do(llama(), llama() | buffer), name).status == "added"
    assert get(do(llama() | buffer, llama() | buffer), name).status == "paired"
    other = {name: BUFFERS[name].to(torch.int32)}  # old and new versions disagree on the mask's dtype
    assert get(do(llama() | buffer, llama() | other), name).status == "added"


def test_a_trained_attention_bias_is_no_buffer(do: Pairer) -> None:
    with pytest.raises(PairError, match=r"attention\.bias of the base is missing"):
        do(llama() | {"model.layers.0.attention.bias": torch.ones(4)}, llama())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_exact_dtypes_keep_their_dtype(do: Pairer, dtype: torch.dtype) -> None:
    extra = {"ids": torch.tensor([1, 0, 1]).to(dtype)}
    pairing = do(llama() | extra, llama() | extra)
    old, new = pairing.read(get(pairing, "ids"))
    assert old is not None
    assert old.dtype == new.dtype == dtype
    for other in (torch.int32, torch.float32):
        with pytest.raises(PairError, match=r"ids: .* fine-tuned but .* in the base"):
            do(llama() | extra, llama() | {"ids": torch.tensor([1, 0, 1]).to(other)})


def test_large_integers_survive_reading(do: Pairer) -> None:
    extra = {"ids": torch.tensor([2**53 + 1])}
    pairing = do(llama() | extra, llama() | extra)
    old, _ = pairing.read(get(pairing, "ids"))
    assert old is not None
    assert old.item() == 2**53 + 1


# --- prefixes


@pytest.mark.parametrize("prefix", ["model.", "transformer.", "gpt_neox."])
def test_base_saved_from_the_bare_model(do: Pairer, prefix: str) -> None:
    bare = {name.removeprefix("model."): t for name, t in llama(head=False).items()}
    full = {prefix + name: t * 2 for name, t in bare.items()}
    headless = {"architectures": ["LlamaModel"], "tie_word_embeddings": True}
    tied = do(bare, full | {HEAD: torch.ones(6, 4)}, base_config=headless)
    assert get(tied, f"{prefix}norm.weight").base_name == "norm.weight"
    assert get(tied, HEAD).base_name == "embed_tokens.weight"
    assert any("prefix" in note for note in tied.notes)
    back = do(full | {HEAD: torch.ones(6, 4)}, bare, tie_word_embeddings=True)
    assert get(back, "norm.weight").base_name == f"{prefix}norm.weight"


def test_a_prefix_must_match_everything(do: Pairer) -> None:
    bare = {name.removeprefix("model."): t for name, t in llama(head=False).items()}
    with pytest.raises(PairError, match="of the base is missing"):
        do(bare | {"odd": torch.ones(1)}, llama())


def test_nothing_in_common(do: Pairer) -> None:
    with pytest.raises(PairError, match="no tensor in common"):
        do({"x.rotary_emb.inv_freq": torch.ones(2)}, llama())


# --- configs


@pytest.mark.parametrize(("change", "said"), [
    ({"model_type": "qwen2"}, "model_type qwen2, the base .* has llama"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"hidden_size": 8}, "hidden_size 8, the base .* has 4"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2, the base .* has 1"),
    ({"hidden_size": None, "n_embd": 8}, "hidden_size 8"),
    ({"hidden_size": None, "text_config": {"hidden_size": 8}}, "hidden_size 8"),
])  # fmt: skip
def test_config_is_told_before_any_tensor(do: Pairer, change: dict[str, Any], said: str) -> None:
    with pytest.raises(PairError, match=said):
        do(llama(), {"another": torch.ones(3)}, base_config={}, **change)


def test_configs_that_say_nothing_do_not_object(do: Pairer) -> None:
    silent = dict.fromkeys(["model_type", "architectures", "hidden_size", "num_hidden_layers"])
    do(llama(), llama(), base_config=silent)
    do(llama(), llama(), base_config={"architectures": ["LlamaModel"]})


def test_families_left_untied_agree_with_transformers() -> None:
    from transformers import CONFIG_MAPPING

    from deltacompress.checkpoints.configs import _UNTIED

    known = {name: getattr(CONFIG_MAPPING[name], "tie_word_embeddings", None) for name in _UNTIED}
    assert known == dict.fromkeys(_UNTIED, False)
    assert CONFIG_MAPPING["gemma2"].tie_word_embeddings is True


# --- the guarantee

pool = [EMBED, HEAD, "a.weight", "b.bias", "x.rotary_emb.inv_freq", "lm_head.bias", "output.weight"]
tensor_plan = st.dictionaries(
    st.sampled_from(pool),
    st.tuples(
        st.sampled_from([(6, 4), (8, 4), (4,), (6,)]), st.sampled_from([torch.float32, torch.bfloat16, torch.int32])
    ),
    min_size=1,
)


@settings(max_examples=150, deadline=None)
@given(base=tensor_plan, tuned=tensor_plan, tie=st.sampled_from([True, False, None]), same=st.booleans())
def test_every_tensor_is_paired_once_or_the_pair_is_refused(
    tmp_path_factory: pytest.TempPathFactory, base: Any, tuned: Any, tie: bool | None, same: bool
) -> None:
    def make(plan: Any) -> Tensors:
        return {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in plan.items()}

    do = Pairer(tmp_path_factory.getbasetemp() / "guarantee")
    try:
        pairing = do(make(base), make({**base, **tuned} if same else tuned), tie_word_embeddings=tie)  # checks the rest
    except PairError as error:
        assert_one_line(error)
        return
    used = {p.base_name for p in pairing.pairs}
    for name in base:
        assert name in used or name in tuned or any(name in note for note in pairing.notes)
