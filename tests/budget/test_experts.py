"""Mixtures of experts by size: a group for each product of a layer's experts, and one name for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from budget.test_measuring import kls_of, walked
from pairs import Pair, Recorder, changed, files_of, make_pair
from torch import Tensor

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.budget.measuring import walk as walking
from deltacompress.budget.parts import survey_of
from deltacompress.budget.run import compress_to
from deltacompress.budget.rungs import REFERENCE
from deltacompress.budget.survey import Group
from deltacompress.numerics.hessian import HessianAccumulator

EXPERTS, CHOSEN, TOKENS = 4, 2, 8 * 16


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen3-moe", torch.float32)


def test_experts_are_measured_together_and_coded_each(
    mixture: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what all of them receive: a row for each token, and for each pair of a token and an expert.

    A probe is what transformers says of the fine-tuned model with the references of all of them in it.
    """
    rows, put = dict[str, int](), dict[str, dict[str, Tensor]]()
    group = walking._group

    def grouped(walk: Any, names: Any, weights: Any, sums: HessianAccumulator) -> Any:
        rows[names[0]] = sums.tokens
        one, coded = group(walk, names, weights, sums)
        put[names[0]] = {name: weight.clone() for name, weight in coded.restored(REFERENCE.name).items()}
        return one, coded

    monkeypatch.setattr(walking, "_group", grouped)
    found, batches = walked(mixture, tmp_path / "none")
    experts = [one for one in found.groups if one.experts]
    assert [len(one.names) for one in experts] == [2 * EXPERTS, EXPERTS] * 2
    assert all(".experts." in name for one in experts for name in one.names)
    assert not any(".experts." in name for one in found.groups if not one.experts for name in one.names)
    assert [rows[one.names[0]] for one in experts] == [TOKENS, CHOSEN * TOKENS] * 2
    for k, one in enumerate(experts[:2]):
        own = put[one.names[0]]
        assert own.keys() == set(one.names)
        with_it = changed(mixture, tmp_path / str(k), lambda weights, own=own: weights | own)  # type: ignore[misc]
        per = torch.cat(kls_of(mixture, with_it.finetuned, batches))
        assert one.probe.kl[0] / found.tokens[0] == pytest.approx(float(per.mean()), rel=0.02)
        assert one.probe.kl[0] > 0


def test_a_size_is_kept(mixture: Pair, tmp_path: Path) -> None:
    """A rule names all experts at once, and none has `fisher`, which they know nothing of; the recipe stands alone."""
    given = {"calibration": mixture.data, "samples": 8, "seq_len": 16, "device": "cpu"}
    recorder = Recorder()
    result = compress_to(
        mixture.base, mixture.finetuned, out=tmp_path / "out", max_size=70_000, reporter=recorder, **given
    )
    assert result.bytes == sum(len(raw) for raw in files_of(tmp_path / "out").values())
    assert 0.98 * 70_000 <= result.bytes <= 70_000
    assert not any("gradients" in note for note in recorder.notes)
    verify(tmp_path / "out", base=mixture.base)
    named = {name: rule for rule in result.recipe.rules for name in rule.name or ()}
    of_experts = {name for name in named if ".experts." in name}
    names = ("gate_proj", "up_proj", "down_proj")
    assert of_experts == {f"model.layers.{i}.mlp.experts.[0-9]*.{one}.weight" for i in (0, 1) for one in names}
    assert not any(getattr(named[name], "fisher", False) for name in of_experts)
    assert any(getattr(rule, "fisher", False) for name, rule in named.items() if "self_attn" in name)
    coded = {record.name for record in load_delta(tmp_path / "out").manifest.tensors if record.status == "coded"}
    assert len({name for name in coded if ".experts." in name}) == 2 * 3 * EXPERTS
    mixture.compress(tmp_path / "again", recipe=result.recipe, samples=None, seq_len=None)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_other_mixtures(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str) -> None:
    """With other names, with experts that all tokens share, and with all in one tensor, which is stored exactly."""
    pair = make_pair(architecture)
    out = tmp_path / "out"
    compress_to(
        pair.base, pair.finetuned, out=out, max_kl=10, calibration=pair.data, samples=8, seq_len=16, device="cpu"
    )
    verify(out, base=pair.base)
    of_experts = [one for one in load_delta(out).manifest.tensors if re.search(r"experts\.", one.name)]
    assert {one.status for one in of_experts} == {"exact" if architecture == "gpt-oss" else "coded"}


def test_experts_have_one_pattern() -> None:
    """For whatever number they have; all else its name, which may have what patterns are made of."""
    names = ("a.0.e.0.w", "a.0.e.17.w", "a.0.e.3.v", "b[0].e.1.w")
    experts = Group(names=names, kind="linear", options=(), experts=True)
    assert experts.patterns == ["a.0.e.[0-9]*.v", "a.0.e.[0-9]*.w", "b[[]0].e.[0-9]*.w"]
    assert experts.model_copy(update={"experts": False}).patterns == [*names[:3], "b[[]0].e.1.w"]
    assert [fnmatchcase(name, "a.0.e.[0-9]*.w") for name in ("a.0.e.5.w", "a.0.e.x.w", "a.1.e.5.w")] == [
        True,
        False,
        False,
    ]


def test_steps_of_experts_count_as_they_are_without_fisher(mixture: Pair, tmp_path: Path) -> None:
    """Which lessens what steps of other linears lose, to .7; signs by lot are counted so of all."""
    found, _ = walked(mixture, tmp_path / "none")
    known = survey_of(found, finetuned_bytes=1, fixed_bytes=0)
    plain = survey_of(
        replace(found, groups=[replace(one, experts=False) for one in found.groups]), finetuned_bytes=1, fixed_bytes=0
    )
    for own, other in zip(known.groups, plain.groups, strict=True):
        for one, alike in zip(own.options, other.options, strict=True):
            more = 1 / 0.7 if own.experts and not one.drawn else 1
            assert one.part == pytest.approx(more * alike.part, rel=1e-6)
