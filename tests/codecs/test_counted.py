"""The counted codec: steps by how often a token comes, rows that round to zero, and what recipes may ask of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import Pair
from torch import Tensor

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.rows import InMemory
from deltacompress.codecs import counted
from deltacompress.codecs.encoded import Encoded, restore_tensor
from deltacompress.codecs.formats.packed import PackedSpec, to_serving, to_storage, unpack_levels
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import CountedSettings
from deltacompress.compression.driver import compress
from deltacompress.errors import CalibrationError, RecipeError
from deltacompress.numerics.bits import packing

COLUMNS = 40


def encoded_of(delta: Tensor, counts: Tensor, **fields: object) -> Encoded:
    settings = CountedSettings.model_validate({"bits": 4, "step": 1.0} | fields)
    return counted.encode_elements(InMemory(delta), None, settings, "t", counts)


def decoded(encoded: Encoded, delta: Tensor) -> Tensor:
    return restore_tensor(encoded.format, encoded.params, encoded.parts, torch.zeros_like(delta), delta, "t")


def normal(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


def test_steps_go_with_the_counts() -> None:
    """Against the formula in float64: steps are scale times w^-1/2, w the cube root of the counts."""
    delta, counts = normal(6), torch.tensor([0, 7, 26, 124, 999, 0])
    encoded = encoded_of(delta, counts, bits=8, step=0.7)
    weights = (counts.double() + 1) ** (1 / 3)
    weights /= weights.mean()
    usual = delta.double().square().mean().sqrt()
    expected = 0.7 * usual / weights.sqrt()
    torch.testing.assert_close(encoded.parts["scales"].double().squeeze(1), expected, rtol=2**-8, atol=0)
    assert float((decoded(encoded, delta) - delta).abs().max(1).values.double().div(expected).max()) < 0.51


def test_a_row_that_is_beyond_its_steps_keeps_its_range() -> None:
    delta, counts = normal(3), torch.tensor([0, 10**6, 0])
    encoded = encoded_of(delta, counts, bits=2, step=4.0)
    scale = float(encoded.parts["scales"][-1])
    assert scale == pytest.approx(float(delta[1].abs().max()), rel=2**-7)  # codes of two bits reach one step


def test_rows_that_round_to_zero_are_not_stored() -> None:
    delta, counts = normal(20), torch.zeros(20, dtype=torch.int64)
    delta[4] = 0
    delta[7] *= 20
    encoded = encoded_of(delta, counts, step=6.0)
    kept = packing.unpack_codes(encoded.parts["row_mask"].unsqueeze(0), 1, 20).bool().squeeze(0)
    values = decoded(encoded, delta)
    assert encoded.params["rows"] == int(kept.sum()) == int((values != 0).any(1).sum())
    assert kept[7]
    assert not kept[4]
    assert 0 < int(kept.sum()) < 20


def test_all_rows_are_stored_where_none_is_zero() -> None:
    assert "row_mask" not in encoded_of(normal(9), torch.ones(9, dtype=torch.int64), step=0.5).parts


def test_the_loss_is_weighted() -> None:
    delta, counts = normal(30), torch.arange(30) ** 3
    encoded = encoded_of(delta, counts, step=3.0)
    weights = (counts.double() + 1) ** (1 / 3)
    error = (decoded(encoded, delta) - delta).double().square().sum(1)
    assert encoded.loss == pytest.approx(
        float((weights @ error) / (weights @ delta.double().square().sum(1))), rel=1e-6
    )


def test_weights_lessen_what_is_weighted() -> None:
    """At no more codes that are not zero, the weighted error is less than with counts that are all alike."""
    delta, counts = normal(400), torch.where(torch.arange(400) % 4 == 0, 100_000, 0)
    by_count, alike = encoded_of(delta, counts, step=3.0), encoded_of(delta, torch.ones_like(counts), step=2.0)
    weights = counted.weights_of(counts, 400)
    errors = [float(weights @ (decoded(one, delta) - delta).square().sum(1)) for one in (by_count, alike)]
    stored = [int((decoded(one, delta) != 0).sum()) for one in (by_count, alike)]
    assert errors[0] < 0.8 * errors[1]
    assert stored[0] < 1.1 * stored[1]


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    delta, counts = normal(23), torch.arange(23) * 5
    whole = encoded_of(delta, counts, step=3.0)
    monkeypatch.setattr(counted, "_AT_A_TIME", 4 * COLUMNS)
    pieces = encoded_of(delta, counts, step=3.0)
    assert whole.params == pieces.params
    assert whole.parts.keys() == pieces.parts.keys()
    assert all(torch.equal(part, pieces.parts[name]) for name, part in whole.parts.items())
    assert pieces.loss == pytest.approx(whole.loss or 0, rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_storage_layout_loses_nothing(bits: int) -> None:
    encoded = encoded_of(normal(12), torch.arange(12) ** 4, bits=bits, step=2.0)
    spec = PackedSpec.from_json(encoded.params, "t")
    assert spec.masked
    parts = {name: part for name, part in encoded.parts.items() if name != "row_mask"}
    back = to_serving(spec, to_storage(spec, parts), "t")
    assert all(torch.equal(*(unpack_levels(spec, some)[at] for some in (parts, back))) for at in (0, 1))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_delta_of_zeros(rows: int) -> None:
    delta = torch.zeros(rows, COLUMNS)
    encoded = encoded_of(delta, torch.zeros(rows, dtype=torch.int64))
    assert encoded.loss == 0
    assert encoded.params["rows"] == 0
    assert torch.equal(decoded(encoded, delta), delta)


RULES = [
    {"kind": "linear", "codec": "obs", "bits": 2, "sparsity": "2:4"},
    {"kind": "head", "codec": "obs", "bits": 2},
    {"kind": "embedding", "codec": "counted", "bits": 4, "step": 2.0},
    {"codec": "exact"},
]


def test_compress_counts_the_calibration_tokens(pair: Pair, tmp_path: Path) -> None:
    """The artifact verifies, restores, and holds what the codec makes of the counts of just these tokens."""
    seen: list[Tensor] = []
    original = counted.weights_of

    def noted(counts: Tensor, rows: int) -> Tensor:
        seen.append(counts)
        return original(counts, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "weights_of", noted)
        pair.compress(tmp_path / "out", recipe=Recipe.parse({"name": "counted", "rules": RULES}), samples=7)
    verify(tmp_path / "out")
    delta = load_delta(tmp_path / "out")
    record = delta.record("model.embed_tokens.weight")
    assert (record.codec, record.format, record.params["masked"]) == ("counted", "packed", 1)
    [counts] = seen
    manifest = delta.manifest.calibration
    assert manifest is not None
    assert int(counts.sum()) == 7 * manifest.seq_len
    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    before, after = (one.read(record.name).float() for one in (base, finetuned))
    expected = encoded_of(after - before, counts, step=2.0)
    assert record.loss == pytest.approx(expected.loss)
    restored = Checkpoint.open(restore(delta.path, base=pair.base, out=tmp_path / "back")).read(record.name)
    assert torch.equal(restored, (before + decoded(expected, before)).to(restored.dtype))


def test_recipes_that_calibrate_nothing_else_want_data_too(pair: Pair, tmp_path: Path) -> None:
    recipe = Recipe.parse({"name": "c", "rules": [RULES[2], {"codec": "rtn", "bits": 4}]})
    assert not recipe.walks_layers
    with pytest.raises(CalibrationError, match=r"^recipe c calibrates: give calibration"):
        compress(pair.base, pair.finetuned, recipe=recipe, out=tmp_path / "none")
    pair.compress(tmp_path / "out", recipe=recipe, samples=7)
    verify(tmp_path / "out")
    assert load_delta(tmp_path / "out").record("model.embed_tokens.weight").codec == "counted"


@pytest.mark.parametrize("kind", ["linear", "head", "norm", "other"])
def test_only_embeddings(kind: str) -> None:
    recipe = Recipe.parse({"name": "c", "rules": [{"codec": "counted", "bits": 4, "step": 2.0}]})
    recipe.rule_for("e", "embedding")
    with pytest.raises(RecipeError, match="which has no row for each token; use"):
        recipe.rule_for("t", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"bits": 1}, {"bits": 16}, {"bits": True}, {"step": 0}, {"step": 17}, {"grid": "minmax"}]
)
def test_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RecipeError):
        Recipe.parse({"name": "c", "rules": [RULES[2] | fields]})
