"""Methods of the field beside ours: low rank of a donor's bytes, BitDelta; artifacts like all others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import InputError
from deltacompress.evaluation import comparison
from deltacompress.evaluation.methods.names import DONORS, at_equal_bytes, load_method, load_methods

if TYPE_CHECKING:
    from pairs import Pair

DONOR = """
name: donor
calibration: {samples: 8, seq_len: 16}
rules:
  - {kind: linear, name: "*layers.0.mlp.up*", codec: exact}
  - {kind: linear, codec: rtn, bits: 4}
  - {kind: head, codec: obs, bits: 4}
  - {kind: embedding, codec: rtn, bits: 4}
  - {codec: exact}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("donor") / "donor.yaml"
    path.write_text(DONOR)
    return path


@pytest.fixture(scope="module")
def donor(pair: Pair, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "donor"
    pair.compress(out, recipe=Recipe.load(recipe))
    return out


def test_low_rank_spends_what_its_donor_spends(pair: Pair, recipe: Path, donor: Path, tmp_path: Path) -> None:
    given = load_delta(donor)
    made = at_equal_bytes("low-rank", Recipe.load(recipe), given.manifest)
    assert (made.name, made.scope, made.calibration) == ("low-rank", "delta", Recipe.load(recipe).calibration)
    pair.compress(tmp_path / "out", recipe=made)
    delta = verify(tmp_path / "out", base=pair.base)
    ranks = []
    for name, record in delta.tensors.items():
        other = given.tensors[name]
        if other.codec != "rtn" or other.kind != "linear":
            assert record.codec == other.codec
            continue
        rows, columns = record.shape
        rank = record.params["rank"]
        assert isinstance(rank, int)
        assert record.codec == "low-rank"
        assert 2 * rank * (rows + columns) <= other.bytes
        assert rank == min(rows, columns) or 2 * (rank + 1) * (rows + columns) > other.bytes
        assert record.loss is not None
        ranks.append(rank)
    assert len(ranks) == 13  # of two layers of seven linears; one is exact


@pytest.mark.parametrize(("fits", "wanted"), [(-1, {"codec": "skip"}), (0, {"codec": "low-rank", "rank": 1})])
def test_what_no_rank_fits_stays_the_bases(recipe: Path, donor: Path, fits: int, wanted: dict[str, Any]) -> None:
    manifest = load_delta(donor).manifest
    record = next(one for one in manifest.tensors if one.codec == "rtn" and one.kind == "linear")
    first, *rest = record.parts
    size = 2 * sum(record.shape) + fits
    parts = (first.model_copy(update={"bytes": size}), *(one.model_copy(update={"bytes": 0}) for one in rest))
    small = manifest.model_copy(update={"tensors": (record.model_copy(update={"parts": parts}),)})
    rule = at_equal_bytes("low-rank", Recipe.load(recipe), small).rule_for(record.name, "linear")
    assert rule.model_dump(exclude={"kind", "name"}) == wanted


def test_names_are_no_patterns(recipe: Path, donor: Path) -> None:
    manifest = load_delta(donor).manifest
    odd = tuple(one.model_copy(update={"name": one.name.replace("model", "[m]*?", 1)}) for one in manifest.tensors)
    made = at_equal_bytes("low-rank", Recipe.load(recipe), manifest.model_copy(update={"tensors": odd}))
    name = next(one.name for one in odd if one.kind == "linear" and one.status == "coded")
    assert made.rule_for(name, "linear").codec == "low-rank"
    assert made.rule_for(name.replace("[m]*?", "mmm"), "linear").codec == "rtn"


def test_a_donor_without_linears(pair: Pair, tmp_path: Path) -> None:
    lossless = Recipe.load("lossless")
    pair.compress(tmp_path / "out", recipe=lossless, calibration=None)
    with pytest.raises(InputError, match="codes no linear weight, so low-rank has nothing to do"):
        at_equal_bytes("low-rank", lossless, load_delta(tmp_path / "out").manifest)


def test_what_is_a_recipe_and_what_is_made() -> None:
    assert {name: recipe is None for name, recipe in load_methods([]).items()} == {
        name: name == "low-rank" for name in load_methods([])
    }
    assert load_method("bitdelta").needs_calibration
    with pytest.raises(InputError, match="did you mean low-rank"):
        load_method("lowrank")


@pytest.mark.usefixtures("lm_eval")
def test_compare_measures_baselines_beside_recipes(
    pair: Pair, task_dir: Path, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DONORS, "low-rank", str(recipe))
    out = tmp_path / "out"
    options: dict[str, Any] = {
        "tasks": ["colours"], "task_dir": task_dir, "out": out, "calibration": pair.data, "limit": 6,
        "methods": [str(recipe), "bitdelta", "low-rank"], "samples": 8, "seq_len": 16,
    }  # fmt: skip
    found = comparison.compare(pair.base, pair.finetuned, **options)
    assert {one.label for one in found.report.subjects} == {"finetuned", "base", "donor", "bitdelta", "low-rank"}
    for method in ("bitdelta", "low-rank"):
        subject, delta = found.report.subject(method), load_delta(out / "artifacts" / method)
        assert (subject.role, subject.recipe, subject.bytes) == ("delta", method, delta.artifact_bytes)
        assert subject.compress_seconds is not None
    used = found.report.subject("bitdelta").calibration
    assert used is not None
    assert "128 tokens, seed 0" in used
    before = (out / "artifacts" / "bitdelta" / "manifest.json").stat().st_mtime_ns
    assert comparison.compare(pair.base, pair.finetuned, **options).report.scores == found.report.scores
    assert (out / "artifacts" / "bitdelta" / "manifest.json").stat().st_mtime_ns == before
