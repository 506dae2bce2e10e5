"""Adapters over fine-tuned models whose embedding and head are not the base's: more rows, fewer, a few that changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import peft_models
import pytest
import torch
from pairs import Pair, changed, weights_of
from runtime.test_vocabulary import few_rows, load_base_rows, resized, untie
from runtime_cases import Served, assert_close, oracle_logits, random_ids, serve
from tolerances import UNMERGED

from deltacompress.errors import UnsupportedModelError
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import Batch
from deltacompress.runtime.modules.linear import DecoupledLinear
from deltacompress.runtime.variants.delta import DeltaVariant
from deltacompress.runtime.variants.precision import Numerics

MODELS = {
    "grown": ("llama", resized(101), {"vocab_size": 101}),
    "shrunk": ("llama", resized(90), {"vocab_size": 90}),
    "few rows": ("llama", few_rows, {}),
    "tied, grown": ("qwen2-tied", resized(101), {"vocab_size": 101}),
    "tied base, own head": ("qwen2-tied", untie, {"tie_word_embeddings": False}),
}
TABLES = ["q_proj", "embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def models(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    made = {}
    for name, (architecture, change, config) in MODELS.items():
        root, pair = tmp_path_factory.mktemp("vocabulary"), make_pair(architecture)
        load_base_rows[:] = [weights_of(pair.base)]
        made[name] = serve(changed(pair, root, change, **config), root, "int2-24")
    return made


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_matrices_beside_tables(models: dict[str, Served], tmp_path: Path, name: str, dora: bool) -> None:
    one = models[name]
    tied = name == "tied, grown"  # matrices beside a head would be beside the embedding's own tensor
    targets = TABLES[:2] if tied else TABLES
    path = peft_models.write(one.restored, tmp_path / "a", "Lora", r=3, use_dora=dora, target_modules=targets)
    runtime = Runtime.from_base(one.pair.base)
    runtime.load(one.artifact, "delta")
    runtime.load(path, "a", over="delta")
    vocabulary = MODELS[name][2].get("vocab_size", 96)
    ids = [*random_ids(7, vocabulary=vocabulary), vocabulary - 1]
    for request, found in zip(
        ("a", "delta", "a"), runtime.logits([(n, ids) for n in ("a", "delta", "a")]), strict=True
    ):
        if request == "a":
            wanted = peft_models.logits(peft_models.model_of(one.restored, path), ids)
        else:
            wanted = oracle_logits(one.restored, ids)
        assert_close(found, wanted, UNMERGED.value)


@pytest.mark.parametrize("rounding", [True, False, "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_delta_knows_the_weights_that_it_serves(
    models: dict[str, Served], name: str, rounding: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of DoRA are taken of them: what a linear makes of the identity is its weight."""
    one = models[name]
    if rounding == "packed":
        monkeypatch.setattr(Numerics, "kernels", property(lambda self: self.backend))
    runtime = Runtime.from_base(one.pair.base, merge_rounding=rounding is True)
    runtime.load(one.artifact, "delta")
    loaded, restored, looked_at = runtime.variants["delta"], weights_of(one.restored), 0
    assert isinstance(loaded.variant, DeltaVariant)
    with torch.inference_mode(), runtime.model.serving(Batch([loaded.slot], torch.device("cpu"))):
        for path, module in runtime.model.model.named_modules():
            place = loaded.variant.layout.places.get(f"{path}.weight")
            if isinstance(module, DecoupledLinear):
                module.group = None
                x = torch.cat([torch.zeros(1, module.in_features), torch.eye(module.in_features)])
                y = module(x[None])[0]
                served = (y[1:] - y[0]).T
            elif isinstance(module, torch.nn.Embedding):
                served = module(torch.arange(loaded.variant.vocabulary(f"{path}.weight"))[None])[0]
            else:
                continue
            assert place is not None
            looked_at += 1
            found = loaded.variant.weight(f"{path}.weight")
            torch.testing.assert_close(found.float(), served[: found.shape[0]], rtol=1e-5, atol=1e-6)
            whole = loaded.variant.weight(f"{path}.weight", restored=True)
            assert torch.equal(whole.float(), restored[place.name].float())
    assert looked_at == 2 * 7 + 2


TIED: dict[str, tuple[str, dict[str, object]]] = {
    "matrices beside the embedding": ("Lora", {"target_modules": ["q_proj", "embed_tokens"]}),
    "with magnitudes": ("Lora", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "matrices beside the head": ("Lora", {"target_modules": ["q_proj", "lm_head"]}),
    "a rotation before the head": ("BOFT", {"target_modules": ["q_proj", "lm_head"], "boft_block_size": 8}),
}


def stored_twice(base: Path, root: Path) -> Path:
    """The same tied model, whose file has the head, too."""
    made = shutil.copytree(base, root / "twice")
    tensors = peft_models.load_file(made / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    peft_models.save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_a_table_that_two_share_grows_for_both(
    make_pair: Callable[..., Pair], tmp_path: Path, name: str, twice: bool
) -> None:
    """PEFT saves the one that has matrices; the other one is the same tensor in the model."""
    pair, (kind, config) = make_pair("qwen2-tied"), TIED[name]
    base = stored_twice(pair.base, tmp_path) if twice else pair.base
    path = peft_models.write(base, tmp_path / "a", kind, vocabulary=99, **config)
    runtime = Runtime.from_base(base)
    runtime.load(path, "a")
    ids = [*random_ids(7), 97, 98]
    found, plain = runtime.logits([("a", ids), (None, ids[:7])])
    assert_close(found, peft_models.logits(peft_models.model_of(base, path, 99), ids), UNMERGED.value)
    assert found.shape[1] == 99
    assert_close(plain, oracle_logits(base, ids[:7]))


def test_a_table_that_two_share_and_that_was_changed_before_training(
    make_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = make_pair("qwen2-tied")
    path = peft_models.write(
        pair.base, tmp_path / "a", "Lora", vocabulary=96, target_modules=["q_proj", "embed_tokens"]
    )
    name = "base_model.model.model.embed_tokens.base_layer.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {name: tensors[name].flip(0).contiguous()}

    peft_models.change(path, edit)
    runtime = Runtime.from_base(pair.base)
    runtime.load(path, "a")
    ids = random_ids(7)
    assert_close(
        runtime.logits([("a", ids)])[0], peft_models.logits(peft_models.model_of(pair.base, path), ids), UNMERGED.value
    )


def test_rows_of_a_table_that_is_stored_twice(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    base = stored_twice(make_pair("qwen2-tied").base, tmp_path)
    config = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2, 3]}
    path = peft_models.write(base, tmp_path / "a", "Lora", **config)
    runtime = Runtime.from_base(base)
    runtime.load(path, "a")
    ids = [1, *random_ids(5), 3]
    assert_close(
        runtime.logits([("a", ids)])[0], peft_models.logits(peft_models.model_of(base, path), ids), UNMERGED.value
    )


def test_a_head_that_writes_what_no_embedding_reads_is_refused(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair("llama")
    path = peft_models.write(pair.base, tmp_path / "a", "Lora", vocabulary=99, target_modules=["q_proj", "lm_head"])
    runtime = Runtime.from_base(pair.base)
    with pytest.raises(
        UnsupportedModelError, match=r"head has 99 rows, its embedding 96: .*save the embedding with it"
    ):
        runtime.load(path, "a")
    assert not runtime.variants
    both = peft_models.write(pair.base, tmp_path / "b", "Lora", vocabulary=99, target_modules=TABLES)
    runtime.load(both, "b")
