"""Which modules a config means: as PEFT reads it, for all that is read here; expressions are refused, never run."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace

import pytest

from deltacompress.adapters.patterns import Pattern, layer_of, of_module
from deltacompress.adapters.settings import AdapterConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
    from peft.utils.other import get_pattern_key

MODULES = [
    *("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.10.mlp.q_proj"),
    *("lm_head", "q_proj", "model.embed_tokens", "a.layers.1.experts.0.q_proj", "modelXlayers.1.q-proj"),
    *("h.1.a.q_proj", "layers.1.q_proj", "model.decoder.blocks.1.3.q_proj"),
]
KEYS = [
    *("q_proj", "proj", "self_attn.q_proj", r"self_attn\.q_proj", "^q_proj", r"^model\.layers\.1\.self_attn\.q_proj"),
    *("layers.1.self_attn.q_proj", "odel.layers.1.self_attn.q_proj", r".*\.q_proj", "q_proj$", "lm_head"),
    *(r".*\.lm_head", "layers.1.q-proj", r"layers.1.q\-proj", "model.layers.1.q-proj", "self_attn_q_proj", "x.lm_head"),
    "..q_proj",
]


def test_the_first_key_that_fits_is_pefts() -> None:
    draw = random.Random(0)
    for _ in range(500):
        keys = draw.sample(KEYS, 3)
        for module in MODULES:
            found = of_module({key: key for key in keys}, module, module)
            assert found == get_pattern_key(keys, module), (keys, module)


@pytest.mark.parametrize(
    "key",
    [
        *("(a+)+$", ".*", "q|v", "[qv]_proj", "q_proj*", "q.+", "q{2}", "(q_proj)", r"\d", r"layers\.\d+\.q", r"a\b"),
        *("", "^", "$", ".*\\.", "q\\", "q proj", "a^b", "a$b", "q?", r"^.*\.q", "a" * 2000, r"q\.$\$a"),
    ],
)
def test_expressions_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is an expression, and none out of a file is run") as error:
        Pattern(key)
    assert len(str(error.value)) < 200


def test_targets_are_pefts() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        targets = draw.sample(["q_proj", "lm_head", "self_attn.q_proj", "embed_tokens", "layers.1.q_proj"], 2)
        excluded = draw.choice([[], ["lm_head"], ["layers.1.self_attn.q_proj"], ["q_proj"]])
        layers = draw.choice([None, [0], [1], [0, 1], [3, 10]])
        lists = draw.choice([[], ["layers"], ["h", "layers"], ["blocks"]]) if layers else []
        saved = draw.choice([[], ["lm_head"], ["model.layers.0"]])
        of_peft = SimpleNamespace(
            target_modules=set(targets),
            exclude_modules=excluded,
            modules_to_save=saved,
            layers_to_transform=layers,
            layers_pattern=lists,
            target_parameters=None,
        )
        ours = AdapterConfig(
            "lora",
            targets=tuple(targets),
            excluded=tuple(excluded),
            saved=tuple(saved),
            layers=None if layers is None else tuple(layers),
            lists=tuple(lists),
        )
        for module in MODULES:
            found = check_target_module_exists(of_peft, module)
            wanted = bool(found) and not isinstance(found, _ExcludedModule)
            assert ours.is_target(module) == wanted, (of_peft, module)


def test_layers() -> None:
    assert layer_of("model.layers.3.mlp.experts.5.up", ()) == 3
    assert layer_of("model.layers.3.mlp.experts.5.up", ("experts",)) == 5
    assert layer_of("layers.3.mlp.up", ()) is None  # PEFT asks for two parts in front, without names of lists
    assert layer_of("layers.3.mlp.up", ("layers",)) == 3
    assert layer_of("model.layers.3", ()) is None
    assert layer_of("lm_head", ()) is None


def test_rosa_takes_one_key_for_all_three_patterns() -> None:
    settings = AdapterConfig(
        "rosa",
        rank=4,
        ranks={"q_proj": 2},
        alpha=8.0,
        alphas={"self_attn.q_proj": 100.0, "v_proj": 6.0, "lm_head": 1.0},
        density=0.5,
        densities={"v_proj": 0.25},
    )
    at = "model.layers.0.self_attn."
    assert (settings.rank_of(at + "q_proj"), settings.scale_of(at + "q_proj")) == (2, 4.0)  # alpha stays 8
    assert (settings.scale_of(at + "v_proj"), settings.density_of(at + "v_proj")) == (1.5, 0.25)
    assert settings.density_of(at + "k_proj") == 0.5
    assert settings.scale_of("lm_head") == 0.25  # its whole name is looked up as it is
    assert settings.rank_of("q_proj") == 2
