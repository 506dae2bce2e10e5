"""Model cards: front matter that the hub's own library reads back, and text that no name breaks out of."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from zoo.checkpoints import write_adapter, write_base

from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.artifact import describe
from deltacompress.zoo.entries.reports import describe_report
from deltacompress.zoo.store import osfs
from deltacompress.zoo.views.card import card, escape

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
NASTY = '---\nlicense: evil\n--- "x": &a <img src=x onerror=1> `rm` | [a](b) \u2028 # {'


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Zoo.init(tmp_path / "zoo")


def test_the_hub_reads_it(zoo: Zoo, tmp_path: Path) -> None:
    linking.add(zoo, GOLDEN / "base", "t/base", hub_id="acme/llama", revision="abc")
    linking.add(zoo, GOLDEN / "int2-24", "t/bot")
    data = ModelCard(card(zoo, "t/bot"), ignore_metadata_errors=False).data.to_dict()
    assert data["base_model"] == "acme/llama"
    assert data["base_model_relation"] == "quantized"
    assert data["tags"] == ["deltacompress", "delta", "int2-24"]
    assert data["deltacompress"]["base_revision"] == "abc"
    assert data["deltacompress"]["digest"] == zoo.resolve("t/bot").manifest


def test_of_two_with_the_same_weights_the_base_is_the_one_that_it_is_linked_to(zoo: Zoo) -> None:
    linking.add(zoo, GOLDEN / "base", "a/mirror", hub_id="aaa/mirror")
    linking.add(zoo, GOLDEN / "base", "t/base", hub_id="acme/llama", revision="abc")
    linking.add(zoo, GOLDEN / "int2-24", "t/bot", base="t/base")
    data = ModelCard(card(zoo, "t/bot"), ignore_metadata_errors=False).data.to_dict()
    assert (data["base_model"], data["deltacompress"]["base_revision"]) == ("acme/llama", "abc")


@pytest.mark.parametrize(
    ("relation", "told"),
    [("merge", "merge"), ("distilled", "finetune"), ("recompressed", "quantized"), (None, "quantized")],
)
def test_the_relation_is_one_that_the_hub_knows(zoo: Zoo, relation: str | None, told: str) -> None:
    zoo.add(GOLDEN / "int2-24", "t/bot", relation=relation)
    assert ModelCard(card(zoo, "t/bot")).data.to_dict()["base_model_relation"] == told


def test_adapters_and_bases(zoo: Zoo, tmp_path: Path) -> None:
    linking.add(zoo, write_base(tmp_path / "base"), "t/base", hub_id="acme/llama")
    linking.add(zoo, write_adapter(tmp_path / "lora"), "t/lora")
    data = ModelCard(card(zoo, "t/lora")).data.to_dict()
    assert (data["library_name"], data["base_model"], data["base_model_relation"]) == ("peft", "acme/llama", "adapter")
    assert "PeftModel" in card(zoo, "t/lora")
    assert str(zoo.show("t/lora")[1].summary["adapter_digest"]) not in card(zoo, "t/lora")  # of use to reports only
    assert "base_model" not in ModelCard(card(zoo, "t/base")).data.to_dict()


def test_scores_are_in_it(zoo: Zoo) -> None:
    zoo.add(GOLDEN / "int2-24", "t/bot")
    report = describe_report(b'{"sst2": {"accuracy": 0.912345678}}', *zoo.show("t/bot"), "r")
    zoo.attach(report.entry, report.blobs)
    assert "| sst2.accuracy | 0.912346 |" in card(zoo, "t/bot")


@pytest.mark.usefixtures("any_text")
def test_no_name_gets_out_of_its_place(zoo: Zoo) -> None:
    described = describe(GOLDEN / "int2-24")
    told = described.entry.lineage.model_copy(update={"base_name": NASTY, "finetuned_name": NASTY})
    summary = dict(described.entry.summary) | {"recipe": NASTY}
    entry = described.entry.model_copy(update={"lineage": told, "summary": summary})
    zoo.publish(entry, described.blobs, "t/bot")
    text = card(zoo, "t/bot")
    _, front, body = text.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["base_model"] == NASTY
    assert "license" not in data
    assert "<img" not in body
    assert not any(line.startswith(("---", "# {", "license")) for line in body.splitlines())


def test_escape() -> None:
    assert escape("a|b*c\n`d`<e>") == r"a\|b\*c \`d\`&lt;e&gt;"
