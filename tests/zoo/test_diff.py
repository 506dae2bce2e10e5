"""`zoo diff` and the reports it compares scores of."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo.checkpoints import LORA, lora, weights, write_adapter, write_base

from deltacompress.artifact.manifest import read_manifest
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import InputError
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.reports import describe_report, scores
from deltacompress.zoo.entries.scores import Condition
from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.store import osfs
from deltacompress.zoo.views.diff import _recipe_rows, diff

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Zoo.init(tmp_path / "zoo")


def attach(zoo: Zoo, name: str, report: object) -> None:
    described = describe_report(json.dumps(report).encode(), *zoo.show(name), "report.json")
    zoo.attach(described.entry, described.blobs)


def test_two_recipes(zoo: Zoo) -> None:
    for artifact in ("int4-24", "int2-24"):
        zoo.add(GOLDEN / artifact, "t/bot")
    attach(zoo, "t/bot@1", {"sst2": {"accuracy": 0.9}})
    attach(zoo, "t/bot@2", {"sst2": {"accuracy": 0.8, "f1": 1}})
    found = diff(zoo, "t/bot@1", "t/bot@2")
    facts = {row["what"]: (row["a"], row["b"]) for row in found["facts"]}
    assert facts["recipe"] == ("int4-24", "int2-24")
    assert "base_hash" not in facts
    assert {"what": "rules.0.bits", "a": 4, "b": 2} in found["recipe"]
    assert found["scores"] == [{"what": "sst2.accuracy", "a": 0.9, "b": 0.8}, {"what": "sst2.f1", "a": None, "b": 1.0}]
    first, second = (
        {one.name: one.sha256 for one in read_manifest(GOLDEN / name).tensors} for name in ("int4-24", "int2-24")
    )
    differing = {row["tensor"] for row in found["tensors"] if row["what"] == "sha256"}
    assert differing == {name for name in first if first[name] != second[name]}
    assert found["same_tensors"] == len(first) - len({row["tensor"] for row in found["tensors"]})
    assert found["shared_bytes"] > 0
    assert json.loads(json.dumps(found)) == found


def test_of_a_recipe_what_only_one_has_by_default_is_not_told() -> None:
    """Nor is each of the tensors that a rule names a row."""
    (plain,) = Recipe.load("lossless").model_dump(mode="json")["rules"]
    names = ("a.weight", "b.weight")
    rule = {"name": names, "codec": "obs", "bits": 2, "grid": "symmetric", "step": 2.1}
    solved = Recipe.model_validate({"name": "mine", "rules": [rule, plain]})
    told = list(_recipe_rows(Recipe.load("lossless").model_dump(mode="json"), solved.model_dump(mode="json")))
    rows = {row["what"]: (row["a"], row["b"]) for row in told if row["what"].startswith("rules")}
    assert rows == {
        "rules.0.bits": (None, 2),
        "rules.0.codec": ("exact", "obs"),
        "rules.0.grid": (None, "symmetric"),
        "rules.0.name": (None, "a.weight, b.weight"),
        "rules.0.step": (None, 2.1),
        "rules.1.codec": (None, "exact"),
    }
    assert {"what": "rules.0.old", "a": 1, "b": None} in list(_recipe_rows({"rules": [{"old": 1}]}, {}))


def test_an_entry_and_itself(zoo: Zoo) -> None:
    for _ in range(2):
        zoo.add(GOLDEN / "int4-24", "t/bot")
    found = diff(zoo, "t/bot@1", "t/bot@2")
    assert found["same"]
    assert not found["facts"] + found["recipe"] + found["tensors"] + found["scores"]
    assert (found["a_bytes"], found["b_bytes"]) == (0, 0)
    with pytest.raises(NotFoundError):
        diff(zoo, "t/bot", "t/none")


def test_the_same_under_another_link(zoo: Zoo) -> None:
    first = zoo.add(GOLDEN / "int4-24", "t/bot")
    zoo.add(GOLDEN / "int4-24", "t/bot", parents=["t/bot@1"], relation="recompressed")
    found = diff(zoo, "t/bot@1", "t/bot@2")
    facts = {row["what"]: (row["a"], row["b"]) for row in found["facts"]}
    assert facts == {"relation": ("quantized", "recompressed"), "linked_to": (None, first.manifest[:12])}


def test_bases_and_adapters(zoo: Zoo, tmp_path: Path) -> None:
    linking.add(zoo, write_base(tmp_path / "a"), "t/a", hub_id="acme/llama")
    changed = weights() | {"extra": weights(1)["model.layers.0.input_layernorm.weight"]}
    linking.add(zoo, write_base(tmp_path / "b", changed), "t/b")
    found = diff(zoo, "t/a", "t/b")
    assert found["tensors"] == [{"tensor": "extra", "what": "tensor", "a": None, "b": "present"}]
    assert found["same_tensors"] == 5
    linking.add(zoo, write_adapter(tmp_path / "l"), "t/l")
    more = LORA | {"r": 4}
    linking.add(zoo, write_adapter(tmp_path / "m", more, lora(4)), "t/l")
    facts = {row["what"]: (row["a"], row["b"]) for row in diff(zoo, "t/l@1", "t/l@2")["facts"]}
    assert facts["rank"] == (2, 4)


def test_scores_are_found_by_their_path(zoo: Zoo) -> None:
    zoo.add(GOLDEN / "int4-24", "t/bot")
    report = {
        "tasks": [{"task": "SST 2", "accuracy": 0.5, "n": 10}, {"name": "mnli", "accuracy": 1}, [1]],
        "none": None,
        "passed": True,
        "kl": 1e-3,
        "huge": 10**400,
    }
    attach(zoo, "t/bot", report)
    assert scores(zoo, "t/bot") == {
        "tasks.sst-2.accuracy": 0.5,
        "tasks.sst-2.n": 10,
        "tasks.mnli.accuracy": 1,
        "kl": 1e-3,
    }


@pytest.mark.parametrize("raw", [b"[]", b"{", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"{" * 5000, b'{"a":1e999}'])
def test_a_report_is_one_json_object(zoo: Zoo, raw: bytes) -> None:
    zoo.add(GOLDEN / "int4-24", "t/bot")
    with pytest.raises(InputError, match="not a JSON object"):
        describe_report(raw, *zoo.show("t/bot"), "report.json")


def test_conditions() -> None:
    found = {"sst2.accuracy": 0.9}
    for text, holds in {
        ">=0.9": True,
        ">0.9": False,
        "<=0.9": True,
        "<0.9": False,
        "= 0.9": True,
        " > 1e-3": True,
    }.items():
        assert Condition.parse(f"sst2.accuracy{text}").holds(found) is holds
    assert not Condition.parse("other>=0").holds(found)
    for text in ("", "sst2", "sst2>=", ">=1", "sst2>=x", "sst2>=1.2.3", "a b>1"):
        with pytest.raises(InputError, match="--score"):
            Condition.parse(text)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_condition_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        Condition.parse(text)
