"""Adapters that are measured: as PEFT's merged model scores, named by their files, judged, attached."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft_models
import pytest
from evaluation.reports import report, subject
from evaluation.test_vocabulary import Notes

from deltacompress.adapters.adapter import digest_in
from deltacompress.cli.main import main
from deltacompress.errors import BaseMismatchError, CheckpointError, InputError, IntegrityError, OutputError, PairError
from deltacompress.evaluation import Gate, evaluate, read_report
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.report.html import page
from deltacompress.evaluation.report.markdown import markdown
from deltacompress.evaluation.subjects import open_subjects
from deltacompress.evaluation.zoo import attach_report
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.artifact import Described

if TYPE_CHECKING:
    from pairs import Pair

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Lora", {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "boft": ("BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 2, "target_modules": ["q_proj", "up_proj"]}),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """report, out: of lora and boft (adapters), and both merged by PEFT (checkpoints), beside the base."""

    report: Report
    out: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]


@pytest.fixture(scope="module")
def measured(pair: Pair, task_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    pytest.importorskip("lm_eval")
    root = tmp_path_factory.mktemp("adapters")
    adapters, merged = {}, {}
    for name, (kind, config) in KINDS.items():
        adapters[name] = peft_models.write(pair.base, root / name, kind, size=0.3, **config)
        merged[name] = root / f"{name}-merged"
        with peft_models.butterflies():
            peft_models.model_of(pair.base, adapters[name]).merge_and_unload().save_pretrained(merged[name])
        peft_models.model_of.cache_clear()  # it is merged, and no adapter any more
        for file in pair.base.glob("tokenizer*"):
            shutil.copy(file, merged[name])
    others = {f"{name}-merged": path for name, path in merged.items()}
    out = root / "out"
    found = evaluate(
        adapters, base=pair.base, tasks=["colours", "echo"], task_dir=task_dir, others=others, with_base=True, out=out
    )
    return Measured(found, out, adapters, merged)


def lines(out: Path, task: str, label: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples" / f"{task}.{label}.jsonl").read_text().splitlines()]


def logprobs(out: Path, label: str) -> list[float]:
    """Of all choices of all samples."""
    found = [value for one in lines(out, "colours", label) for value in one["logprobs"]]
    assert len(found) == 24 * 3
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["colours", "echo"])
def test_it_scores_what_the_merged_model_scores(measured: Measured, kind: str, task: str) -> None:
    own, merged, base = (lines(measured.out, task, label) for label in (kind, f"{kind}-merged", "base"))
    assert len(own) == 24
    assert [one["answer"] for one in own] == [one["answer"] for one in merged]
    if task == "colours":
        assert logprobs(measured.out, kind) == pytest.approx(logprobs(measured.out, f"{kind}-merged"), rel=1e-5)
    assert own != base
    scores = [measured.report.score(task, label) for label in (kind, f"{kind}-merged")]
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0].value == scores[1].value


def test_what_the_report_says_of_it(measured: Measured, pair: Pair) -> None:
    found = measured.report
    assert read_report(measured.out) == found
    assert found.schema_version == 2
    one, path = found.subject("lora"), measured.adapters["lora"]
    assert (one.role, one.recipe, one.manifest_digest) == ("adapter", "lora-r4", None)
    assert one.identity == digest_in(path)
    assert one.bytes == sum(file.stat().st_size for file in path.iterdir())
    whole = sum(file.stat().st_size for file in pair.base.iterdir())
    assert one.ratio == pytest.approx(whole / one.bytes)
    assert found.subject("boft").recipe == "boft"
    assert [delta.label for delta in found.deltas] == ["lora", "boft"]
    text = markdown(found)
    assert "| lora | adapter, lora-r4, run beside the base |" in text
    assert f"files `{one.identity[:16]}`" in text
    assert "times smaller than its base; without the fine-tuned model" in text
    assert f"Digest of lora: <code>{one.identity}</code>" in page(found)


def test_a_gate_judges_what_can_be_judged(measured: Measured, tmp_path: Path) -> None:
    ratio = measured.report.subject("lora").ratio
    assert ratio is not None
    for least, passed in ((ratio - 0.01, True), (ratio + 0.01, False)):
        result = Gate.parse({"name": "p", "min_ratio": least, "min_score": {"colours": 0}}).check(
            measured.report, manifest_digest=digest_in(measured.adapters["lora"])
        )
        assert [verdict.subject for verdict in result.verdicts] == ["lora"]
        assert result.passed is passed
    with pytest.raises(InputError) as told:
        Gate.load("default").check(measured.report)
    assert "the report does not have, and an adapter has none; evaluate with " in str(told.value)
    assert "PATH being what PEFT's merge_and_unload makes of it" in str(told.value)
    with pytest.raises(IntegrityError, match="the report is about another manifest: 0000"):
        Gate.load("default").check(measured.report, manifest_digest="0" * 64)


def test_the_gate_verb_takes_an_adapter(measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("name: p\nmin_ratio: 0.01\n")
    own = ["gate", str(measured.out), str(policy), "--quiet", "--artifact"]
    assert main([*own, str(measured.adapters["boft"])]) == 0
    other = shutil.copytree(measured.adapters["boft"], tmp_path / "other")
    peft_models.change(other, lambda tensors: {name: one * 2 for name, one in tensors.items()})
    assert main([*own, str(other)]) == 3
    told = capsys.readouterr().err
    assert "the report is about another manifest" in told
    assert "; evaluate this artifact, also where an earlier version of the program did" in told


def test_a_merged_model_is_a_reference(measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path) -> None:
    """A gate then judges all; that it is this adapter's, nobody can check, and that is told."""
    told = Notes()
    found = evaluate(
        {"lora": measured.adapters["lora"]},
        base=pair.base,
        finetuned=measured.merged["lora"],
        tasks=["colours"],
        task_dir=task_dir,
        out=tmp_path / "out",
        reporter=told,
    )
    near = found.score("colours", "lora")
    assert near is not None
    assert near.fidelity is not None
    assert near.paired is not None
    assert near.fidelity.kl < 1e-6
    assert near.paired.same_answers == 24
    assert found.verdicts[0].subject == "lora"
    assert any(one.startswith("lora: an adapter names no fine-tuned model") for one in told.found)


