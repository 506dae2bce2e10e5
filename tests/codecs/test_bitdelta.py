"""BitDelta against independent oracles: least squares, a loss by hand; and as a codec that artifacts hold."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pairs import Recorder, changed, edit, files_of, make_pair
from safetensors.torch import save_file
from torch import nn

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.calibration import fitting
from deltacompress.calibration.data import calibration_tokens
from deltacompress.checkpoints.header import read_header
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.rows import InMemory
from deltacompress.codecs import bitdelta
from deltacompress.codecs.encoded import restore_tensor
from deltacompress.codecs.recipe import CalibrationSpec, Recipe
from deltacompress.codecs.settings import BitDeltaSettings
from deltacompress.compression import workspace
from deltacompress.errors import CalibrationError, Interrupted, OutputError, RecipeError, UnsupportedModelError
from deltacompress.models import load
from deltacompress.reporter import SILENT

if TYPE_CHECKING:
    from pairs import Pair, Weights

RECIPE = Recipe.parse({"name": "bd", "rules": [{"kind": "linear", "codec": "bitdelta"}, {"codec": "exact"}]})


def load_model(path: Path) -> Any:
    return load.load_model(Checkpoint.open(path), device=torch.device("cpu"), dtype=torch.float32)


def linears(pair: Pair) -> list[str]:
    return [name for name in Checkpoint.open(pair.base).tensors if name.endswith("proj.weight")]


def test_the_plain_scale_has_the_least_error_of_the_weights() -> None:
    delta = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    delta[0, 0] = 0.0
    signs = bitdelta.sign(delta)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    found = bitdelta.plain_scale(delta)
    solved = torch.linalg.lstsq(signs.flatten()[:, None].double(), delta.flatten()[:, None].double()).solution
    assert found == pytest.approx(float(solved), abs=1e-3)  # lstsq: the oracle; sign(0) is arbitrary


def error_of_logits(pair: Pair, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> float:
    """By hand: put weights into the fine-tuned model and compare logits."""
    right, model = load_model(pair.finetuned), load_model(pair.finetuned)
    for name, weight in weights.items():
        model.get_parameter(name).data.copy_(weight)
    with torch.no_grad():
        return float((model(ids).logits.double() - right(ids).logits.double()).square().mean())


def test_distillation_lowers_its_own_loss_and_is_the_same_every_time(pair: Pair) -> None:
    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    bases = {name: base.read(name).float() for name in linears(pair)}
    ids = torch.randint(4, 90, (24, 12), generator=torch.Generator().manual_seed(3))
    teacher = load_model(pair.finetuned)
    found = bitdelta.distil(teacher, bases, ids, seed=0)
    assert found == bitdelta.distil(teacher, bases, ids, seed=0)
    assert found != bitdelta.distil(teacher, bases, ids, seed=1)
    assert found.after < found.before
    deltas = {name: finetuned.read(name).float() - bases[name] for name in bases}
    for scales, expected in (
        ({name: bitdelta.plain_scale(delta) for name, delta in deltas.items()}, found.before),
        (found.scales, found.after),
    ):
        weights = {name: bases[name] + scales[name] * bitdelta.sign(deltas[name]) for name in bases}
        assert error_of_logits(pair, weights, ids[:16]) == pytest.approx(expected, rel=1e-3)


def test_what_it_takes_beside_model_and_base_is_a_byte_for_each_sign(pair: Pair) -> None:
    teacher = load_model(pair.finetuned)
    bases = {name: Checkpoint.open(pair.base).read(name).float() for name in linears(pair)}
    before, during = bytes_of_tensors(), []

    class Watching(Recorder):
        def phase(self, name: str, total: int | None = None) -> None:
            during.append(bytes_of_tensors())

    bitdelta.distil(teacher, bases, torch.randint(4, 90, (8, 12)), seed=0, reporter=Watching())
    signs = sum(base.numel() for base in bases.values())
    assert signs <= during[0] - before < signs + 20_000  # token ids, buffers of rotary embeddings
    assert all(weight.requires_grad for weight in teacher.parameters())


def bytes_of_tensors() -> int:
    """Of all that Python holds, each storage once."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_training_that_goes_wrong_leaves_the_plain_scales(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitdelta, "RATE", 50.0)
    bases = {name: Checkpoint.open(pair.base).read(name).float() for name in linears(pair)}
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


