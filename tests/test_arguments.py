"""Arguments of the Python API that are wrong are told in one line, by name, in Python's words, before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deltacompress import Gate, Recipe, compress, evaluate, load_delta, restore, verify
from deltacompress.analysis.pair import analyze
from deltacompress.arguments import Amount, Count, Share, Whole, checked, size_in_bytes
from deltacompress.errors import BackendError, InputError, for_the_command_line, option, spelled, switch
from deltacompress.evaluation.comparison import compare
from deltacompress.interop import dequantize, export_gptq

DEMO = Path(__file__).parents[1] / "registry" / "demo"
PAIR = (DEMO / "base", DEMO / "palindrome")
TASKS = ["demo-palindrome"]

CALLS: dict[Callable[..., object], tuple[tuple[object, ...], dict[str, object]]] = {
    compress: (PAIR, {"recipe": "int2-24", "calibration": DEMO / "data/palindrome/train.jsonl"}),
    compare: (PAIR, {"tasks": TASKS, "calibration": DEMO / "data/palindrome/train.jsonl"}),
    evaluate: (("no.delta",), {"base": PAIR[0], "finetuned": PAIR[1], "tasks": TASKS}),
}
WHOLE, COUNT = "must be a whole number, 0 or more", "must be a whole number above 0"


@pytest.mark.parametrize(
    ("function", "name", "value", "told"),
    [
        (compress, "samples", "10", "samples: '10' must be a whole number or None"),
        (compress, "samples", True, "samples: True must be a whole number or None"),
        (compress, "seq_len", 2.5, "seq_len: 2.5 must be a whole number or None"),
        (compress, "seed", -1, "seed -1: must be at least 0"),
        (compress, "recipe", None, "recipe: None must be Recipe or str or Path"),
        (compress, "out", 5, "out: 5 must be str or Path"),
        (compress, "device", "gpu", "device gpu: there is none of that name; give auto, cpu or cuda"),
        (compress, "resume", "yes", "resume: 'yes' must be True or False"),
        (evaluate, "device", "gpu", "device gpu: torch knows no such device; use cpu, cuda or auto"),
        (evaluate, "limit", "8", f"limit: '8' {COUNT} or None"),
        (evaluate, "limit", 0, f"limit: 0 {COUNT} or None"),
        (evaluate, "batch_size", 0, f"batch_size: 0 {COUNT}"),
        (evaluate, "few_shot", -1, f"few_shot: -1 {WHOLE} or None"),
        (evaluate, "seed", -1, f"seed: -1 {WHOLE}"),
        (evaluate, "margin", -0.1, "margin: -0.1 must be a number, 0 or more"),
        (evaluate, "margin", float("nan"), "margin: nan must be a number, 0 or more"),
        (evaluate, "confidence", 95, "confidence: 95 must be a number between 0 and 1"),
        (evaluate, "confidence", 1.0, "confidence: 1.0 must be a number between 0 and 1"),
        (evaluate, "tasks", "demo-palindrome", "tasks: 'demo-palindrome' must be Sequence[str]"),
        (evaluate, "tasks", [], "tasks: no task named; there are "),
        (evaluate, "artifacts", ["a"], "artifacts: ['a'] must be str or Path or Mapping[str, str or Path]"),
        (evaluate, "others", ["a"], "others: ['a'] must be Mapping[str, str or Path] or None"),
        (evaluate, "backend", None, "backend: None must be str"),
        (compare, "methods", "int2-24", "methods: 'int2-24' must be Sequence[str] or None"),
        (compare, "limit", -1, f"limit: -1 {COUNT} or None"),
        (compare, "seed", "1", f"seed: '1' {WHOLE}"),
    ],
)
def test_wrong_arguments(tmp_path: Path, function: Callable[..., object], name: str, value: object, told: str) -> None:
    args, options = CALLS[function]
    options = {"out": tmp_path / "out"} | options | {name: value}
    if name in inspect.signature(function).parameters and name == "artifacts":
        args = ()
    with pytest.raises(InputError) as caught:
        function(*args, **options)
    assert str(caught.value).startswith(told)
    assert "--" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Gate.load(None),  # type: ignore[arg-type]
        lambda: Gate.load("default").check("report"),  # type: ignore[arg-type]
        lambda: Recipe.load(3),  # type: ignore[arg-type]
        lambda: load_delta(3),  # type: ignore[arg-type]
        lambda: verify("a", base=3),  # type: ignore[arg-type]
        lambda: restore("a", base="b", out=3),  # type: ignore[arg-type]
        lambda: analyze(3, "b"),  # type: ignore[arg-type]
        lambda: export_gptq("a", out=3),  # type: ignore[arg-type]
        lambda: dequantize("a", out=3),  # type: ignore[arg-type]
    ],
)
def test_every_other_door(call: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=r"^\w+: .* must be "):
        call()


def test_what_is_right_goes_through_as_it_is() -> None:
    @checked
    def function(a: Count, *rest: str, b: Share | None = None, c: Mapping[str, str | Path] | None = None,
                 d: Sequence[str] = (), e: Amount = 1.0, f: Whole = 0, **more: Any) -> tuple[Any, ...]:  # fmt: skip
        """Its words."""
        return a, rest, b, c, d, e, f, more

    given = {"a": Path("x")}
    result = function(1, b=0.5, c=given, d=("x",), e=0, f=0, g=object)
    assert result == (1, (), 0.5, given, ("x",), 0, 0, {"g": object})
    assert result[3] is given
    assert function.__doc__ == "Its words."
    with pytest.raises(TypeError, match="missing a required argument"):
        function()  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^c: \{'a': '?x{80,}.{0,20} must be"):
        function(1, c={"a": "x" * 1000, "b": 3})  # type: ignore[dict-item]


def test_an_option_is_spelled_as_its_reader_gives_it() -> None:
    assert (option("seq_len"), switch("allow_overlap")) == ("seq_len", "allow_overlap=True")
    with for_the_command_line():
        assert (option("seq_len"), switch("allow_overlap"), spelled("a", "b")) == ("--seq-len", "--allow-overlap", "a")
        with pytest.raises(BackendError, match="--device gpu"):
            compress(*PAIR, recipe="int2-24", out="x", device="gpu")
        with pytest.raises(InputError, match=r"^--seq-len: 'x'"):
            compress(*PAIR, recipe="int2-24", out="x", seq_len="x")  # type: ignore[arg-type]
    assert option("seq_len") == "seq_len"


@pytest.mark.parametrize(
    ("given", "least", "found"),
    [("1.2GB", 1, 1_200_000_000), (" 1 KiB", 1, 1024), (7, 1, 7), ("0", 0, 0), ("9" * 400, 1, int("9" * 400))],
)
def test_sizes(given: str | int, least: int, found: int) -> None:
    assert size_in_bytes(given, "x", such_as="1GB", least=least) == found
    assert type(size_in_bytes(given, "x", such_as="1GB", least=least)) is int


@pytest.mark.parametrize(
    ("given", "least", "told"),
    [
        ("much", 0, "no size"),
        ("", 0, "no size"),
        ("nan", 0, "no size"),
        ("-1", 0, "no size"),
        (-1, 0, "no size"),
        ("0", 1, "no size"),
        ("9" * 400 + "GB", 1, "no size"),
        ("1KB", 1001, "too little"),
    ],
)
def test_what_is_no_size(given: str | int, least: int, told: str) -> None:
    with pytest.raises(InputError) as error:
        size_in_bytes(given, "x", such_as="1GB", least=least)
    assert str(error.value) == f"x: is {told}; give one such as 1GB"
