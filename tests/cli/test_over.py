"""--over: an adapter that was trained on a fine-tuned model, served over the delta which that is kept as."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import peft_models
import pytest
import transformers
from grown import TARGETS, Run, serve_grown
from runtime_cases import Served

from deltacompress.cli.given import named
from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.zoo import Zoo

if TYPE_CHECKING:
    from pairs import Pair


@pytest.fixture(scope="module")
def served(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_grown(pair, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def artifact(served: Served) -> Path:
    return served.artifact


@pytest.fixture(scope="module")
def restored(served: Served) -> Path:
    return served.restored


@pytest.fixture(scope="module")
def styled(restored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("over") / "styled"
    return peft_models.write(restored, out, "Lora", r=4, target_modules=TARGETS, size=0.3)


@pytest.fixture(scope="module")
def plain(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("over") / "plain"
    return peft_models.write(pair.base, out, "Lora", r=3, target_modules=["v_proj"], size=0.3, seed=1)


def asked(pair: Pair, *more: object) -> list[object]:
    return ["w1 w2", "--base", pair.base, "--max-new-tokens", 6, "--device", "cpu", "--quiet", *more]


def is_peft(base: Path, adapter: Path, tokens: list[int]) -> bool:
    """Whether PEFT, over the checkpoint `base`, writes these tokens after "w1 w2"."""
    ids = transformers.AutoTokenizer.from_pretrained(base)("w1 w2").input_ids
    return peft_models.is_greedy(peft_models.model_of(base, adapter), ids, tokens)


def test_generate_serves_it_over_the_delta(
    pair: Pair, artifact: Path, restored: Path, styled: Path, plain: Path, command: Run
) -> None:
    code, out, err = command("generate", styled, *asked(pair, "--json", "--over", artifact))
    alone = json.loads(out)["tokens"]
    assert (code, err) == (0, "")
    assert is_peft(restored, styled, alone)
    also = ["--also", f"bot={styled}", "--also", f"packed={artifact}", "--over", f"bot={artifact}"]
    answers = json.loads(command("generate", plain, *asked(pair, "--json", *also))[1])["answers"]
    tokens = {one["name"]: one["tokens"] for one in answers}
    assert list(tokens) == ["plain", "bot", "packed"]
    assert tokens["bot"] == alone
    assert is_peft(pair.base, plain, tokens["plain"])


def test_a_delta_of_a_zoo_is_pulled(
    pair: Pair, artifact: Path, styled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    Zoo.init(tmp_path / "zoo").add(artifact, "team/chat")
    wanted = json.loads(command("generate", styled, *asked(pair, "--json", "--over", artifact))[1])["tokens"]
    code, out, _ = command("generate", styled, *asked(pair, "--json", "--over", "team/chat", "--zoo", tmp_path / "zoo"))
    assert (code, json.loads(out)["tokens"]) == (0, wanted)
    own = ["--over", "team/chat", "--zoo", tmp_path / "zoo", "--base", pair.base]
    assert command("verify", styled, *own, "--quiet")[0] == 0


def test_chat_serves_it_over_the_delta(
    pair: Pair, artifact: Path, styled: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    wanted = json.loads(command("generate", styled, *asked(pair, "--json", "--over", artifact))[1])["tokens"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 w2\n")))
    code, out, _ = command("chat", styled, *asked(pair, "--json", "--over", artifact)[1:])
    assert (code, json.loads(out)["tokens"]) == (0, wanted)


def test_what_goes_over_nothing_here_is_one_line(
    pair: Pair, artifact: Path, styled: Path, plain: Path, make_pair: Callable[..., Pair], tmp_path: Path, command: Run
) -> None:
    def refused(code: int, *argv: object) -> str:
        found, out, err = command(*argv)
        assert (found, out, err.count("\n")) == (code, "", 1), err
        return err

    own = ["--over", artifact]
    for verb in (["generate", artifact, *asked(pair)], ["verify", artifact, "--base", pair.base, "--quiet"]):
        assert f"{artifact}: no adapter, and nothing else goes over a delta; leave out --over" in refused(
            2, *verb, *own
        )
    for verb in (["generate", styled, *asked(pair, "--over", plain)], ["verify", styled, "--over", plain, "--quiet"]):
        assert f"--over {plain}: an adapter, and an adapter goes over the base or a packed delta" in refused(2, *verb)
    assert "no such artifact" in refused(2, "generate", styled, *asked(pair, "--over", tmp_path / "gone"))
    told = refused(2, "generate", styled, *asked(pair, "--also", f"b={plain}", "--over", f"x={artifact}"))
    assert f"--over x={artifact}: is of none of b; write NAME=DELTA" in told
    other = make_pair("llama", hidden_size=64, intermediate_size=64)
    wide = peft_models.write(other.base, tmp_path / "wide", "Lora", r=2, target_modules=TARGETS)
    for verb in (["generate", wide, *asked(pair)], ["verify", wide, "--quiet"]):
        assert f"(base {artifact})" in refused(3, *verb, *own)
    assert "not the base of this delta" in refused(3, "verify", styled, *own, "--base", other.base, "--quiet")


def test_verify_holds_it_against_the_delta(pair: Pair, artifact: Path, styled: Path, command: Run) -> None:
    """Which needs no base."""
    for more in ([], ["--base", pair.base]):
        code, out, err = command("verify", styled, "--over", artifact, *more, "--json")
        data = json.loads(out)
        assert (code, data["verified"], data["over"]) == (0, True, str(artifact))
        assert "its config, names, shapes and values were checked" in err
    assert command("verify", styled, "--base", pair.base, "--quiet")[0] == 3
    code, out, err = command("verify", styled, "--json")
    assert "over" not in json.loads(out)
    assert "its config, names and values were checked" in err


@pytest.mark.parametrize(
    ("given", "names", "alone", "told"),
    [
        (["x"], ["a", "b"], None, "--over x: is of none of a, b; write NAME=DELTA"),
        (["c=x"], ["a"], "a", "--over c=x: is of none of a; write NAME=DELTA"),
        (["=x"], ["a"], "", "--over =x: is of none of a; write NAME=DELTA"),
        (["a=x"], [], "", "--over a=x: names something, and there is one adapter only; write --over DELTA"),
        (["a="], ["a"], "", "--over a=: names no delta"),
        ([""], ["a"], "", "--over : names no delta"),
        (["a=x", "a=y"], ["a"], "", "--over a=y: is a second delta for the same adapter"),
        (["x", "y"], [], "", "--over y: is a second delta for the same adapter"),
        (["x", "a=y"], ["a"], "a", "--over a=y: is a second delta for the same adapter"),
    ],
)
def test_names_that_cannot_be(given: list[str], names: list[str], alone: str | None, told: str) -> None:
    with pytest.raises(InputError) as error:
        named.over(given, names, alone)
    assert told in str(error.value)


def test_what_is_named() -> None:
    assert named.over(["x", "a=y", "b=z=1"], ["a", "b"], "") == {"": "x", "a": "y", "b": "z=1"}
    assert named.over(["x"], ["a"], "a") == {"a": "x"}
    assert named.over([], ["a", "b"], None) == {}


def test_a_path_need_not_be_loaded(pair: Pair, artifact: Path, styled: Path, plain: Path) -> None:
    runtime = Runtime.from_base(pair.base)
    runtime.load(styled, "one", over=artifact)
    assert set(runtime.variants) == {"one"}
    runtime.load(artifact, "chat")
    runtime.load(styled, "two", over="chat")
    assert runtime.variants["one"].variant.identity == runtime.variants["two"].variant.identity
    one, two = runtime.logits([("one", [3, 4, 5]), ("two", [3, 4, 5])])
    assert one.equal(two)
    with pytest.raises(InputError, match="over names something else"):
        runtime.load(styled, "three", over=plain)
