"""An adapter of a fine-tuned model that a zoo holds as a delta: registered over it, found again, and served over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import peft_models
import pytest
from grown import TARGETS, Run, serve_grown
from pairs import files_of
from runtime_cases import Served

from deltacompress.adapters.adapter import adapter_identity, open_adapter
from deltacompress.artifact.manifest import read_manifest
from deltacompress.errors import BaseMismatchError
from deltacompress.runtime import Runtime
from deltacompress.runtime.variants.adapter import AdapterVariant
from deltacompress.serving.worker.entries import Entries
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.beneath import delta_under, model_of
from deltacompress.zoo.entries.evaluations import _is_of, _Subject
from deltacompress.zoo.errors import ConflictError, NotFoundError
from deltacompress.zoo.exchange.resolve import delta_path

if TYPE_CHECKING:
    from pairs import Pair


@pytest.fixture(scope="module")
def served(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_grown(pair, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def styled(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("over") / "styled"
    return peft_models.write(served.restored, out, "Lora", r=4, target_modules=TARGETS, size=0.3)


@pytest.fixture
def zoo(pair: Pair, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    made = Zoo.init(tmp_path / "zoo")
    linking.add(made, pair.base, "team/base")
    linking.add(made, served.artifact, "team/chat")
    return made


def test_its_entry_names_delta_and_base(zoo: Zoo, pair: Pair, served: Served, styled: Path) -> None:
    added = linking.add(zoo, styled, "team/styled", base="team/chat")
    assert (added.kind, added.base) == ("adapter", "team/chat@1")
    (_, entry), (chat, delta) = zoo.show("team/styled"), zoo.show("team/chat")
    told, under = entry.lineage, delta.lineage
    assert told.parents == (zoo.resolve("team/base").manifest, chat.manifest)
    assert (told.base, told.finetuned, told.relation) == (under.base, under.finetuned, "adapter")
    assert entry.summary["over"] == read_manifest(served.artifact).digest
    assert delta_under(zoo, "team/styled") == "team/chat@1"
    edges = {(edge.parent, edge.child, edge.relation) for edge in zoo.lineage("team/styled").edges}
    assert (chat.manifest, zoo.resolve("team/styled").manifest, "adapter") in edges
    assert linking.check_base_of(zoo, "team/styled", pair.base) == "team/base@1"
    card = zoo.card("team/styled")
    assert f"base_model: {under.finetuned_name}" in card
    assert f"base_content_hash: {under.finetuned}" in card


def test_one_of_the_base_goes_over_nothing(zoo: Zoo, pair: Pair, tmp_path: Path) -> None:
    plain = peft_models.write(pair.base, tmp_path / "plain", "Lora", r=2, target_modules=["q_proj"])
    added = linking.add(zoo, plain, "team/plain", base="team/base")
    assert added.base == "team/base@1"
    _, entry = zoo.show("team/plain")
    assert "over" not in entry.summary
    assert entry.lineage.finetuned is None
    assert [delta_under(zoo, name) for name in ("team/plain", "team/chat", "team/base")] == [None] * 3
    assert delta_path("team/plain", zoo.where) is None


def test_it_is_held_against_the_model_that_it_goes_over(zoo: Zoo, styled: Path) -> None:
    with pytest.raises(BaseMismatchError, match="team/base@1"):
        linking.add(zoo, styled, "team/styled", base="team/base")
    linking.add(zoo, styled, "team/styled", base="team/chat")
    with pytest.raises(NotFoundError, match="an adapter, not a base-ref or delta"):
        linking.add(zoo, styled, "team/twice", base="team/styled")


def test_the_delta_is_found_by_the_name_of_its_model(
    zoo: Zoo, pair: Pair, served: Served, styled: Path, tmp_path: Path
) -> None:
    config = json.loads((styled / "adapter_config.json").read_text())
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_model.safetensors").write_bytes((styled / "adapter_model.safetensors").read_bytes())
    name = read_manifest(served.artifact).finetuned.name
    (own / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
    assert linking.add(zoo, own, "team/styled").base == "team/chat@1"
    linking.add(zoo, served.artifact, "team/chat")  # the same bytes: no other delta
    assert linking.add(zoo, own, "team/styled").base == "team/chat@2"
    linking.add(zoo, served.artifact, "team/other", parents=["team/chat@1"])
    with pytest.raises(ConflictError, match=r"several deltas could be meant .*say which with --base"):
        linking.add(zoo, own, "team/styled")
    (own / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "acme/none"}))
    with pytest.raises(NotFoundError, match="no base of this zoo is known as 'acme/none'"):
        linking.add(zoo, own, "team/styled")


def test_the_same_delta_under_another_entry_will_do(zoo: Zoo, pair: Pair, served: Served, styled: Path) -> None:
    """Its base-ref came later, say: another entry, of the same artifact."""
    linking.add(zoo, styled, "team/styled", base="team/chat")
    linking.add(zoo, pair.base, "team/base-again", hub_id="acme/again")
    linking.add(zoo, served.artifact, "team/chat", base="team/base-again")
    assert delta_under(zoo, "team/styled") == "team/chat@1"  # its own first
    zoo.rm("team/chat@1")
    assert delta_under(zoo, "team/styled") == "team/chat@2"
    zoo.rm("team/chat@2")
    with pytest.raises(NotFoundError, match="which is not in this zoo"):
        delta_under(zoo, "team/styled")


def test_it_is_served_over_its_delta(zoo: Zoo, pair: Pair, served: Served, styled: Path, command: Run) -> None:
    ask = ["w1 w2", "--base", pair.base, "--max-new-tokens", 6, "--device", "cpu", "--quiet", "--json"]
    wanted = json.loads(command("generate", styled, *ask, "--over", served.artifact)[1])["tokens"]
    own = ["--zoo", zoo.where]
    assert command("zoo", "add", styled, "team/styled", "--base", "team/chat", *own)[0] == 0
    assert json.loads(command("generate", "team/styled", *ask, *own)[1])["tokens"] == wanted
    answers = json.loads(command("generate", "team/chat", *ask, *own, "--also", "s=team/styled")[1])["answers"]
    assert answers[1]["tokens"] == wanted
    code, out, _ = command("verify", "team/styled", *own, "--json", "--quiet")
    assert code == 0
    assert Path(json.loads(out)["over"]).name == zoo.resolve("team/chat").manifest
    runtime = Runtime.from_base(pair.base)
    runtime.load("team/styled", zoo=zoo.where)
    variant = runtime.variants["team/styled"].variant
    assert isinstance(variant, AdapterVariant)
    assert len(runtime.cache.residents.by_slot) == 1
    assert variant.identity == adapter_identity(variant.adapter.digest, read_manifest(served.artifact).digest)
    runtime.load("team/styled", "again", over=served.artifact, zoo=zoo.where)
    assert runtime.variants["again"].variant.identity == variant.identity
    entries = Entries(zoo.where, str(pair.base))
    below = entries.beneath("team/styled@1")
    assert below is not None
    assert read_manifest(below).digest == read_manifest(served.artifact).digest


def test_without_its_delta_it_is_not_served_over_the_base(
    zoo: Zoo, pair: Pair, served: Served, styled: Path, command: Run
) -> None:
    linking.add(zoo, styled, "team/styled", base="team/chat")
    zoo.rm("team/chat@1")
    ask = ["w1 w2", "--base", pair.base, "--max-new-tokens", 3, "--device", "cpu", "--quiet", "--zoo", zoo.where]
    code, _, err = command("generate", "team/styled", *ask)
    assert code != 0
    assert "goes over a delta of" in err
    assert "which is not in this zoo" in err
    runtime = Runtime.from_base(pair.base)
    with pytest.raises(NotFoundError, match="which is not in this zoo"):
        runtime.load("team/styled", zoo=zoo.where)
    assert command("generate", "team/styled", *ask, "--over", served.artifact)[0] == 0


def test_it_comes_back_as_peft_wrote_it(zoo: Zoo, served: Served, styled: Path, tmp_path: Path, command: Run) -> None:
    """The adapter alone, whether or not its delta is in the zoo."""
    linking.add(zoo, styled, "team/styled", base="team/chat")
    outs = [tmp_path / "one", tmp_path / "two"]
    assert command("zoo", "pull", "team/styled", outs[0], "--zoo", zoo.where, "--quiet") == (0, "", "")
    zoo.rm("team/chat")
    assert command("zoo", "pull", "team/styled", outs[1], "--zoo", zoo.where, "--quiet") == (0, "", "")
    for out in outs:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files_of(out).keys()
        assert files_of(out) == files_of(styled)
        states = [peft_models.model_of(served.restored, path).state_dict() for path in (styled, out)]
        assert any("lora_B" in name for name in states[0])
        assert states[0].keys() == states[1].keys()
        assert all(one.equal(states[1][name]) for name, one in states[0].items())


def test_a_report_of_it_is_of_both(zoo: Zoo, served: Served, styled: Path) -> None:
    linking.add(zoo, styled, "team/styled", base="team/chat")
    _, entry = zoo.show("team/styled")
    digest = read_manifest(served.artifact).digest
    adapter = open_adapter(styled, model_of(zoo, "team/chat").shapes)
    for over, fits in ((digest, True), (None, False), ("0" * 64, False)):
        subject = _Subject(
            label="a", role="adapter", identity=adapter_identity(adapter.digest, over), manifest_digest=None
        )
        assert _is_of(subject, entry) is fits
