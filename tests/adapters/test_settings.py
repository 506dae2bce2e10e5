"""The config of an adapter: what makes it more than plain matrices is refused by name, and everything unknown."""

from __future__ import annotations

from typing import Any

import pytest

from deltacompress.adapters.fields import FIELDS
from deltacompress.adapters.settings import AdapterConfig, parse_settings
from deltacompress.errors import CheckpointError

SHARED: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama"},
    "base_model_name_or_path": "acme/llama",
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "modules_to_save": None,
    "peft_version": "0.21.2",
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": None,
}
LORA = SHARED | {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "monteclora_config": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 2,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
BOFT = SHARED | {
    "boft_block_num": 0,
    "boft_block_size": 4,
    "boft_dropout": 0.0,
    "boft_n_butterfly_factor": 1,
    "init_weights": True,
    "peft_type": "BOFT",
}
"""What PEFT 0.21.2 saves of LoraConfig() and BOFTConfig()."""

OFF = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3, "router_temperature": 1.0},
    "ensure_weight_tying": True,
    "kasa_config": {"beta": 1e-4, "gamma": 1e-3},
    "layer_replication": [[0, 2], [1, 2]],
    "loftq_config": {"loftq_bits": 4, "loftq_iter": 1},
    "megatron_config": {"hidden_size": 8},
    "monteclora_config": {"num_samples": 8},
    "target_parameters": ["self_attn.q_proj.weight"],
    "use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 4},
}
"""What PEFT 0.21.2 saves of the others (arrow_config, loftq_config and megatron_config: as its classes have them)."""


@pytest.mark.parametrize("saved", [LORA, BOFT], ids=["lora", "boft"])
def test_what_peft_saves_by_default_is_plain_and_every_field_of_it_is_known(saved: dict[str, Any]) -> None:
    kind = saved["peft_type"].lower()
    known = FIELDS[kind]
    assert saved.keys() | {"runtime_config"} >= {*known.read, *known.inert, *known.off} >= saved.keys()
    assert parse_settings(saved, "c").kind == kind


@pytest.mark.parametrize("name", OFF)
def test_a_field_that_asks_for_more_is_refused_by_name(name: str) -> None:
    assert OFF.keys() == FIELDS["lora"].off.keys()
    with pytest.raises(
        CheckpointError, match=rf"^c: {name} is set, which makes it no plain lora \(.+\); it|merge"
    ) as error:
        parse_settings(LORA | {name: OFF[name]}, "c")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("beginning", "called", "way_out"),
    [
        ("pissa", "PiSSA", "path_initial_model_for_weight_conversion"),
        ("pissa_niter_4", "PiSSA", "path_initial_model_for_weight_conversion"),
        ("olora", "OLoRA", "path_initial_model_for_weight_conversion"),
        ("OLoRA", "OLoRA", "path_initial_model_for_weight_conversion"),
        ("corda", "CorDA", "path_initial_model_for_weight_conversion"),
        ("lora_ga", "LoRA-GA", "path_initial_model_for_weight_conversion"),
        ("loftq", "LoftQ", "merge it"),
    ],
)
def test_matrices_that_began_in_the_base_are_refused_with_the_conversion(
    beginning: str, called: str, way_out: str
) -> None:
    told = rf"^c: init_lora_weights is '{beginning}': {called} changes the weights of the base, .*{way_out}"
    with pytest.raises(CheckpointError, match=told):
        parse_settings(LORA | {"init_lora_weights": beginning}, "c")


