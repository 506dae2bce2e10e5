"""Adapters over a delta that are measured: as PEFT's merged model scores, named with what they go over."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft_models
import pytest
from grown import serve_grown
from pairs import edit
from runtime_cases import Served

from deltacompress.adapters.adapter import adapter_identity, digest_in
from deltacompress.artifact.delta import load_delta
from deltacompress.cli.main import main
from deltacompress.errors import BaseMismatchError, InputError, IntegrityError
from deltacompress.evaluation import evaluate, read_report
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.subjects import open_subjects
from deltacompress.zoo import Zoo

if TYPE_CHECKING:
    from pairs import Pair


@dataclass(frozen=True)
class Measured:
    """report, out: of `styled` over the artifact, and what PEFT merges of it."""

    report: Report
    out: Path
    styled: Path
    own: list[str]


@pytest.fixture(scope="module")
def served(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_grown(pair, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def artifact(served: Served) -> Path:
    return served.artifact


@pytest.fixture(scope="module")
def measured(pair: Pair, served: Served, task_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    pytest.importorskip("lm_eval")
    root = tmp_path_factory.mktemp("over")
    artifact, restored = served.artifact, served.restored
    targets = ["q_proj", "up_proj", "lm_head"]
    styled = peft_models.write(restored, root / "styled", "Lora", r=4, target_modules=targets, size=0.3)
    peft_models.model_of(restored, styled).merge_and_unload().save_pretrained(root / "merged")
    peft_models.model_of.cache_clear()
    for file in restored.glob("tokenizer*"):
        shutil.copy(file, root / "merged")
    own = ["--base", str(pair.base), "--tasks", "colours,echo", "--task-dir", str(task_dir), "--quiet"]
    more = ["--against", f"merged={root / 'merged'}", "--over", f"styled={artifact}", "--out", str(root / "out")]
    assert main(["eval", f"styled={styled}", f"packed={artifact}", *own, *more]) == 0
    return Measured(read_report(root / "out"), root / "out", styled, own)


def lines(out: Path, task: str, label: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples" / f"{task}.{label}.jsonl").read_text().splitlines()]


def test_it_scores_what_the_merged_model_scores(measured: Measured) -> None:
    for task in ("colours", "echo"):
        own, merged, below = (lines(measured.out, task, label) for label in ("styled", "merged", "packed"))
        assert len(own) == 24
        assert [one["answer"] for one in own] == [one["answer"] for one in merged]
        if task == "colours":
            values = [[value for one in some for value in one["logprobs"]] for some in (own, merged, below)]
            assert values[0] == pytest.approx(values[1], rel=1e-5)
            assert values[0] != pytest.approx(values[2], rel=1e-2)


def test_the_report_names_both(measured: Measured, artifact: Path, pair: Pair) -> None:
    delta, one = load_delta(artifact), measured.report.subject("styled")
    assert (one.role, one.recipe, one.source) == ("adapter", "lora-r4 over int4-24", "styled")
    assert one.identity == adapter_identity(digest_in(measured.styled), delta.manifest.digest)
    assert one.identity != digest_in(measured.styled)
    assert one.bytes == sum(file.stat().st_size for file in measured.styled.iterdir()) + delta.artifact_bytes
    whole = sum(file.stat().st_size for file in pair.base.iterdir())
    assert one.ratio == pytest.approx(whole / one.bytes)


def test_a_gate_knows_it_with_what_it_goes_over(
    measured: Measured, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("name: p\nmin_ratio: 0.01\n")
    own = ["gate", str(measured.out), str(policy), "--quiet", "--artifact", str(measured.styled)]
    assert main([*own, "--over", str(artifact)]) == 0
    assert main(own) == 3
    assert "the report is about another manifest" in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
def test_answers_over_another_delta_are_not_used_again(
    measured: Measured, artifact: Path, served: Served, pair: Pair, task_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    served.pair.compress(other, recipe="lossless")
    own: dict[str, Any] = {"base": pair.base, "tasks": ["colours"], "task_dir": task_dir, "limit": 6}
    both = {"one": measured.styled, "two": measured.styled}
    found = evaluate(both, over={"one": artifact, "two": other}, out=tmp_path / "out", **own)
    assert len({one.identity for one in found.subjects}) == 2
    told = [[one["logprobs"] for one in lines(tmp_path / "out", "colours", label)] for label in both]
    assert told[0] != told[1]
    again = evaluate({"one": measured.styled}, over={"one": artifact}, out=tmp_path / "again", **own)
    assert [one["logprobs"] for one in lines(tmp_path / "again", "colours", "one")] == told[0]
    assert again.subject("one").identity == found.subject("one").identity


def test_what_the_delta_was_calibrated_on_counts(
    served: Served, measured: Measured, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.pair.compress(tmp_path / "seen", calibration=task_dir / "echo" / "validation.jsonl")
    own = [*measured.own, "--over", str(tmp_path / "seen"), "--out", str(tmp_path / "out")]
    assert main(["eval", str(measured.styled), *own]) == 2
    assert "task echo: 24 of 24 samples" in capsys.readouterr().err


def test_what_cannot_be_is_one_line(
    measured: Measured, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*argv: str) -> str:
        assert main(["eval", *argv, *measured.own, "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        return told

    bot, over = f"bot={measured.styled}", ["--over", str(artifact)]
    assert "is of none of bot, two; write NAME=DELTA" in refused(bot, f"two={measured.styled}", *over)
    assert f"{artifact}: no adapter, and nothing else goes over a delta" in refused(f"bot={artifact}", *over)
    assert f"--attach: {measured.styled} is a directory; give the name of its entry" in refused(bot, *over, "--attach")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def zoo(measured: Measured, artifact: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    """With two deltas of one fine-tuned model, `styled` over the first of them, and an adapter of the base."""
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    made, other = Zoo.init(tmp_path / "zoo"), tmp_path / "other"
    served.pair.compress(other, recipe="lossless")
    plain = peft_models.write(served.pair.base, tmp_path / "plain", "Lora", r=2, target_modules=["q_proj"])
    made.add(served.pair.base, "team/base")
    made.add(artifact, "team/chat")
    made.add(other, "team/other")
    made.add(measured.styled, "team/styled", base="team/chat")
    made.add(plain, "team/plain", base="team/base")
    return made


def test_a_gate_knows_entries(
    measured: Measured, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter's with the delta that it says, unless another is named."""
    policy = tmp_path / "p.yaml"
    policy.write_text("name: p\nmin_ratio: 0.01\n")

    def gate(artifact: object, *more: object) -> int:
        return main([*map(str, ["gate", measured.out, policy, "--quiet", "--artifact", artifact, *more])])

    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)
    assert gate("team/styled") == 2
    assert "team/styled: no such artifact directory" in capsys.readouterr().err
    monkeypatch.setenv("DELTACOMPRESS_ZOO", zoo.where)
    assert [gate("team/styled"), gate("team/styled@1"), gate("team/chat")] == [0, 0, 0]
    assert [gate("team/styled", "--over", "team/chat"), gate(measured.styled, "--over", "team/chat")] == [0, 0]
    capsys.readouterr()
    assert [gate("team/styled", "--over", "team/other"), gate("team/plain"), gate("team/other")] == [3, 3, 3]
    assert capsys.readouterr().err.count("the report is about another manifest") == 3
    assert gate("team/none") == 2
    assert "team/none" in capsys.readouterr().err