def test_answers_of_another_base_are_not_used_again(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path
) -> None:
    """The digest of an adapter says nothing of its base."""

    class Stopping(Notes):
        def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
            raise KeyboardInterrupt

    other = shutil.copytree(pair.base, tmp_path / "other")
    shutil.copy(measured.merged["boft"] / "model.safetensors", other)
    own: dict[str, Any] = {"tasks": ["colours"], "task_dir": task_dir, "out": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt):
        evaluate({"lora": measured.adapters["lora"]}, base=other, reporter=Stopping(), **own)
    heard = Notes()
    evaluate({"lora": measured.adapters["lora"]}, base=pair.base, reporter=heard, **own)
    assert not any("used again" in one for one in heard.found)
    found, wanted = (logprobs(out, "lora") for out in (tmp_path / "out", measured.out))
    assert found == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(OutputError, match="other base"):
        evaluate({"lora": measured.adapters["lora"]}, base=other, **own)


def test_another_tokenizer_beside_it_is_another_input(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path
) -> None:
    adapter = shutil.copytree(measured.adapters["lora"], tmp_path / "lora")
    own: dict[str, Any] = {"base": pair.base, "tasks": ["colours"], "task_dir": task_dir, "out": tmp_path / "out"}
    first = evaluate({"lora": adapter}, **own)
    assert evaluate({"lora": adapter}, **own) == first  # read, not measured
    for file in pair.base.glob("tokenizer*"):
        shutil.copy(file, adapter)
    with pytest.raises(OutputError, match="other models"):
        evaluate({"lora": adapter}, **own)
    edit = json.loads((adapter / "tokenizer.json").read_text())
    words = edit["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (adapter / "tokenizer.json").write_text(json.dumps(edit))
    with pytest.raises(PairError, match="its tokenizer is not that of"):
        evaluate({"lora": adapter}, force=True, **own)


def test_eval_tells_of_an_adapter_what_serving_it_tells(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(measured.adapters["lora"], tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "acme/else"}))
    own = ["--base", str(pair.base), "--tasks", "colours", "--task-dir", str(task_dir), "--limit", "2"]
    assert main(["eval", f"bot={other}", *own, "--out", str(tmp_path / "out")]) == 0
    assert "its config calls its base 'acme/else', and this is 'base'; its shapes fit" in capsys.readouterr().err