@pytest.mark.parametrize("beginning", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_other_beginnings_leave_the_base_as_it_is(beginning: object) -> None:
    assert parse_settings(LORA | {"init_lora_weights": beginning}, "c").rank == 2


def test_what_is_left_of_a_conversion_is_plain() -> None:
    """PEFT leaves the config of the beginning in place, and sets the beginning itself to the default."""
    for name in ("corda_config", "lora_ga_config", "eva_config"):
        assert parse_settings(LORA | {name: {"scale": "stable"}}, "c").rank == 2


@pytest.mark.parametrize("kind", [LORA, BOFT], ids=["lora", "boft"])
def test_an_unknown_field_is_refused_unless_it_says_nothing(kind: dict[str, Any]) -> None:
    for nothing in (None, False, "", [], {}):
        parse_settings(kind | {"use_tomorrow": nothing}, "c")
    for value in (True, 0, 1, 0.5, "x", [0], {"a": None}):
        with pytest.raises(CheckpointError, match=r"^c: 'use_tomorrow' is set.*upgrade deltacompress"):
            parse_settings(kind | {"use_tomorrow": value}, "c")
    with pytest.raises(CheckpointError, match=r"init_lora_weights is 'tomorrow', which this program does not know"):
        parse_settings(LORA | {"init_lora_weights": "tomorrow"}, "c")
    with pytest.raises(CheckpointError, match="'use_dora' is set, and no field of boft"):
        parse_settings(BOFT | {"use_dora": True}, "c")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("fan_in_fan_out", "false", "must be true or false"),
        ("use_rslora", 1, "must be true or false"),
        ("lora_bias", "yes", "must be true or false"),
        ("lora_alpha", "16", "must be a number"),
        ("lora_alpha", True, "must be a number"),
        ("lora_alpha", float("nan"), "must be a number"),
        ("lora_alpha", 10**400, "must be a number"),
        ("alpha_pattern", {"q_proj": "3"}, "must map module names to numbers"),
        ("alpha_pattern", [["q_proj", 3]], "must map module names to numbers"),
        ("rank_pattern", {"q_proj": 0}, "must map module names to ranks"),
        ("rank_pattern", {"q_proj": True}, "must map module names to ranks"),
        ("bias", "boft_only", "none, all or lora_only"),
        ("bias", None, "none, all or lora_only"),
        ("r", 0, "at least 1"),
        ("r", 1 << 21, "must be a whole number from 0 to 1048576, found 2097152; mend it there, or save"),
        ("r", "8", "found '8'; mend it there"),
        ("lora_alpha", 1e300, "must be a number below 1e30, found 1e[+]300; mend it"),
        ("modules_to_save", "lm_head", "must be a list"),
        ("modules_to_save", [""], "must be a list"),
        ("target_modules", None, "must be text or a list"),
    ],
)
def test_fields_that_are_read_are_checked(name: str, value: object, told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^c: {name} .*{told}"):
        parse_settings(LORA | {name: value}, "c")


def test_what_a_config_leaves_out_is_what_peft_takes() -> None:
    """The defaults of LoraConfig and BOFTConfig."""
    targets = {"target_modules": ["q_proj"]}
    lora = parse_settings({"peft_type": "LORA"} | targets, "c")
    assert lora == AdapterConfig("lora", rank=8, alpha=8.0, targets=("q_proj",))
    boft = parse_settings({"peft_type": "BOFT"} | targets, "c")
    assert boft == AdapterConfig("boft", factors=1, block=4, blocks=0, targets=("q_proj",))


def test_what_is_read() -> None:
    given = {"r": 3, "lora_alpha": 12, "use_rslora": True, "lora_bias": True, "fan_in_fan_out": True}
    given |= {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 6.5}, "modules_to_save": ["lm_head"]}
    assert parse_settings(LORA | given, "c") == AdapterConfig(
        "lora",
        rank=3,
        ranks={"v_proj": 4},
        alpha=12.0,
        alphas={"v_proj": 6.5},
        rslora=True,
        biased=True,
        targets=("q_proj", "v_proj"),
        saved=("lm_head",),
        transposed=True,
    )
    rotated = {
        "bias": "boft_only",
        "boft_block_size": 0,
        "boft_block_num": 8,
        "boft_n_butterfly_factor": 2,
        "target_modules": "all-linear",
    }
    assert parse_settings(BOFT | rotated, "c") == AdapterConfig(
        "boft", targets="all-linear", biases="targets", factors=2, block=0, blocks=8
    )


SHIRA = {
    name: value
    for name, value in SHARED.items()
    if name not in ("bias", "exclude_modules", "layers_pattern", "layers_to_transform")
} | {"init_weights": True, "mask_type": "random", "peft_type": "SHIRA", "r": 32, "random_seed": None}
"""What PEFT 0.21.2 saves of ShiraConfig()."""


def test_what_peft_saves_of_shira_by_default() -> None:
    known = FIELDS["shira"]
    assert {*known.read, *known.inert, *known.off} == SHIRA.keys()
    assert parse_settings(SHIRA, "c") == AdapterConfig("shira", rank=32, targets=("q_proj", "v_proj"))


def test_the_defaults_of_rosa() -> None:
    """Those of the fork of its authors."""
    found = parse_settings({"peft_type": "ROSA", "target_modules": ["q_proj"]}, "c")
    assert found == AdapterConfig("rosa", rank=8, alpha=8.0, density=0.003, targets=("q_proj",))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("OFT", "OFT, whose rotations"),
        ("ADALORA", "AdaLoRA, whose"),
        ("TRAINABLE_TOKENS", "rows of the embedding alone"),
    ],
)
def test_kinds_that_sound_alike_are_refused(kind: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"peft_type '{kind}' \({told}.*; read are LORA, .*merge it") as error:
        parse_settings(SHARED | {"peft_type": kind}, "c")
    assert error.value.way_out


