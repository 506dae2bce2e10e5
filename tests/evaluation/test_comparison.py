"""compare: every method on the same samples, deltas decoupled, direct compressions restored, artifacts used again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from evaluation.reports import fidelity, paired, report, score
from pairs import Recorder, write_data

from deltacompress.artifact.delta import load_delta
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import CalibrationSpec, Recipe
from deltacompress.errors import InputError, Interrupted, OutputError
from deltacompress.evaluation import compare, comparison
from deltacompress.evaluation.comparison import Comparison
from deltacompress.evaluation.methods.names import DONORS, METHODS, load_method
from deltacompress.files.content import list_content
from deltacompress.reporter import SILENT

if TYPE_CHECKING:
    from pairs import Pair

DIRECT = """
name: direct
scope: full
calibration: {samples: 8, seq_len: 16}
rules:
  - {kind: linear, codec: obs, bits: 4, block_size: 16}
  - {codec: exact}
"""


def test_every_method_is_known() -> None:
    for name in METHODS.split(","):
        load_method(DONORS.get(name, name))
    for path in list_content("evals/baselines", ".yaml"):
        assert Recipe.load(path).name == path.stem
    with pytest.raises(InputError, match="unknown method 'gptq-direct'; did you mean gptq-direct-4bit"):
        load_method("gptq-direct")


@pytest.mark.usefixtures("lm_eval")
def test_methods_in_one_table(pair: Pair, task_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text(DIRECT)
    out = tmp_path / "out"
    options: dict[str, Any] = {
        "tasks": ["colours"], "task_dir": task_dir, "out": out, "calibration": pair.data, "limit": 8,
        "methods": ["rtn-4bit", str(tmp_path / "direct.yaml")],
    }  # fmt: skip
    found = compare(pair.base, pair.finetuned, **options)
    rows = {row["method"]: row for row in found.to_json()["rows"]}
    assert rows.keys() == {"finetuned", "base", "rtn-4bit", "direct"}
    assert found.report.subject("rtn-4bit").role == "delta"
    direct = found.report.subject("direct")
    assert (direct.role, direct.recipe) == ("checkpoint", "direct")
    assert direct.ratio is not None
    assert direct.bytes < found.report.subject("finetuned").bytes
    assert rows["direct"]["compress_seconds"] > 0
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    before = (out / "artifacts" / "direct" / "manifest.json").stat().st_mtime_ns
    assert compare(pair.base, pair.finetuned, **options).report.scores == found.report.scores
    assert (out / "artifacts" / "direct" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="made with another calibration data, samples, sequence length or seed"):
        compare(pair.base, pair.finetuned, **(options | {"seed": 1}))
    with pytest.raises(InputError, match="another calibration data"):
        compare(pair.base, pair.finetuned, **(options | {"samples": 6}))
    small = options | {"samples": 6, "seq_len": 12, "out": tmp_path / "small"}
    compare(pair.base, pair.finetuned, **small)
    calibration = load_delta(tmp_path / "small" / "artifacts" / "direct").manifest.calibration
    assert calibration is not None
    assert (calibration.samples, calibration.seq_len, calibration.seed) == (6, 12, 0)
    with pytest.raises(InputError, match=r"named twice; name each once$"):
        compare(pair.base, pair.finetuned, **(options | {"methods": ["rtn-4bit", "rtn-4bit"]}))


@pytest.mark.usefixtures("lm_eval")
def test_a_picture_of_others_is_not_replaced_unasked(
    pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "compress", None)  # told before the work
    (tmp_path / "comparison.png").write_text("mine")
    with pytest.raises(OutputError, match=r"comparison\.png: would be replaced, and no earlier run left it there"):
        compare(pair.base, pair.finetuned, tasks=["colours"], task_dir=task_dir, out=tmp_path, calibration=pair.data)
    assert (tmp_path / "comparison.png").read_text() == "mine"


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize("stops", ["compress", "evaluate"])
def test_who_interrupts_is_told_of_no_option_that_is_not_there(
    pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt if stops == "evaluate" else Interrupted("interrupted", way_out="again with resume=True")

    out = tmp_path / "out"
    options: dict[str, Any] = {"tasks": ["colours"], "out": out, "calibration": pair.data, "task_dir": task_dir}
    with monkeypatch.context() as patched:
        patched.setattr(comparison, stops, interrupted)
        with pytest.raises(Interrupted) as caught:
            compare(pair.base, pair.finetuned, methods=["rtn-4bit"], **options)
    assert str(caught.value) == f"interrupted; what is finished stays in {out}: run it again to go on"


def work_in(folder: Path, pair: Pair, calibration: Path, *, force: bool = False) -> comparison._Work:
    checkpoints = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    return comparison._Work(*checkpoints, folder, calibration, None, None, 0, "cpu", force, SILENT)


def test_artifacts_of_other_calibration_data_are_not_used_again(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text(DIRECT)
    recipe = Recipe.load(tmp_path / "direct.yaml")
    path, seconds = work_in(tmp_path / "out", pair, pair.data).compressed("direct", recipe)
    again = work_in(tmp_path / "out", pair, pair.data)
    assert again.compressed("direct", recipe) == (path, seconds)
    (tmp_path / "out" / "compress-seconds.json").unlink()
    assert again.compressed("direct", recipe) == (path, None)
    other = write_data(tmp_path / "other.jsonl", records=70)
    with pytest.raises(InputError, match="another calibration data"):
        work_in(tmp_path / "out", pair, other).compressed("direct", recipe)


def test_nothing_is_told_of_options_that_were_not_given(pair: Pair, tmp_path: Path) -> None:
    told = Recorder()
    work = replace(work_in(tmp_path / "out", pair, pair.data), reporter=told)
    work.compressed("rtn-4bit", load_method("rtn-4bit"))
    assert told.notes == []


@pytest.mark.parametrize("left", ['{"a": 1', "", "[]", '{"a": "b"}', "[" * 100_000, "\xff"])
def test_times_that_a_kill_cut_short_are_forgotten(pair: Pair, tmp_path: Path, left: str) -> None:
    (tmp_path / "direct.yaml").write_text(DIRECT)
    recipe, times = Recipe.load(tmp_path / "direct.yaml"), tmp_path / "out" / "compress-seconds.json"
    times.parent.mkdir()
    times.write_text(left, encoding="latin-1")
    work = work_in(tmp_path / "out", pair, pair.data)
    path, seconds = work.compressed("direct", recipe)
    assert json.loads(times.read_text()) == {load_delta(path).manifest.digest: seconds}


def test_a_damaged_artifact_is_not_measured(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text(DIRECT)
    recipe, work = Recipe.load(tmp_path / "direct.yaml"), work_in(tmp_path / "out", pair, pair.data)
    path, _ = work.compressed("direct", recipe)
    shard = next(path.glob("*.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(OutputError, match="direct: holds a damaged artifact"):
        work.compressed("direct", recipe)
    assert work_in(tmp_path / "out", pair, pair.data, force=True).compressed("direct", recipe)[1] is not None
    assert shard.read_bytes() == raw


def test_a_restored_model_of_others_is_not_replaced_unasked(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text(DIRECT)
    work = work_in(tmp_path / "out", pair, pair.data)
    path, _ = work.compressed("direct", Recipe.load(tmp_path / "direct.yaml"))
    mine = shutil.copytree(pair.finetuned, tmp_path / "out" / "direct.restored")
    fingerprint = Checkpoint.open(mine).fingerprint()
    with pytest.raises(OutputError, match=r"holds another checkpoint; .* replace it with force=True"):
        work.restored(path)
    assert Checkpoint.open(mine).fingerprint() == fingerprint


def test_what_an_artifact_restores_to_follows_the_artifact(pair: Pair, tmp_path: Path) -> None:
    work = work_in(tmp_path / "out", pair, pair.data)
    found = []
    for bits in (4, 2):
        (tmp_path / "direct.yaml").write_text(DIRECT.replace("bits: 4", f"bits: {bits}"))
        path, _ = work.compressed("direct", Recipe.load(tmp_path / "direct.yaml"))
        if found:
            with pytest.raises(OutputError, match="holds another checkpoint"):
                work.restored(path)
            work_in(tmp_path / "out", pair, pair.data, force=True).restored(path)
        restored = work.restored(path)
        before = (restored / "config.json").stat().st_mtime_ns
        assert (work.restored(path) / "config.json").stat().st_mtime_ns == before
        assert restored == tmp_path / "out" / "direct.restored"
        found.append(Checkpoint.open(restored).fingerprint())
        shutil.rmtree(path)  # as the message advises; its restored checkpoint stays
    assert found[0] != found[1]


def test_baselines_belong_to_their_donor_and_their_data(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = "  - {kind: linear, codec: rtn, bits: BITS}\n  - {codec: exact}\n"
    donor = "name: donor\ncalibration: {samples: 8, seq_len: 16}\nrules:\n" + rules
    monkeypatch.setitem(DONORS, "low-rank", str(tmp_path / "donor.yaml"))
    (tmp_path / "donor.yaml").write_text(donor.replace("BITS", "4"))
    bitdelta = load_method("bitdelta").model_copy(update={"calibration": CalibrationSpec(samples=8, seq_len=16)})
    work = work_in(tmp_path / "out", pair, pair.data)
    made = work.at_equal_bytes("low-rank"), work.compressed("bitdelta", bitdelta)
    assert [path.name for path, _ in made] == ["low-rank", "bitdelta"]
    assert (work.at_equal_bytes("low-rank"), work.compressed("bitdelta", bitdelta)) == made
    other = work_in(tmp_path / "out", pair, write_data(tmp_path / "other.jsonl", records=70))
    assert other.at_equal_bytes("low-rank") == made[0]  # looks at no data, nor does its donor
    with pytest.raises(InputError, match="bitdelta: holds an artifact that was made with another calibration data"):
        other.compressed("bitdelta", bitdelta)
    (tmp_path / "donor.yaml").write_text(donor.replace("BITS", "2"))
    shutil.rmtree(tmp_path / "out" / "donor")
    with pytest.raises(InputError, match="low-rank: holds an artifact that was made with another recipe"):
        work.at_equal_bytes("low-rank")


def test_a_row_of_the_table() -> None:
    """A loss is negative, in points; no change is 0, not -0."""
    lossless = score("sql", "int2", 0.33, paired=paired(0.0, 0.01), fidelity=fidelity(0.001))
    scores = [score("sql", "finetuned", 0.33), lossless, score("sql", "sparse", 0.16, paired=paired(0.17, 0.19))]
    found = Comparison(report(scores=scores), Path("out")).to_json()
    assert found["out"] == "out"
    fine, same, worse = found["rows"]
    assert (fine["method"], fine["score"], fine["stderr"], fine["change"], fine["kl"]) == (
        "finetuned",
        33,
        1,
        None,
        None,
    )
    assert (str(same["change"]), same["p"], same["kl"], same["top1"], same["ratio"]) == ("0.0", 0.2, 0.001, 98, 10)
    assert (worse["change"], worse["score"], worse["top1"]) == (pytest.approx(-17), 16, None)
