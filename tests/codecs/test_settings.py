from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deltacompress.codecs.codec import Codec
from deltacompress.codecs.registry import CODECS
from deltacompress.codecs.settings import (
    BitDeltaSettings,
    ExactSettings,
    ObsSettings,
    RtnSettings,
    SkipSettings,
    spec_for,
)
from deltacompress.errors import RecipeError
from deltacompress.numerics.sparsity import Sparsity


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 5), ("bits", 0), ("bits", "two"), ("bits", None),
        ("sparsity", "4:2"), ("sparsity", "half"),
        ("group_size", 7), ("group_size", 0), ("group_size", "column"),
        ("grid", "uniform"),
        ("range_factor", 0.0), ("range_factor", 5.0), ("step", 0.0), ("step", 8.5),
        ("asymmetric", 2.0), ("asymmetric", -0.1),
        ("damp_fraction", 0.0), ("damp_fraction", 10.5),
        ("block_size", 8), ("block_size", 5000),
        ("selection", "random"),
        ("refine_sweeps", -1), ("refine_sweeps", 21),
        ("codec", "gptq"),
        ("alpha", 0.5),
    ],
)  # fmt: skip
def test_obs_refuses_what_it_cannot_do_and_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ObsSettings(**({"bits": 4} | {field: value}))
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("kind", [ObsSettings, RtnSettings])
@pytest.mark.parametrize("grid", ["minmax", "symmetric"])
def test_one_bit_is_a_sign(kind: type[ObsSettings | RtnSettings], grid: str) -> None:
    with pytest.raises(ValidationError, match="bits: 1 needs grid: midrise"):
        kind(bits=1, grid=grid)  # type: ignore[arg-type]
    assert kind(bits=1, grid="midrise").bits == 1


@pytest.mark.parametrize("more", [{}, {"refine_sweeps": 0, "refit_scales": True}])
def test_sixteen_bits_have_no_grid_to_improve(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="refine_sweeps: 0"):
        ObsSettings(bits=16, **more)
    assert ObsSettings(bits=16, refine_sweeps=0).bits == 16


@pytest.mark.parametrize("kind", [ObsSettings, RtnSettings])
@pytest.mark.parametrize("more", [{"grid": "minmax"}, {"grid": "midrise"}, {"bits": 16}, {"range_factor": 1.5}])
def test_a_step_goes_with_nothing_else_that_says_how_wide_steps_are(
    kind: type[ObsSettings | RtnSettings], more: dict[str, Any]
) -> None:
    with pytest.raises(
        ValidationError, match=r"^1 validation error .*\n.*(step needs grid: symmetric|step says how wide steps are)"
    ):
        kind(**({"bits": 2, "grid": "symmetric", "step": 2.0} | more))
    assert kind(bits=2, grid="symmetric", step=2.0).step == 2


def test_a_step_leaves_no_range_to_search() -> None:
    with pytest.raises(ValidationError, match="step needs no range_search"):
        ObsSettings(bits=2, grid="symmetric", step=2.0, range_search=(1.0, 1.2))


@pytest.mark.parametrize(
    ("fields", "masked"),
    [
        ({"step": 2.0}, True),
        ({}, False),
        ({"step": 2.0, "bits": 3}, False),
        ({"step": 2.0, "sparsity": "2:4"}, False),
    ],
)
def test_two_bits_and_a_step_are_mostly_zeros_and_stored_so(fields: dict[str, Any], masked: bool) -> None:
    settings = ObsSettings(**({"bits": 2, "grid": "symmetric"} | fields))
    assert spec_for(settings, rows=3, columns=8, name="q").masked is masked


def test_a_step_is_told_only_where_there_is_one() -> None:
    """Manifests hold recipes: those of before stay as they are."""
    assert "step" not in RtnSettings(bits=2).model_dump(mode="json")
    assert RtnSettings(bits=2, grid="symmetric", step=2).model_dump(mode="json")["step"] == 2


