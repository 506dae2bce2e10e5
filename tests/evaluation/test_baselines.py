"""Baselines against independent oracles: least squares, numpy's spectrum, a loss by hand, bytes counted again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from deltacompress.artifact.delta import load_delta
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import CalibrationSpec, Recipe
from deltacompress.errors import InputError, UnsupportedModelError
from deltacompress.evaluation import comparison
from deltacompress.evaluation.methods import bitdelta, low_rank
from deltacompress.evaluation.methods.baselines import ACCOUNT, Account, build, read_account
from deltacompress.evaluation.methods.names import DONORS
from deltacompress.evaluation.scoring.checkpoints import load_model

if TYPE_CHECKING:
    from pairs import Pair

SPEC = CalibrationSpec(samples=16, seq_len=16)
DONOR = """
name: donor
calibration: {samples: 8, seq_len: 16}
rules:
  - {kind: linear, codec: rtn, bits: 4}
  - {kind: [head, embedding], codec: rtn, bits: 4}
  - {codec: exact}
"""


@pytest.fixture(scope="module")
def donor(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("donor")
    (folder / "donor.yaml").write_text(DONOR)
    pair.compress(folder / "artifact", recipe=Recipe.load(folder / "donor.yaml"), calibration=None)
    return folder / "artifact"


def made(method: str, pair: Pair, donor: Path, out: Path, **more: Any) -> Account:
    return build(
        method, base=pair.base, finetuned=pair.finetuned, donor=donor, out=out, calibration=pair.data, spec=SPEC, **more
    )


def linears(donor: Path) -> list[str]:
    return [record.name for record in load_delta(donor).manifest.tensors if record.kind == "linear"]


def test_the_plain_scale_has_the_least_error_of_the_weights() -> None:
    delta = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    delta[0, 0] = 0.0
    signs = bitdelta.sign(delta)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    found = bitdelta.plain_scale(delta)
    solved = torch.linalg.lstsq(signs.flatten()[:, None].double(), delta.flatten()[:, None].double()).solution
    assert found == pytest.approx(float(solved), abs=1e-3)  # lstsq: the oracle; sign(0) is arbitrary


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_low_rank_is_the_truncated_svd(shape: tuple[int, int]) -> None:
    delta = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 0.01
    spectrum = np.linalg.eigvalsh((delta.double() @ delta.double().T).numpy())[::-1]  # squared singular values
    for rank in (1, 5, min(shape)):
        left, right = low_rank.factors(delta, rank)
        assert (left.dtype, left.shape, right.shape) == (torch.float16, (shape[0], rank), (rank, shape[1]))
        error = float((delta.double() - left.double() @ right.double()).square().sum())
        assert error == pytest.approx(float(spectrum[rank:].sum()), rel=1e-2, abs=1e-5 * float(spectrum.sum()))


def test_ranks_fit_their_bytes() -> None:
    for nbytes in (0, 127, 128, 1000, 10**9):
        rank = low_rank.rank_for((24, 40), nbytes)
        assert low_rank.factor_bytes((24, 40), rank) <= nbytes
        assert rank == 24 or low_rank.factor_bytes((24, 40), rank + 1) > nbytes


def error_of_logits(pair: Pair, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> float:
    """By hand: put weights into the fine-tuned model and compare logits."""
    right, model = load_model(pair.finetuned), load_model(pair.finetuned)
    for name, weight in weights.items():
        model.get_parameter(name).data.copy_(weight)
    with torch.no_grad():
        return float((model(ids).logits.double() - right(ids).logits.double()).square().mean())


def test_distillation_lowers_its_own_loss_and_is_the_same_every_time(pair: Pair, donor: Path) -> None:
    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    bases = {name: base.read(name).float() for name in linears(donor)}
    ids = torch.randint(4, 90, (24, 12), generator=torch.Generator().manual_seed(3))
    teacher = load_model(pair.finetuned)
    found = bitdelta.distil(teacher, bases, ids, seed=0)
    assert found == bitdelta.distil(teacher, bases, ids, seed=0)
    assert found.after < found.before
    deltas = {name: finetuned.read(name).float() - bases[name] for name in bases}
    for scales, expected in (
        ({name: bitdelta.plain_scale(delta) for name, delta in deltas.items()}, found.before),
        (found.scales, found.after),
    ):
        weights = {name: bases[name] + scales[name] * bitdelta.sign(deltas[name]) for name in bases}
        assert error_of_logits(pair, weights, ids[:16]) == pytest.approx(expected, rel=1e-3)


def test_training_that_goes_wrong_leaves_the_plain_scales(
    pair: Pair, donor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitdelta, "RATE", 50.0)
    bases = {name: Checkpoint.open(pair.base).read(name).float() for name in linears(donor)}
    found = bitdelta.distil(load_model(pair.finetuned), bases, torch.randint(4, 90, (8, 12)), seed=0)
    assert found.after == found.before
    finetuned = Checkpoint.open(pair.finetuned)
    for name, scale in found.scales.items():
        assert scale == bitdelta.plain_scale(finetuned.read(name).float() - bases[name])


def test_layers_that_distillation_does_not_know_are_named(pair: Pair) -> None:
    teacher, ids = load_model(pair.finetuned), torch.ones(4, 4, dtype=torch.int64)
    for name, told in (("model.nowhere.weight", "no layer model.nowhere"), ("model.norm.weight", "no linear layer")):
        with pytest.raises(UnsupportedModelError, match=told):
            bitdelta.distil(teacher, {name: torch.zeros(1)}, ids, seed=0)
    assert isinstance(teacher.get_submodule("lm_head"), nn.Linear)


@pytest.mark.parametrize("method", DONORS)
def test_a_baseline_is_a_checkpoint_with_honest_bytes(method: str, pair: Pair, donor: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    account = made(method, pair, donor, out)
    assert read_account(out) == account
    delta, base = load_delta(donor), Checkpoint.open(pair.base)
    written, finetuned = Checkpoint.open(out), Checkpoint.open(pair.finetuned)
    assert written.tensors.keys() == finetuned.tensors.keys()
    coded, weights = 0, 0
    for name, info in finetuned.tensors.items():
        record = delta.tensors[name]
        if record.kind != "linear":
            assert torch.equal(written.read(name), delta.restored(name, delta.read_base(name, base)))
            continue
        rows, columns = info.shape
        difference = written.read(name).float() - base.read(name).float()
        wanted = finetuned.read(name).float() - base.read(name).float()
        if method == "bitdelta":
            coded += (rows * columns + 7) // 8 + 4
            assert len(difference.abs().mul(2**9).round().unique()) <= 3  # one magnitude, but for bf16's rounding
        else:
            rank = record.bytes // (2 * (rows + columns))
            coded += 2 * rank * (rows + columns)
            left, values, right = np.linalg.svd(wanted.double().numpy())
            best = torch.from_numpy((left[:, :rank] * values[:rank]) @ right[:rank])
            torch.testing.assert_close(difference.double(), best, atol=1e-3, rtol=0)  # bf16 rounds the sum
        weights += rows * columns
        assert float((wanted - difference).norm()) < float(wanted.norm())
    replaced = sum(delta.tensors[name].bytes for name in linears(donor))
    files = sum(path.stat().st_size for path in donor.iterdir())
    assert account.bytes == files - replaced + coded
    assert account.linear_bits_per_weight == pytest.approx(8 * coded / weights)
    assert account.ratio == pytest.approx(delta.manifest.finetuned.bytes / account.bytes)
    if method == "low-rank":
        assert account.bytes <= files


@pytest.mark.usefixtures("lm_eval")
def test_compare_measures_baselines_beside_recipes(
    pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "donor.yaml").write_text(DONOR)
    for method in DONORS:
        monkeypatch.setitem(DONORS, method, str(tmp_path / "donor.yaml"))
    out = tmp_path / "out"
    options: dict[str, Any] = {
        "tasks": ["colours"], "task_dir": task_dir, "out": out, "calibration": pair.data, "limit": 6,
        "methods": [str(tmp_path / "donor.yaml"), *DONORS],
    }  # fmt: skip
    found = comparison.compare(pair.base, pair.finetuned, **options)
    assert {one.label for one in found.report.subjects} == {"finetuned", "base", "donor", *DONORS}
    for method in DONORS:
        subject, account = found.report.subject(method), read_account(out / "artifacts" / method)
        assert (subject.role, subject.recipe, subject.bytes) == ("checkpoint", method, account.bytes)
        assert subject.compress_seconds == account.seconds
        assert f"method {method}, run as a plain checkpoint; compressed in" in (out / "report.md").read_text()
    before = (out / "artifacts" / "bitdelta" / ACCOUNT).stat().st_mtime_ns
    assert comparison.compare(pair.base, pair.finetuned, **options).report.scores == found.report.scores
    assert (out / "artifacts" / "bitdelta" / ACCOUNT).stat().st_mtime_ns == before
    edited = json.loads((out / "artifacts" / "bitdelta" / ACCOUNT).read_text()) | {"seed": 7}
    (out / "artifacts" / "bitdelta" / ACCOUNT).write_text(json.dumps(edited))
    with pytest.raises(InputError, match="made by another recipe, model or seed"):
        comparison.compare(pair.base, pair.finetuned, **options)
    (out / "artifacts" / "bitdelta" / ACCOUNT).unlink()
    with pytest.raises(InputError, match="no account of a baseline"):
        comparison.compare(pair.base, pair.finetuned, **options)


def test_bad_input_of_a_baseline(pair: Pair, donor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exact.yaml").write_text("name: exact\nrules:\n  - {codec: exact}\n")
    pair.compress(tmp_path / "exact", recipe=Recipe.load(tmp_path / "exact.yaml"), calibration=None)
    with pytest.raises(InputError, match="codes no linear weight, so low-rank has nothing to do"):
        made("low-rank", pair, tmp_path / "exact", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("deltacompress.evaluation.methods.baselines.load_model", lambda *_, **__: nn.Identity())
    with pytest.raises(UnsupportedModelError, match="no layer"):
        made("bitdelta", pair, donor, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
