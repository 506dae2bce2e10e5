"""Analysis against float64 numpy oracles, on small generated checkpoints."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltacompress.analysis import statistics as stats
from deltacompress.analysis.pair import analyze
from deltacompress.analysis.plot import histogram_figure, plot_histograms
from deltacompress.checkpoints.names import group_of, layer_of, module_of
from deltacompress.errors import BackendError, CheckpointError, OutputError, install_hint

LINEAR = {
    "self_attn.q_proj": (16, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
Weights = dict[str, torch.Tensor]


def make_weights(*, layers: int = 3, vocabulary: int = 40, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(vocabulary, 16), "lm_head.weight": normal(vocabulary, 16)}
    for layer in range(layers):
        weights[f"model.layers.{layer}.input_layernorm.weight"] = 1 + normal(16)
        for module, shape in LINEAR.items():
            weights[f"model.layers.{layer}.{module}.weight"] = normal(*shape)
    return weights | {"model.norm.weight": 1 + normal(16)}


def tune(weights: Weights, *, seed: int = 1) -> Weights:
    """Move every weight a little; embedding rows from 10 on stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    tuned = {
        name: (w.float() + 0.004 * torch.randn(w.shape, generator=generator)).to(w.dtype) for name, w in weights.items()
    }
    tuned["model.embed_tokens.weight"][10:] = weights["model.embed_tokens.weight"][10:]
    return tuned


def write(path: Path, weights: Weights, **config: Any) -> Path:
    path.mkdir()
    body = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False} | config
    (path / "config.json").write_text(json.dumps(body))
    save_file({name: w.contiguous() for name, w in weights.items()}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    weights = make_weights()
    return write(root / "base", weights), write(root / "tuned", tune(weights))


def as64(w: torch.Tensor) -> np.ndarray:
    return w.double().numpy()


def oracle_rtn(delta: np.ndarray, bits: int) -> tuple[float, float]:
    """(entropy in bits per weight, kept energy), element by element."""
    top, symbols, lost = 2**bits - 1, [], 0.0
    for row in np.atleast_2d(delta):
        if not row.any():
            continue
        low, high = min(row.min(), 0.0), max(row.max(), 0.0)
        step = (high - low) / top
        zero = round(-low / step)
        for value in row:
            code = min(max(round(value / step) + zero, 0), top)
            symbols.append(code - zero)
            lost += (value - (code - zero) * step) ** 2
    _, counts = np.unique(symbols, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log2(p)).sum() * len(symbols) / delta.size), 1 - lost / float((delta**2).sum())


def assert_moments(found: stats.Moments | None, values: np.ndarray) -> None:
    assert found is not None
    centred = values - values.mean()
    assert found.count == values.size
    assert found.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
    assert found.std == pytest.approx(values.std(), rel=1e-9)
    assert found.absmax == pytest.approx(np.abs(values).max(), rel=1e-6)
    assert found.q999 == pytest.approx(np.quantile(np.abs(values), 0.999, method="inverted_cdf"), rel=1e-6)
    assert found.kurtosis == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-9)
    assert found.max_over_std == pytest.approx(np.abs(values).max() / values.std(), rel=1e-6)