def attaching(measured: Measured, zoo: Zoo, *more: object) -> list[str]:
    """`eval --attach`, into a folder that no other call has."""
    out = Path(zoo.where).with_name(f"out-{'-'.join(map(str, more)).replace('/', '-')}"[:200])
    own = ["eval", *measured.own, "--limit", "6", "--zoo", zoo.where, "--attach", "--out", str(out)]
    return [*own, *map(str, more)]


def test_its_entry_gets_the_report(measured: Measured, zoo: Zoo, artifact: Path) -> None:
    """Over what the entry says, whether or not that is given once more, as an entry or as a directory."""
    over = ["--over", "team/styled=team/chat@latest"]
    for more in (["team/styled"], ["bot=team/styled", "--over", artifact], ["team/styled", "team/plain", *over]):
        before = len(zoo.referrers("team/styled"))
        argv = attaching(measured, zoo, *more)
        assert main(argv) == 0
        report = read_report(Path(argv[argv.index("--out") + 1]))
        one = report.subjects[0]
        wanted = adapter_identity(digest_in(measured.styled), load_delta(artifact).manifest.digest)
        assert (one.role, one.identity) == ("adapter", wanted)
        assert len(zoo.referrers("team/styled")) == before + 1
        score = report.score("colours", one.label)
        assert score is not None
        assert zoo.scores("team/styled")["colours.acc"] == score.value
    assert zoo.scores("team/plain")
    assert not zoo.referrers("team/chat")


