"""`bench pairs`: what it refuses before any work, a compression in a process of its own, the arithmetic of scores."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_pair.data import write_task
from pairs import Pair, files_of

from deltacompress.artifact.delta import load_delta
from deltacompress.bench.pairs import artifacts
from deltacompress.bench.pairs import run as pairs
from deltacompress.cli.main import main
from deltacompress.cli.shown.failures import in_json
from deltacompress.demo.score import Answers, TaskScore
from deltacompress.errors import DeltaCompressError, InputError, Interrupted, OutputError

TASK = "palindrome"
TOLD_IN_JSON = in_json(InputError("no such file", where="train.jsonl", way_out="pass one"))


@pytest.fixture
def demo(repo_root: Path, tmp_path: Path) -> dict[str, Any]:
    """Options for the shipped pair and freshly generated data of one task."""
    write_task(tmp_path / "data" / TASK, TASK, seed=0)
    return {
        "models": repo_root / "registry" / "demo", "data": tmp_path / "data", "recipes": ["lossless"],
        "out": tmp_path / "out", "limit": 2,
    }  # fmt: skip


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("worked although the input could have been refused before")

    monkeypatch.setattr(pairs, "costs", never)
    monkeypatch.setattr(pairs, "score_model", never)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"models": Path("gone")}, "gone: no such directory"),
        ({"data": Path("gone")}, "gone: no such directory"),
        ({"models": Path(__file__).parent}, "no folder there has train.jsonl"),
        ({"tasks": [TASK, "majority"]}, "majority/train.jsonl: no such file"),
        ({"tasks": [TASK, TASK]}, f"tasks: {TASK} is given twice"),
        ({"recipes": []}, "recipes: names none"),
        ({"recipes": ["lossless", "int5"]}, "no recipe named 'int5'"),
        ({"recipes": ["lossless", "a/lossless.yaml"]}, "recipes: lossless is given twice"),
        ({"precisions": []}, "precisions: names none; give one or more of fp32, bf16"),
        ({"precisions": ["fp32", "bf16"]}, "precisions: fp32,bf16; give one or more of fp32, bf16-autocast"),
        (
            {"precisions": ["fp32", "fp32"]},
            "precisions: fp32,fp32; give one or more of .*, each once",
        ),
        ({"device": "gpu"}, "device gpu: give one of auto, cpu, cuda"),
        ({"score_device": "auto"}, "score_device auto: give one of cpu, cuda"),
        ({"out": Path(__file__)}, "test_pairs.py: is no directory; choose another out"),
        ({"device": "cuda"}, "device cuda: PyTorch sees no GPU here"),
        ({"score_device": "cuda"}, "score_device cuda: PyTorch sees no GPU here"),
    ],
)
def test_options_are_refused_before_the_work(
    demo: dict[str, Any], change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=told):
        pairs.run(**(demo | change))
    assert not demo["out"].exists()


@pytest.mark.usefixtures("no_work")
def test_nothing_is_written_where_it_is_read(demo: dict[str, Any]) -> None:
    out = demo["data"] / "out"
    with pytest.raises(OutputError, match=r"palindrome\.lossless: lies inside .*data, which is read"):
        pairs.run(**(demo | {"out": out}))
    assert not out.exists()


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("models/base", None, "base: no such directory"),
        (f"models/{TASK}/config.json", "{", "config.json"),
        (f"models/{TASK}/tokenizer.json", "{", "the tokenizer cannot be loaded"),
        (f"models/{TASK}/model.safetensors", None, "model.safetensors"),
        (f"data/{TASK}/validation.jsonl", '{"prompt": 5, "completion": "x"}', "validation.jsonl:1: field `prompt`"),
        (f"data/{TASK}/validation.jsonl", '{"prompt": "a", "completion": "b", "choices": 3}', ":1: choices must be"),
        (
            f"data/{TASK}/validation.jsonl",
            json.dumps({"prompt": "a", "completion": "7" * 600}),
            "validation.jsonl: completion '7777.*more than the model's 512",
        ),
        ("out/palindrome.lossless/mine", "a file", "palindrome.lossless: exists already"),
    ],
)
def test_files_are_refused_before_the_work(
    demo: dict[str, Any], tmp_path: Path, file: str, content: str | None, told: str
) -> None:
    shutil.copytree(demo["models"], tmp_path / "models")
    path = tmp_path / file
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DeltaCompressError, match=told):
        pairs.run(**(demo | {"models": tmp_path / "models"}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_loses_nothing_scores_the_same(demo: dict[str, Any], device: str) -> None:
    precisions = ["fp32", "bf16-autocast"]
    found = pairs.run(**(demo | {"limit": 40, "score_device": device, "precisions": precisions})).to_json()
    rows = {(row["method"], row["precision"]): row for row in found["rows"]}
    precise, coarse = rows["fine-tuned", "fp32"], rows["fine-tuned", "bf16-autocast"]
    assert 0 < precise["accuracy"] < 100
    assert coarse["loss"] != precise["loss"]
    assert coarse["loss"] == pytest.approx(precise["loss"], rel=0.1)  # bf16 has 8 bits; an H100 was 3.5 % away
    for precision, kl in (("fp32", 0), ("bf16-autocast", None)):
        lossless = rows["lossless", precision]
        assert (lossless["difference"], lossless["excess_loss"], lossless["kl"]) == (0, 0, kl)
    assert [path.name for path in demo["out"].iterdir()] == [f"{TASK}.lossless"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_is_of_products_alone(device: str) -> None:
    linear = torch.nn.Linear(4, 4, device=device)
    for precision, dtype in (("fp32", torch.float32), ("bf16-autocast", torch.bfloat16)):
        with pairs.arithmetic(precision, device):
            assert linear(torch.ones(4, device=device)).dtype == dtype
    assert linear.weight.dtype == torch.float32


def test_what_is_there_is_measured_again_only_if_it_is_the_same(
    demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pairs.run(**demo).rows
    compress = artifacts._compress
    monkeypatch.setattr(artifacts, "_compress", None)
    again = pairs.run(**demo).rows
    spent = {"seconds": None, "peak_memory_gb": None, "backend": None}
    assert [row | spent for row in first] == [row | spent for row in again]
    assert again[1]["seconds"] is None
    shard = next((demo["out"] / f"{TASK}.lossless").glob("delta-*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(OutputError, match=r"palindrome\.lossless: holds a damaged artifact .*force=True"):
        pairs.run(**demo)
    shard.write_bytes(whole)
    other = tmp_path / "other" / "lossless.yaml"
    other.parent.mkdir()
    other.write_text("name: lossless\ndescription: another\nrules: [{codec: exact}]\n")
    with pytest.raises(OutputError, match=r"palindrome\.lossless: holds an artifact that was made with another recipe"):
        pairs.run(**(demo | {"recipes": [str(other)]}))
    monkeypatch.setattr(artifacts, "_compress", compress)
    replaced = pairs.run(**(demo | {"recipes": [str(other)]}), force=True).rows
    assert replaced[1]["seconds"] is not None
    assert load_delta(demo["out"] / f"{TASK}.lossless").manifest.recipe["description"] == "another"


def test_interrupted_it_says_how_to_go_on(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pairs, "costs", stopped)
    with pytest.raises(Interrupted, match=r"what is finished stays in .*out: run again with resume=True"):
        pairs.run(**demo)


def test_the_command_passes_its_options_on(
    tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    def noted(**options: Any) -> pairs.PairsBench:
        seen.append(options)
        return pairs.PairsBench("CPU", ({"task": "good", "seed": 3, "backend": "CPU, 2 threads"},))

    monkeypatch.setattr(pairs, "run", noted)
    monkeypatch.setattr("deltacompress.cli.bench.pairs.check_driver", lambda *_: None)  # there may be no GPU here
    shipped = repo_root / "registry" / "demo"
    argv = ["bench", "pairs", str(shipped), str(shipped / "data"), "--out", str(tmp_path)]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"task": "good", "seed": 3, "backend": "CPU, 2 threads"}]
    more = ["--seed", "3", "--device", "cpu", "--score-device", "cuda", "--precisions", "fp32,bf16-autocast"]
    assert main([*argv, *more, "--resume"]) == 0
    keys = ("seed", "device", "score_device", "precisions", "resume")
    assert [[options[key] for key in keys] for options in seen] == [
        [None, "auto", "cpu", ["fp32"], False],
        [3, "cpu", "cuda", ["fp32", "bf16-autocast"], True],
    ]


def test_seed_device_and_resume_reach_the_compression(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def noted(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 2, "", "error: stopped\n")

    monkeypatch.setattr(subprocess, "run", noted)
    for options in ({}, {"seed": 5, "device": "cpu", "resume": True}):
        with pytest.raises(InputError, match="stopped"):
            pairs.run(**demo, **options)
    assert [command[command.index("--device") + 1 :] for command in commands] == [
        ["auto"],
        ["cpu", "--seed", "5", "--resume"],
    ]


def _job(pair: Pair, out: Path) -> artifacts.PairJob:
    return artifacts.PairJob(pair.base, pair.finetuned, "lossless", pair.data, out)


def test_a_compression_has_a_process_of_its_own(pair: Pair, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pair.compress(tmp_path / "here", recipe="lossless")
    capfd.readouterr()
    told = artifacts.costs(_job(pair, tmp_path / "alone"), device="cpu", seed=None, resume=False)
    assert capfd.readouterr() == ("", "")
    assert told["ratio"] > 1
    assert told["seconds"] > 0
    assert told["peak_memory_gb"] > 0.05
    assert told["backend"].startswith("CPU")
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "here")


def test_what_an_earlier_run_began_has_no_time_of_its_own(pair: Pair, tmp_path: Path) -> None:
    job = _job(pair, tmp_path / "out")
    job.partial.mkdir()
    (job.partial / "step-outer.safetensors").touch()  # of a run without identity.json, so compress starts over
    told = artifacts.costs(job, device="cpu", seed=None, resume=True)
    assert (told["seconds"], told["peak_memory_gb"]) == (None, None)


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        (f"compressing (3 steps)\n{TOLD_IN_JSON}\n", "train.jsonl: no such file; pass one"),
        ("Killed\n", "Killed"),
        ("42\n", "42"),
        ("", "it ended with code 2"),
    ],
)
def test_its_error_is_passed_on(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, told: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 2, "", stderr))
    with pytest.raises(InputError) as caught:
        artifacts.costs(_job(pair, tmp_path / "out"), device="cpu", seed=None, resume=False)
    assert str(caught.value) == f"compressing {pair.finetuned} with lossless: {told}"


def _answers(right: list[bool], loss: float) -> Answers:
    return Answers(TaskScore(sum(right) / len(right), loss, len(right)), right)


def test_the_figures_of_known_answers() -> None:
    """100 samples: 80 right before, 61 now; 20 lost and 1 won: p is 2 (1 + 21) / 2^21."""
    before = _answers([True] * 80 + [False] * 20, 0.5)
    after = _answers([True] * 60 + [False] * 20 + [True] + [False] * 19, 0.7)
    assert pairs._figures(after, before) == {
        "accuracy": pytest.approx(61),
        "stderr": pytest.approx(100 * (0.61 * 0.39 / 100) ** 0.5),
        "difference": pytest.approx(-19),
        "mcnemar_p": pytest.approx(44 / 2**21),
        "loss": 0.7,
    }
    assert pairs._figures(before, after)["difference"] == pytest.approx(19)


def test_rows_are_those_of_their_model_and_precision(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose answers are known: each row has its own, against the fine-tuned model's in the same arithmetic."""
    fine, coarse = _answers([True, True], 0.5), _answers([True, False], 0.75)
    restored = _answers([False, True], 1.5)
    known = {("fine", False): fine, ("fine", True): coarse, ("restored", False): restored, ("restored", True): fine}
    folders: list[Path] = []
    monkeypatch.setattr(pairs, "load_model", lambda path, device: "fine" if path.name == TASK else "restored")
    monkeypatch.setattr(pairs, "restore", lambda artifact, base, out: folders.append(artifact) or out)
    monkeypatch.setattr(pairs, "score_model", lambda model, *_: known[model, torch.is_autocast_enabled("cpu")])
    monkeypatch.setattr(pairs, "divergence", lambda *models_and_data: (models_and_data[:2] == ("fine", "restored")) / 4)
    spent = {
        "ratio": 7.0,
        "linear_bits_per_weight": 1.5,
        "seconds": 3.0,
        "peak_memory_gb": 2.0,
        "seed": 0,
        "backend": "",
    }
    monkeypatch.setattr(pairs, "costs", lambda *_, **__: spent)
    demo["out"].mkdir()
    found = pairs.run(**(demo | {"precisions": ["fp32", "bf16-autocast"]})).to_json()["rows"]
    keys = ("method", "precision", "accuracy", "difference", "loss", "excess_loss", "kl", "ratio")
    assert [tuple(row[key] for key in keys) for row in found] == [
        ("fine-tuned", "fp32", 100, 0, 0.5, None, None, None),
        ("fine-tuned", "bf16-autocast", 50, 0, 0.75, None, None, None),
        ("lossless", "fp32", 50, -50, 1.5, 1.0, 0.25, 7.0),
        ("lossless", "bf16-autocast", 100, 50, 0.5, -0.25, None, 7.0),
    ]
    assert folders == [demo["out"] / f"{TASK}.lossless"]


def test_costs_are_those_that_compressing_told(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    pair.compress(out, recipe="lossless")
    told = {"seconds": 3.5, "peak_memory_bytes": 2_500_000_000, "backend": "CPU, 2 threads"}
    monkeypatch.setattr(artifacts, "_compress", lambda *_, **__: told)
    monkeypatch.setattr(artifacts.PairJob, "finished", False)
    found = artifacts.costs(_job(pair, out), device="cpu", seed=None, resume=False)
    assert (found["seconds"], found["peak_memory_gb"], found["backend"]) == (3.5, 2.5, "CPU, 2 threads")
    stored = sum(file.stat().st_size for file in out.iterdir())
    whole = sum(file.stat().st_size for file in pair.finetuned.iterdir())
    assert found["ratio"] == pytest.approx(whole / stored, rel=1e-3)