def test_every_tensor_has_one_row_that_agrees_with_float64(pair: tuple[Path, Path]) -> None:
    base, tuned = make_weights(), tune(make_weights())
    found = analyze(*pair)
    assert [row.name for row in found.tensors] == sorted(tuned)
    for row in found.tensors:
        b, f = as64(base[row.name]), as64(tuned[row.name])
        d = f - b
        assert (row.shape, row.dtype, row.numel, row.nbytes) == (f.shape, "BF16", f.size, 2 * f.size)
        assert row.status == "changed"
        assert row.delta is not None
        assert_moments(row.base, b)
        assert_moments(row.finetuned, f)
        assert_moments(row.delta.moments, d)
        assert row.delta.relative_size == pytest.approx(np.linalg.norm(d) / np.linalg.norm(f), rel=1e-9)
        assert row.delta.zero_weights == pytest.approx((d == 0).mean())
        for cost, bits in ((row.delta.rtn2, 2), (row.delta.rtn4, 4)):
            assert (cost.bits, cost.kept) == pytest.approx(oracle_rtn(d, bits), rel=1e-9)
        if d.ndim == 2:
            largest = np.sort((d**2).reshape(-1, 4), axis=1)[:, 2:]
            energies = np.linalg.svd(d, compute_uv=False) ** 2
            assert row.delta.zero_rows == pytest.approx((d == 0).all(axis=1).mean())
            assert row.delta.kept_2of4 == pytest.approx(largest.sum() / (d**2).sum(), rel=1e-9)
            assert row.delta.spectrum is not None
            assert row.delta.spectrum.kept == pytest.approx(energies[:16].sum() / energies.sum(), rel=1e-5)
            assert row.delta.spectrum.stable_rank == pytest.approx(energies.sum() / energies[0], rel=1e-5)
        else:
            assert (row.delta.zero_rows, row.delta.kept_2of4, row.delta.spectrum) == (None, None, None)


def test_layers_and_outside_partition_the_model(pair: tuple[Path, Path]) -> None:
    found = analyze(*pair)
    parts = (*found.layers, *found.outside)
    assert [part.key for part in parts] == ["layer 0", "layer 1", "layer 2", "norm", "embedding", "head"]
    for whole in (parts, found.groups):
        assert sum(part.numel for part in whole) == found.total.numel == sum(row.numel for row in found.tensors)
        assert sum(part.tensors for part in whole) == len(found.tensors)
        assert sum(part.share for part in whole) == pytest.approx(1)


def test_an_aggregate_is_its_tensors_concatenated(pair: tuple[Path, Path]) -> None:
    base, tuned = make_weights(), tune(make_weights())
    layer = analyze(*pair).layers[1]
    names = [name for name in tuned if ".1." in name]
    f = np.concatenate([as64(tuned[name]).ravel() for name in names])
    d = f - np.concatenate([as64(base[name]).ravel() for name in names])
    assert layer.numel == f.size
    assert layer.relative_size == pytest.approx(np.linalg.norm(d) / np.linalg.norm(f), rel=1e-9)
    assert layer.zero_weights == pytest.approx((d == 0).mean())
    costs = [(oracle_rtn(as64(tuned[n]) - as64(base[n]), 2)[0], tuned[n].numel()) for n in names]
    assert layer.rtn2_bits == pytest.approx(sum(b * n for b, n in costs) / f.size, rel=1e-9)


@pytest.mark.parametrize(("key", "mark"), [("all", ".layers."), ("layer 0", ".0."), ("layer 2", ".2.")])
def test_histograms_count_the_linear_weights(pair: tuple[Path, Path], key: str, mark: str) -> None:
    base, tuned = make_weights(), tune(make_weights())
    families = analyze(*pair).histograms[key]
    names = [name for name in tuned if mark in name and "proj" in name]
    b = np.concatenate([as64(base[name]).ravel() for name in names])
    f = np.concatenate([as64(tuned[name]).ravel() for name in names])
    for data, values in ((families["base"], b), (families["finetuned"], f), (families["delta"], f - b)):
        edges = np.linspace(-data.half_width, data.half_width, stats.HISTOGRAM_BINS + 1)
        assert np.abs(values).max() <= data.half_width <= 2 * np.abs(values).max()
        assert data.zeros == (values == 0).sum()
        assert list(data.counts) == np.histogram(values[values != 0], edges)[0].tolist()