def test_eval_attaches_to_the_entry(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(pair.base, "team/base")
    for name, path in measured.adapters.items():
        zoo.add(path, f"team/{name}", base="team/base")
    own = ["--base", str(pair.base), "--tasks", "colours", "--task-dir", str(task_dir), "--limit", "6"]
    place = ["--zoo", str(tmp_path / "zoo"), "--out", str(tmp_path / "out"), "--attach", "--quiet"]
    assert main(["eval", "bot=team/lora", *own, *place]) == 0
    score = read_report(tmp_path / "out").score("colours", "bot")
    assert score is not None
    assert zoo.scores("team/lora") == {"colours.acc": score.value}
    assert not zoo.referrers("team/boft")
    told = r"not the artifact that the report measured as bot; .* named adapters otherwise"
    with pytest.raises(InputError, match=told):
        attach_report(zoo.where, "team/boft", "bot", read_report(tmp_path / "out"))
    zoo.attest("team/boft", measured.out / "report.json")  # found by its files
    assert zoo.scores("team/boft")["echo.exact_match"] == measured.report.score("echo", "boft").value  # type: ignore[union-attr]


def test_an_entry_that_does_not_say_what_reports_call_it(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Earlier versions of the program wrote such; told before anything is measured."""
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(pair.base, "team/base")
    described = linking.describe_adapter

    def without(*arguments: Any) -> Described:
        made = described(*arguments)
        summary = {key: value for key, value in made.entry.summary.items() if key != "adapter_digest"}
        return Described(made.entry.model_copy(update={"summary": summary}), made.blobs)

    with monkeypatch.context() as patch:
        patch.setattr(linking, "describe_adapter", without)
        zoo.add(measured.adapters["boft"], "team/boft", base="team/base")
    told = "an earlier version of the program added this adapter.* add the adapter again"
    with pytest.raises(InputError, match=told):
        zoo.attest("team/boft", measured.out / "report.json")
    own = ["--base", str(pair.base), "--tasks", "colours", "--task-dir", str(task_dir), "--out", str(tmp_path / "out")]
    assert main(["eval", "bot=team/boft", *own, "--zoo", str(tmp_path / "zoo"), "--attach", "--quiet"]) == 2
    assert "team/boft@1: an earlier version" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    zoo.add(measured.adapters["boft"], "team/boft", base="team/base")
    zoo.attest("team/boft", measured.out / "report.json")


def test_wrong_adapters_are_told_before_anything_answers(
    measured: Measured, make_pair: Callable[..., Pair], pair: Pair, task_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    other = make_pair("llama", hidden_size=64, intermediate_size=64)
    own = ["--tasks", "colours", "--task-dir", str(task_dir), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(["eval", f"bot={measured.adapters['lora']}", "--base", str(other.base), *own]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(BaseMismatchError) as told:
        evaluate(measured.adapters["lora"], base=other.base, tasks=["colours"], task_dir=task_dir, out=tmp_path / "out")
    assert f"(base {other.base})" in str(told.value)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_cannot_be_are_told_before_a_model_is_loaded(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path, capsys: Any, value: float
) -> None:
    """One number of one tensor, by who opens what takes part, not by the runtime that would serve it."""
    broken = shutil.copytree(measured.adapters["boft"], tmp_path / "broken")

    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[max(tensors)].view(-1)[-1] = value
        return tensors

    peft_models.change(broken, edit)
    none: dict[str, Path] = {}
    with pytest.raises(CheckpointError, match="holds NaN or an infinity"):
        open_subjects({"bot": broken}, base=pair.base, finetuned=None, others=none, stored_as=none, with_base=True)
    own = ["--base", str(pair.base), "--tasks", "colours", "--task-dir", str(task_dir), "--out", str(tmp_path / "out")]
    assert main(["eval", f"bot={broken}", *own]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{broken / 'adapter_model.safetensors'}: tensor base_model" in told
    assert not (tmp_path / "out").exists()


def test_a_damaged_entry_is_one_line(
    measured: Measured, pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(pair.base, "team/base")
    zoo.add(measured.adapters["lora"], "team/bot", base="team/base")
    digest = zoo.show("team/bot")[1].files()["adapter_model.safetensors"][0].digest
    (blob,) = [path for path in (tmp_path / "zoo").rglob(f"*{digest[2:]}*") if path.is_file()]
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    own = ["--base", str(pair.base), "--tasks", "colours", "--task-dir", str(task_dir), "--out", str(tmp_path / "out")]
    for more in ([], ["--attach"]):
        assert main(["eval", "bot=team/bot", *own, "--zoo", str(tmp_path / "zoo"), *more]) == 3
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        assert "adapter_model.safetensors of team/bot@1) is damaged; repair it" in told
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_of_version_2() -> None:
    """Programs that know version 1 only know no adapters."""
    adapter = subject("bot", "adapter", identity="c" * 64, recipe="lora-r4", ratio=20.0)
    with pytest.raises(ValueError, match="an adapter in a report of version 1"):
        report(subjects=[adapter], scores=[], agreement=[], overlap=[], disagreements=[], reference=None)
    data = report().model_dump(mode="json")
    assert data["schema_version"] == 1