@pytest.mark.parametrize("kind", [ExactSettings, SkipSettings, BitDeltaSettings])
def test_some_codecs_take_no_options(kind: type[ExactSettings | SkipSettings | BitDeltaSettings]) -> None:
    with pytest.raises(ValidationError):
        kind(bits=4)  # type: ignore[call-arg]


def test_settings_cannot_be_changed() -> None:
    settings = RtnSettings(bits=4)
    with pytest.raises(ValidationError):
        settings.bits = 2  # type: ignore[misc]


@pytest.mark.parametrize("text", ["dense", "2:4", "unstructured:0.5", "unstructured:.75", "unstructured:0.00001"])
def test_patterns_are_kept_in_one_spelling_that_reads_back(text: str) -> None:
    settings = RtnSettings(bits=4, sparsity=text)
    assert settings.pattern == Sparsity.parse(text)
    assert RtnSettings(bits=4, sparsity=settings.sparsity) == settings


def test_a_group_size_that_does_not_divide_names_the_tensor() -> None:
    with pytest.raises(RecipeError, match=r"^q_proj: group_size 32 does not divide its 48 columns"):
        spec_for(RtnSettings(bits=4, group_size=32), rows=2, columns=48, name="q_proj")
    spec = spec_for(RtnSettings(bits=4, sparsity="2:4", group_size=16), rows=2, columns=48, name="q_proj")
    assert (spec.rows, spec.columns, spec.group, spec.groups, spec.bits) == (2, 48, 16, 3, 4)
    assert spec_for(RtnSettings(bits=4), rows=2, columns=48, name="q_proj").group == 48


@pytest.mark.parametrize("functions", [(), ("encode", "encode_group"), ("fit",), ("encode_group", "fit")])
def test_a_codec_has_one_way_to_encode(functions: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match="codec rtn needs encode or encode_group, one of them; fit and counts go with"):
        Codec(RtnSettings, **{name: lambda *_: None for name in functions})  # type: ignore[arg-type]


def test_a_codec_gets_one_thing_besides() -> None:
    def encode(*_: object) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="codec rtn has fit and counts"):
        Codec(RtnSettings, encode=encode, fit=encode, counts=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fit and counts go with encode"):
        Codec(RtnSettings, encode_group=encode, counts=True)  # type: ignore[arg-type]


def test_what_each_codec_needs() -> None:
    needs = {name: (codec.calibrates, codec.needs_tokens) for name, codec in CODECS.items()}
    assert needs.pop("obs") == (True, True)
    assert needs.pop("bitdelta") == needs.pop("counted") == (False, True)
    assert set(needs.values()) == {(False, False)}
    assert ObsSettings(bits=4).needs_teacher
    assert not ObsSettings(bits=4, asymmetric=0).needs_teacher
    assert not any(one.needs_teacher for one in (RtnSettings(bits=4), ExactSettings(), BitDeltaSettings()))


@pytest.mark.parametrize(
    "more",
    [{"bits": 2}, {"group_size": 16}, {"range_search": (0.8, 1.0)}, {"refit_scales": True}, {"codec": "rtn"}],
)
def test_drawn_patterns_are_for_signs_that_obs_solves(more: dict[str, Any]) -> None:
    fields = {"bits": 1, "grid": "midrise", "sparsity": "drawn:3:8"}
    assert not ObsSettings(**fields).rows_apart
    with pytest.raises(ValidationError, match=r"sparsity: drawn:3:8 (needs codec|takes no)"):
        (RtnSettings if "codec" in more else ObsSettings).model_validate(fields | more)


def test_a_tensor_draws_by_its_name() -> None:
    settings = ObsSettings(bits=1, grid="midrise", sparsity="drawn:3:8")
    assert spec_for(settings, rows=2, columns=8, name="abc").seed == 0x352441C2
    assert "seed" not in spec_for(ObsSettings(bits=2), rows=2, columns=8, name="abc").to_json()