def test_no_entry_gets_a_report_over_another_delta(
    measured: Measured, zoo: Zoo, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(entry: str, over: str) -> str:
        argv = attaching(measured, zoo, f"bot={entry}", "--over", over)
        assert main(argv) == 2
        assert not Path(argv[argv.index("--out") + 1]).exists()
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        return told

    way_out = "a report of it over this one is not of that entry; leave that out, or --attach"
    for other in ("team/other", str(Path(zoo.where).with_name("other"))):
        told = refused("team/styled", other)
        assert f"--over {other}: team/styled@1 goes over team/chat@1, and {way_out}" in told
    assert f"--over team/chat: team/plain@1 goes over its base, and {way_out}" in refused("team/plain", "team/chat")
    assert "no adapter, and nothing else goes over a delta; leave out --over" in refused("team/chat", "team/other")
    zoo.rm("team/chat")
    digest = load_delta(artifact).manifest.digest[:12]
    told = refused("team/styled", "team/other")
    assert f"team/styled@1 goes over another delta ({digest}, not in this zoo), and {way_out}" in told
    assert not zoo.referrers("team/styled")
    assert main(attaching(measured, zoo, "bot=team/styled", "--over", artifact)) == 0
    assert len(zoo.referrers("team/styled")) == 1


def test_python_says_the_same(measured: Measured, artifact: Path, pair: Pair, task_dir: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {"base": pair.base, "tasks": ["colours"], "task_dir": task_dir, "out": tmp_path / "out"}
    with pytest.raises(InputError, match="over bto: no artifact has that label"):
        evaluate({"bot": measured.styled}, over={"bto": artifact}, **own)
    with pytest.raises(InputError, match="no adapter, and nothing else goes over a delta; leave out over of bot"):
        evaluate({"bot": artifact}, over={"bot": artifact}, **own)


def test_what_takes_part_is_opened_over_it(measured: Measured, served: Served, artifact: Path, tmp_path: Path) -> None:
    """Its tokenizer is the delta's, and another base than the delta's is told before a model is loaded."""
    none: dict[str, Path] = {}
    own: dict[str, Any] = {"finetuned": None, "others": none, "stored_as": none, "with_base": False}
    base = served.pair.base
    _, (one,), _ = open_subjects({"bot": measured.styled}, base=base, over={"bot": artifact}, **own)
    assert one.tokenizer_folder == artifact
    other = edit(shutil.copytree(base, tmp_path / "other"), lambda weights: {n: w + 1 for n, w in weights.items()})
    with pytest.raises(IntegrityError, match="not the base of this delta"):
        open_subjects({"bot": measured.styled}, base=other, over={"bot": artifact}, **own)
    with pytest.raises(BaseMismatchError, match=f"base {base}"):
        open_subjects({"bot": measured.styled}, base=base, **own)