@settings(max_examples=25, deadline=None)
@given(st.permutations([1e-6, 3e-3, 0.0, 0.5, 40.0]), st.integers(0, 4))
def test_a_histogram_does_not_depend_on_order_or_grouping(scales: list[float], cut: int) -> None:
    parts = {s: s * torch.randn(7, 9, generator=torch.Generator().manual_seed(3)) for s in scales}
    together, one_by_one, left, right = (stats.Histogram() for _ in range(4))
    together.add(torch.cat([parts[s] for s in sorted(parts)]))
    for place, scale in enumerate(scales):
        one_by_one.add(parts[scale])
        (left if place < cut else right).add(parts[scale])
    left.merge(right)
    for other in (one_by_one, left):
        assert (other.half_width, other.zeros, other.total) == (together.half_width, 63, 5 * 63)
        assert torch.equal(other.counts, together.counts)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (2, 3, 4), (1001, 3)])
def test_moments_of_any_shape_and_offset(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "CHUNK_ELEMENTS", 64)
    values = 1000 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = stats.moments(values)
    if values.numel() > 1:
        assert_moments(found, as64(values))
    else:
        assert found == stats.Moments(1, values.item(), 0.0, values.item(), values.item(), None, None)
    assert stats.moments(torch.empty(0, 4)) is None


def test_statistics_do_not_touch_their_input() -> None:
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    stats.moments(x)
    stats.rtn_cost(x, 2)
    stats.kept_by_2of4(x)
    stats.spectrum(x)
    stats.Histogram().add(x)
    assert torch.equal(x, before)


def test_a_low_rank_delta_is_seen_as_such() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(200, 8, generator=generator) @ torch.randn(8, 120, generator=generator)
    found = stats.spectrum(1e-25 * low)
    assert found is not None
    assert found.kept == pytest.approx(1, abs=1e-6)
    flat = torch.randn(200, 120, generator=generator)
    energies = np.linalg.svd(as64(flat), compute_uv=False) ** 2
    estimate = stats.spectrum(flat)
    assert estimate is not None
    exact = energies[:16].sum() / energies.sum()
    assert 0.97 * exact < estimate.kept <= exact * (1 + 1e-6)


def test_global_state_is_left_alone(pair: tuple[Path, Path]) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    analyze(*pair)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_zero_rows_cost_nothing() -> None:
    delta = torch.zeros(10, 16)
    delta[3] = torch.randn(16, generator=torch.Generator().manual_seed(0))
    alone = stats.rtn_cost(delta[3:4], 4)
    assert stats.rtn_cost(delta, 4).bits == pytest.approx(alone.bits / 10)
    assert stats.rtn_cost(torch.zeros(4, 4), 2) == stats.RtnCost(0.0, None)
    assert stats.zero_rows(delta) == pytest.approx(0.9)