@pytest.mark.parametrize("piece", [1 << 20, 25])
def test_signs_and_one_scale(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.checkpoints.rows.PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    base, delta = torch.randn(7, 12, generator=generator), torch.randn(7, 12, generator=generator)
    delta[3] = 0.0  # a zero is a minus, and rows of zeros are stored like all others
    whole = InMemory(base + delta)
    encoded = bitdelta.encode_elements(whole, InMemory(base), BitDeltaSettings(), "t", 0.3)
    assert (encoded.format, encoded.params["rows"], encoded.params["group_size"]) == ("packed", 7, 12)
    assert encoded.parts.keys() == {"codes", "scales"}
    assert encoded.parts["scales"].tolist() == [[float(torch.tensor(0.6).bfloat16())]] * 7
    like = torch.empty(7, 12, device="meta")
    decoded = restore_tensor("packed", encoded.params, encoded.parts, None, like, "t")
    signs = torch.where(base + delta - base > 0, 1.0, -1.0)
    assert torch.equal(decoded, signs * float(torch.tensor(0.6).bfloat16()) / 2)
    assert decoded[3].tolist() == [decoded[3, 0]] * 12
    seen = base + delta - base
    wanted = float((decoded - seen).double().square().sum() / seen.double().square().sum())
    assert encoded.loss == pytest.approx(wanted)


def test_an_artifact_holds_the_distilled_scales(pair: Pair, tmp_path: Path) -> None:
    told = Recorder()
    pair.compress(tmp_path / "out", recipe=RECIPE, reporter=told)
    delta = verify(tmp_path / "out", base=pair.base)
    assert any("bitdelta: error of the logits" in note for note in told.notes)
    used = delta.manifest.calibration
    assert used is not None
    assert (used.samples, used.seq_len) == (8, 16)
    finetuned, base = Checkpoint.open(pair.finetuned), Checkpoint.open(pair.base)
    ids = calibration_tokens(finetuned, pair.data, CalibrationSpec(samples=8, seq_len=16)).ids
    bases = {name: base.read(name).float() for name in linears(pair)}
    found = bitdelta.distil(load_model(pair.finetuned), bases, ids, seed=0)
    restored = Checkpoint.open(restore(tmp_path / "out", base=pair.base, out=tmp_path / "restored"))
    for name, info in restored.tensors.items():
        if name not in bases:
            assert torch.equal(restored.read(name), finetuned.read(name))
            continue
        assert (delta.tensors[name].codec, delta.tensors[name].format) == ("bitdelta", "packed")
        scale = float(torch.tensor(2 * found.scales[name]).bfloat16()) / 2
        assert scale == pytest.approx(found.scales[name], rel=2**-8)
        wanted = bases[name] + scale * bitdelta.sign(finetuned.read(name).float() - bases[name])
        assert torch.equal(restored.read(name), wanted.bfloat16())
        assert info.dtype == "BF16"


def test_a_head_with_added_tokens(pair: Pair, tmp_path: Path) -> None:
    """Its shared rows are signs; what is distilled sees the added ones as they are."""

    def grow(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(5)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            added = torch.randn(5, weights[name].shape[1], generator=generator).to(weights[name].dtype)
            weights[name] = torch.cat([weights[name], added])
        return weights

    grown = changed(pair, tmp_path, grow, vocab_size=101)
    rules = [{"kind": ["linear", "head"], "codec": "bitdelta"}, {"codec": "exact"}]
    grown.compress(tmp_path / "out", recipe=Recipe.parse({"name": "bd", "rules": rules}))
    delta = verify(tmp_path / "out", base=pair.base)
    head = delta.tensors["lm_head.weight"]
    assert (head.codec, head.base_rows, head.shape[0]) == ("bitdelta", 96, 101)
    assert [part.shape[0] for part in head.parts if part.name == "added_rows"] == [5]


LINEARS_AND_HEAD = Recipe.parse(
    {"name": "bd", "rules": [{"kind": ["linear", "head"], "codec": "bitdelta"}, {"codec": "exact"}]}
)


def test_a_head_that_the_checkpoint_calls_otherwise_than_the_model(tmp_path: Path) -> None:
    """GPT-NeoX: embed_out in checkpoints, lm_head in transformers 5."""
    neox = make_pair(tmp_path, "gpt-neox")
    names = Checkpoint.open(neox.finetuned).tensors
    if "embed_out.weight" not in names:
        for side in (neox.base, neox.finetuned):
            edit(side, lambda weights: {name.replace("lm_head.", "embed_out."): one for name, one in weights.items()})
    neox.compress(tmp_path / "out", recipe=LINEARS_AND_HEAD)
    assert verify(tmp_path / "out", base=neox.base).tensors["embed_out.weight"].codec == "bitdelta"


def test_names_without_the_prefix_of_the_model_give_the_same_scales(pair: Pair, tmp_path: Path) -> None:
    def bare(weights: Weights) -> Weights:
        return {name.removeprefix("model."): one for name, one in weights.items()}

    other = changed(pair, tmp_path, bare)
    other.compress(tmp_path / "bare", recipe=LINEARS_AND_HEAD)
    pair.compress(tmp_path / "full", recipe=LINEARS_AND_HEAD)
    found, wanted = (verify(tmp_path / name, base=pair.base).tensors for name in ("bare", "full"))
    assert {name: one.sha256 for name, one in found.items()} == {
        name.removeprefix("model."): one.sha256 for name, one in wanted.items()
    }


def test_whole_weights_may_be_signs_too(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "out", recipe=RECIPE.model_copy(update={"scope": "full"}))
    assert {one.base_name for one in verify(tmp_path / "out", base=pair.base).manifest.tensors} == {None}


@pytest.mark.parametrize("stop_at", [0, 2, 5])
def test_a_resumed_run_uses_the_same_scales(
    pair: Pair, tmp_path: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 0 and 1 of the reporter are the distillation's two batches."""
    pair.compress(tmp_path / "whole", recipe=RECIPE)
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        pair.compress(out, recipe=RECIPE, reporter=Recorder(stop_at))
    fitted = (tmp_path / "out.partial" / "step-fit.safetensors").exists()
    assert fitted == (stop_at > 1)
    if fitted:
        monkeypatch.setattr(fitting, "load_model", None)  # is not needed again
    pair.compress(out, recipe=RECIPE, resume=True)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_damaged_fit_is_not_used(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        pair.compress(tmp_path / "out", recipe=RECIPE, reporter=Recorder(4))
    file = tmp_path / "out.partial" / "step-fit.safetensors"
    raw = file.read_bytes()
    at = raw.index(b"proj.weight") + raw[raw.index(b"proj.weight") :].index(b"0.0") + 3
    file.write_bytes(raw[:at] + (b"1" if raw[at : at + 1] != b"1" else b"2") + raw[at + 1 :])
    with pytest.raises(OutputError, match=r"step-fit\.safetensors: damaged \(its records differ\); remove it"):
        pair.compress(tmp_path / "out", recipe=RECIPE, resume=True)


def test_a_sealed_fit_that_no_run_wrote(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        pair.compress(tmp_path / "out", recipe=RECIPE, reporter=Recorder(4))
    file = tmp_path / "out.partial" / "step-fit.safetensors"
    good = json.loads(read_header(file).metadata["records"])
    first = min(good)
    values: list[Any] = ["0.1", True, 1, None, [0.1], -0.5, float("nan"), float("inf"), 1e39, 1e300, {}]
    forged = [json.dumps(good | {first: value}) for value in values]
    forged += [json.dumps(good | {"model.norm.weight": 0.1}), json.dumps({**good, first: 10**400})]
    forged += [json.dumps({name: one for name, one in good.items() if name != first})]
    forged += ["[]", '"x"', "null", "{", "[" * 100_000, "[" * 500 + "]" * 500]
    for records in forged:
        sealed = {"records": records, "sha256": workspace._digest("fit", records)}
        save_file({}, file, metadata=sealed)
        with pytest.raises(OutputError, match=r"step-fit\.safetensors: damaged \(.*\); remove it, or leave out"):
            pair.compress(tmp_path / "out", recipe=RECIPE, resume=True)
        assert file.exists()


def test_other_calibration_data_makes_other_scales(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "a", recipe=RECIPE)
    pair.compress(tmp_path / "b", recipe=RECIPE, seed=1)
    assert load_delta(tmp_path / "a").manifest.digest != load_delta(tmp_path / "b").manifest.digest
    with pytest.raises(OutputError, match="another calibration data"):
        pair.compress(tmp_path / "a", recipe=RECIPE, seed=1)


def test_the_seed_is_that_of_the_calibration(pair: Pair) -> None:
    """It decides on the order in which batches are seen, too."""
    finetuned, base = Checkpoint.open(pair.finetuned), Checkpoint.open(pair.base)
    tokens = calibration_tokens(finetuned, pair.data, CalibrationSpec(samples=12, seq_len=16))
    bases = {name: base.read(name).float() for name in linears(pair)}
    for seed in (0, 7):
        used = replace(tokens, seed=seed)
        settings = dict.fromkeys(bases, BitDeltaSettings())
        found = fitting.fit_codecs(finetuned, {"bitdelta": bases}, settings, used, torch.device("cpu"), SILENT)
        assert found == bitdelta.distil(load_model(pair.finetuned), bases, tokens.ids, seed=seed).scales


def test_bad_input(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CalibrationError, match="recipe bd calibrates: give"):
        pair.compress(tmp_path / "out", recipe=RECIPE, calibration=None)
    for kind in ("embedding", "norm"):
        rules = [{"kind": kind, "codec": "bitdelta"}, {"codec": "exact"}]
        with pytest.raises(RecipeError, match=rf"codec bitdelta on .* \(kind {kind}\), which has no inputs"):
            pair.compress(tmp_path / "out", recipe=Recipe.parse({"name": "bd", "rules": rules}))
    with pytest.raises(RecipeError, match="bits"):
        Recipe.parse({"name": "bd", "rules": [{"codec": "bitdelta", "bits": 1}]})
    monkeypatch.setattr(fitting, "load_model", lambda *_, **__: nn.Identity())
    with pytest.raises(UnsupportedModelError, match=r"no layer .*; use another codec for it") as caught:
        pair.compress(tmp_path / "out", recipe=RECIPE)
    assert str(caught.value.where).startswith(f"{pair.finetuned}: tensor model.layers.0.")
    assert not list(tmp_path.glob("*out*"))