def test_a_config_of_no_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="c: has no peft_type"):
        parse_settings({"r": 8, "target_modules": ["q_proj"]}, "c")


def test_a_kind_in_small_letters_is_none_to_peft() -> None:
    with pytest.raises(CheckpointError, match="c: peft_type 'lora' is none to PEFT; write 'LORA'"):
        parse_settings(SHARED | {"peft_type": "lora"}, "c")


def test_where_an_adapter_acts() -> None:
    given = {"layers_to_transform": 3, "layers_pattern": "h", "exclude_modules": ["a"], "use_dora": True}
    found = parse_settings(LORA | given | {"trainable_token_indices": [4, 2]}, "c")
    assert (found.layers, found.lists, found.excluded, found.dora, found.tokens) == (
        *((3,), ("h",), ("a",), True),
        {"": (4, 2)},
    )
    for nothing in (None, []):
        assert parse_settings(LORA | {"layers_to_transform": nothing}, "c").layers is None
    by_name = parse_settings(LORA | {"trainable_token_indices": {"wte": [0], "lm_head": [1]}}, "c")
    assert by_name.tokens == {"wte": (0,), "lm_head": (1,)}
    assert parse_settings(LORA | {"exclude_modules": r".*(a+)+"}, "c").by_expression
    assert not parse_settings(LORA | {"exclude_modules": "model.norm"}, "c").by_expression


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("layers_to_transform", [1, "2"], "must be numbers of layers"),
        ("layers_to_transform", [-1], "must be numbers of layers"),
        ("layers_to_transform", True, "must be numbers of layers"),
        ("layers_pattern", ["layers", r"h\d"], "must be names of lists of layers"),
        ("layers_pattern", "a.b", "must be names of lists of layers"),
        ("layers_pattern", "layers", "is set and layers_to_transform is not, which PEFT refuses; mend it there"),
        ("target_modules", "", "must be text or a list of module names, not empty; mend it there"),
        ("target_modules", "\n", "must be text or a list of module names, not empty"),
        ("exclude_modules", [1], "must be a list of module names"),
        ("trainable_token_indices", [1, 5, 1], "must list rows of the embedding, each once"),
        ("trainable_token_indices", {"wte": []}, "must list rows of 'wte', each once"),
        ("peft_type", ["LORA"], "must be text, not list; mend it there"),
        ("trainable_token_indices", [-1], "must list rows from 0 on"),
        ("trainable_token_indices", [True], "must list rows from 0 on"),
        ("trainable_token_indices", {"wte": 3}, "must list rows from 0 on"),
        ("trainable_token_indices", "1", "must be rows, or map module names to rows"),
        ("use_dora", 1, "must be true or false"),
        ("rank_pattern", {"q|v": 4}, "'q|v' is an expression"),
        ("alpha_pattern", {"(a+)+$": 4}, "is an expression, and none out of a file is run"),
    ],
)
def test_where_an_adapter_acts_is_checked(name: str, value: object, told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^c: {name}"):
        parse_settings(LORA | {name: value}, "c")
    with pytest.raises(CheckpointError) as error:
        parse_settings(LORA | {name: value}, "c")
    assert told in str(error.value)


@pytest.mark.parametrize("targets", ["all-linear", "model.layers.0.self_attn.q_proj"])
@pytest.mark.parametrize("fields", [{"layers_to_transform": [0]}, {"layers_to_transform": 1, "layers_pattern": "h"}])
def test_text_targets_have_no_layers(targets: str, fields: dict[str, object]) -> None:
    """PEFT takes no such config; of BOFT it passes over them."""
    with pytest.raises(CheckpointError, match="layers_to_transform is set and target_modules is text, which PEFT"):
        parse_settings(LORA | fields | {"target_modules": targets}, "c")
    assert parse_settings(BOFT | fields | {"target_modules": targets}, "c").is_target("model.layers.0.self_attn.q_proj")


def test_boft_takes_no_pattern_of_layers_alone() -> None:
    with pytest.raises(CheckpointError, match="layers_pattern is set and layers_to_transform is not"):
        parse_settings(BOFT | {"target_modules": ["q_proj"], "layers_pattern": "layers"}, "c")


def test_a_long_text_is_an_expression() -> None:
    found = parse_settings(LORA | {"target_modules": "a" * 2000, "exclude_modules": "b" * 2000}, "c")
    assert (found.unread, found.by_expression) == ("target_modules", True)
    assert found.is_target("model.layers.0.self_attn.q_proj")


def test_a_rotation_has_a_factor_at_least() -> None:
    with pytest.raises(CheckpointError, match="boft_n_butterfly_factor must be at least 1"):
        parse_settings(BOFT | {"boft_n_butterfly_factor": 0, "target_modules": ["q_proj"]}, "c")