def test_statuses(tmp_path: Path) -> None:
    weights = make_weights(layers=1)
    tuned = tune(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    tuned[name] = weights[name]
    extra = torch.randn(3, 16, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    tuned["model.embed_tokens.weight"] = torch.cat([tuned["model.embed_tokens.weight"], extra])
    tuned["lm_head.weight"] = tuned["model.embed_tokens.weight"].clone()
    tuned["model.layers.0.extra.weight"] = torch.ones(4)
    weights["model.layers.0.steps"] = torch.tensor([2**40 + 1])
    tuned["model.layers.0.steps"] = torch.tensor([2**40 + 2])  # equal once rounded to float32
    found = analyze(write(tmp_path / "base", weights), write(tmp_path / "tuned", tuned))
    rows = {row.name: row for row in found.tensors}

    same = rows[name]
    assert same.status == "identical"
    assert same.delta is not None
    assert (same.delta.relative_size, same.delta.zero_weights, same.delta.zero_rows) == (0.0, 1.0, 1.0)
    assert (same.delta.spectrum, same.delta.rtn2.bits, same.delta.moments.kurtosis) == (None, 0.0, None)

    grown = rows["model.embed_tokens.weight"]
    assert (grown.status, grown.shared_rows, grown.shape) == ("changed", 40, (43, 16))
    assert grown.finetuned is not None
    assert grown.finetuned.count == 40 * 16

    alias = rows["lm_head.weight"]
    assert (alias.status, alias.alias_of, alias.delta) == ("alias", "model.embed_tokens.weight", None)

    added = rows["model.layers.0.extra.weight"]
    assert (added.status, added.base, added.delta) == ("added", None, None)
    assert added.finetuned is not None

    counter = rows["model.layers.0.steps"]
    assert (counter.status, counter.base, counter.delta) == ("changed", None, None)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_vocabulary_that_grew_is_a_change_though_no_old_row_did(tmp_path: Path) -> None:
    weights = make_weights(layers=1)
    tuned = dict(weights)
    name = "model.embed_tokens.weight"
    tuned[name] = torch.cat([weights[name], weights[name][:3]])
    found = analyze(write(tmp_path / "base", weights), write(tmp_path / "tuned", tuned))
    (grown,) = [row for row in found.tensors if row.name == name]
    assert grown.status == "changed"
    assert grown.delta is not None
    assert grown.delta.zero_weights == 1


def test_what_was_added_is_no_part_of_how_far_a_layer_moved(tmp_path: Path) -> None:
    weights = make_weights(layers=1)
    tuned = tune(weights)
    base = write(tmp_path / "base", weights)
    (plain,) = analyze(base, write(tmp_path / "plain", tuned)).layers
    tuned["model.layers.0.extra.weight"] = torch.full((64, 64), 9.0)
    (more,) = analyze(base, write(tmp_path / "more", tuned)).layers
    assert more.numel == plain.numel + 64 * 64
    assert (more.relative_size, more.zero_weights, more.rtn4_bits) == (
        plain.relative_size, plain.zero_weights, plain.rtn4_bits,
    )  # fmt: skip


@pytest.mark.parametrize("side", ["base", "tuned"])
def test_nan_names_tensor_and_checkpoint(tmp_path: Path, side: str) -> None:
    sides = {"base": make_weights(layers=1), "tuned": tune(make_weights(layers=1))}
    sides[side]["model.layers.0.mlp.down_proj.weight"][2, 3] = math.nan
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.mlp\.down_proj\.weight.*{side}"):
        analyze(write(tmp_path / "base", sides["base"]), write(tmp_path / "tuned", sides["tuned"]))


def test_json_is_finite_stable_and_documented(pair: tuple[Path, Path]) -> None:
    first, second = (analyze(*pair).to_json() for _ in range(2))
    text = json.dumps(first, allow_nan=False)
    assert text == json.dumps(second, allow_nan=False)
    assert json.loads(text) == first
    assert list(first) == [
        *("schema_version", "base", "finetuned", "notes", "total", "groups", "layers", "outside"),
        *("tensors", "histograms"),
    ]
    assert list(first["histograms"]) == ["all", "layer 0", "layer 1", "layer 2"]


def test_summary_rows_end_with_the_total(pair: tuple[Path, Path]) -> None:
    rows = analyze(*pair).summary_rows()
    assert [row["layer"] for row in rows] == ["layer 0", "layer 1", "layer 2", "norm", "embedding", "head", "total"]
    embedding = rows[4]
    assert embedding["zero_rows"] == pytest.approx(0.75)
    assert all(list(row) == list(embedding) for row in rows)


def test_a_notebook_shows_a_table(pair: tuple[Path, Path]) -> None:
    found = analyze(*pair)
    table = ElementTree.fromstring(found._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert [row[0] for row in rows[1:]] == [row["layer"] for row in found.summary_rows()]
    assert {len(row) for row in rows} == {9}
    assert rows[-1][1] == f"{found.total.numel:,}"
    assert rows[-1][2] == "100.0"
    assert len(repr(found)) < 200


def test_reporter_hears_of_every_tensor(pair: tuple[Path, Path]) -> None:
    heard: list[tuple[str, int | None]] = []

    class Recorder:
        def phase(self, name: str, total: int | None = None) -> None:
            heard.append((name, total))

        def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
            heard.append((label, None))

        def note(self, message: str) -> None:
            raise AssertionError(message)

    found = analyze(*pair, reporter=Recorder())
    assert heard == [("analyze", len(found.tensors)), *((row.name, None) for row in found.tensors)]


def test_oversized_spectra_are_skipped_and_said(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "SPECTRUM_MAX_ELEMENTS", 600)
    found = analyze(*pair)
    skipped = {row.name for row in found.tensors if len(row.shape) == 2 and row.delta and row.delta.spectrum is None}
    assert skipped == {"lm_head.weight", "model.embed_tokens.weight"}
    assert any("600 elements" in note and all(name in note for name in skipped) for note in found.notes)


@pytest.mark.parametrize(
    ("name", "group", "layer", "module"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "attention", 11, "q_proj"),
        ("model.layers.0.self_attn.q_proj.bias", "attention", 0, "q_proj"),
        ("model.layers.0.self_attn.q_norm.weight", "norm", 0, "q_norm"),
        ("model.layers.3.post_attention_layernorm.weight", "norm", 3, "post_attention_layernorm"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "mlp", 3, "w1"),
        ("gpt_neox.layers.2.attention.query_key_value.weight", "attention", 2, "query_key_value"),
        ("embed_out.weight", "head", None, "embed_out"),
        ("gpt_neox.embed_in.weight", "embedding", None, "embed_in"),
        ("transformer.h.5.ln_1.weight", "norm", 5, "ln_1"),
        ("h.5.mlp.c_fc.weight", "mlp", 5, "c_fc"),
        ("transformer.wte.weight", "embedding", None, "wte"),
        ("lm_head.weight", "head", None, "lm_head"),
        ("model.norm.weight", "norm", None, "norm"),
        ("model.layers.1.mlp.fc1.weight", "mlp", 1, "fc1"),
        ("something", "other", None, "something"),
    ],
)
def test_names(name: str, group: str, layer: int | None, module: str) -> None:
    assert (group_of(name), layer_of(name), module_of(name)) == (group, layer, module)


def test_picture(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = analyze(*pair)
    first, second = tmp_path / "new" / "a.png", tmp_path / "b.png"
    plot_histograms(found, first)
    plot_histograms(found, second)
    assert first.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert first.read_bytes() == second.read_bytes()
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["a.png", "b.png"]


def test_the_figure_is_what_the_file_shows(pair: tuple[Path, Path]) -> None:
    figure = histogram_figure(analyze(*pair))
    titles = {axes.get_title() for part in (figure, *figure.subfigs) for axes in part.axes}
    assert "Linear weights of all decoder layers" in titles


def test_picture_of_odd_models(tmp_path: Path) -> None:
    weights = make_weights(layers=20)
    base = write(tmp_path / "base", weights)
    larger = {name: w + 1 for name, w in weights.items()}
    flat = {name: w for name, w in weights.items() if "layers" not in name}
    cases = {
        "same": (base, write(tmp_path / "same", weights)),
        "larger": (base, write(tmp_path / "larger", larger)),
        "flat": (write(tmp_path / "flat-base", flat), write(tmp_path / "flat", tune(flat))),
    }
    for name, (left, right) in cases.items():
        plot_histograms(analyze(left, right), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_missing_matplotlib_says_what_to_install(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = analyze(*pair)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=re.escape(install_hint("plot"))):
        plot_histograms(found, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_unwritable_picture_leaves_nothing(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = analyze(*pair)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "file" / "a.png", tmp_path / "folder"):
        with pytest.raises(OutputError, match=str(target)):
            plot_histograms(found, target)

    def disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OutputError, match="No space left"):
        plot_histograms(found, tmp_path / "a.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]
