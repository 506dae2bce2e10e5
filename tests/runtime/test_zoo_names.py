"""Entries of a zoo load by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from runtime_cases import Served, assert_close, oracle_logits, random_ids

from deltacompress.errors import DeltaCompressError
from deltacompress.runtime import DeltaConfig, Runtime
from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.store import osfs


def test_load_by_name(trio: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)
    monkeypatch.chdir(tmp_path)
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(trio["a"].artifact, "team/bot")
    zoo.add(trio["b"].artifact, "team/bot")
    zoo.tag("team/bot@1", "prod")
    runtime = Runtime.from_base(trio["a"].pair.base)
    with pytest.raises(DeltaCompressError, match="team/bot@prod"):
        runtime.load("team/bot@prod")  # no zoo: a path that does not exist
    assert runtime.load("team/bot@prod", zoo=tmp_path / "zoo") == "team/bot@prod"
    monkeypatch.setenv("DELTACOMPRESS_ZOO", str(tmp_path / "zoo"))
    assert runtime.load("team/bot", name="newest") == "newest"
    runtime.load(trio["a"].artifact, name="a")
    runtime.load(trio["b"].artifact, name="b")
    ids = random_ids(7)
    prod, a, newest, b = (runtime.logits([(name, ids)])[0] for name in ("team/bot@prod", "a", "newest", "b"))
    assert prod.equal(a)
    assert newest.equal(b)
    assert not a.equal(b)
    with pytest.raises(NotFoundError, match="no entry team/none"):
        runtime.load("team/none")
    with pytest.raises(DeltaCompressError, match="path is empty"):
        runtime.load("")
    with pytest.raises(DeltaCompressError, match="name is empty"):
        runtime.load("team/bot", name="")


def test_the_plug_in_takes_names(trio: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Zoo.init(tmp_path / "zoo").add(trio["a"].artifact, "team/bot")
    config = DeltaConfig(delta="team/bot", zoo=tmp_path / "zoo")
    with pytest.raises(DeltaCompressError, match="has no zo;"):
        DeltaConfig(delta="team/bot", zo=tmp_path / "zoo")
    base = trio["a"].pair.base
    model = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    ids = random_ids(7)
    with torch.inference_mode():
        found = model(torch.tensor([ids])).logits[0]
    assert_close(found, oracle_logits(trio["a"].restored, ids))
