"""What is measured, against an independent reference: transformers' own forward of what an artifact restores to."""

from __future__ import annotations

import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Semaphore, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, changed
from transformers import AutoModelForCausalLM

from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.restoration import restore
from deltacompress.budget.measuring import judge as judging
from deltacompress.budget.measuring import ladder, probes
from deltacompress.budget.measuring import pair as measuring
from deltacompress.budget.measuring import walk as walking
from deltacompress.budget.measuring.judge import Judge, error_by_record
from deltacompress.budget.measuring.measured import Measured, Walked
from deltacompress.budget.measuring.sizes import fixed_bytes, group_bytes, part_bytes, to_code
from deltacompress.budget.measuring.walk import walk
from deltacompress.budget.parts import survey_of
from deltacompress.budget.recipe import recipe_of
from deltacompress.budget.rungs import CALIBRATED, COARSE, DRAWN, REFERENCE, RUNGS, WIDEST, template
from deltacompress.calibration.data import calibration_tokens
from deltacompress.calibration.held_back import FEWEST, Enough, HeldBack, Records, batched, held_back
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.encoded import Encoded, LinearToEncode, restore_tensor
from deltacompress.codecs.recipe import CalibrationSpec, Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.prepare import Opened, Prepared, open_job, prepare
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.planning import Plan
from deltacompress.errors import CalibrationError, NumericsError
from deltacompress.lossless import coder
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.reporter import SILENT, Reporter

SPEC = CalibrationSpec(samples=8, seq_len=16)


def job_of(pair: Pair, out: Path) -> CompressionJob:
    return CompressionJob.of(
        pair.base,
        pair.finetuned,
        recipe=template(),
        out=out,
        calibration=pair.data,
        samples=8,
        seq_len=16,
        device="cpu",
    )


def prepared(pair: Pair, out: Path) -> tuple[Opened, Prepared]:
    job = job_of(pair, out)
    inputs = Inputs()
    opened = open_job(job, inputs, SILENT)
    found = prepare(job, opened.base, opened.finetuned, opened.where, inputs, SILENT)
    found.scan.close()
    return opened, found


def walked(pair: Pair, out: Path, reporter: Reporter = SILENT) -> tuple[Walked, list[HeldBack]]:
    opened, found = prepared(pair, out)
    batches = batched(held_back(opened.finetuned, pair.data, SPEC, Enough(200, 0, 200)), at_most=2)
    assert found.skeleton is not None
    assert found.tokens is not None
    ids = found.tokens.ids
    measured = walk(found.plan, found.skeleton, ids, batches, CALIBRATED, opened.coder, reporter)
    return measured, batches


def kl_of(pair: Pair, restored: Path, batches: list[HeldBack]) -> float:
    """Mean over all tokens."""
    return float(torch.cat(kls_of(pair, restored, batches)).mean())


def kls_of(pair: Pair, restored: Path, batches: list[HeldBack]) -> list[torch.Tensor]:
    """By transformers' models in fp32, one record at a time, no padding."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (pair.finetuned, restored)]
    found_of = []
    for batch in batches:
        for ids, written, given in zip(batch.ids, batch.written, batch.given, strict=True):
            length = int((written | given).sum()) + 1
            with torch.no_grad():
                target, found = (
                    torch.log_softmax(model(input_ids=ids[None, :length]).logits[0].double(), -1) for model in models
                )
            found_of.append((target.exp() * (target - found)).sum(-1)[written[:length]])
    return found_of


@pytest.mark.parametrize("which", [1, 4, -1])
def test_a_probe_is_the_kl_of_an_artifact_with_that_group_alone(
    pair: Pair, tmp_path: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else exact, the group meets the fine-tuned model's inputs in a real compression, too.

    Of each record as well, some of them in two pieces of logits.
    """
    monkeypatch.setattr(probes, "_LOGITS_AT_A_TIME", 7 * Checkpoint.open(pair.finetuned).config["vocab_size"])
    found, batches = walked(pair, tmp_path / "none")
    one: Measured = found.groups[which]
    rule = {"name": list(one.names), **RUNGS[one.reference].fields, "asymmetric": 0, "refine_sweeps": 0}
    recipe = Recipe.parse({"name": "one", "rules": [rule, {"codec": "exact"}]})
    pair.compress(tmp_path / "delta", recipe=recipe)
    restored = restore(tmp_path / "delta", base=pair.base, out=tmp_path / "restored")
    per = kls_of(pair, restored, batches)
    assert one.probe.kl[0] / found.tokens[0] == pytest.approx(float(torch.cat(per).mean()), rel=0.02)
    assert one.probe.records.tolist() == pytest.approx([float(record.sum()) for record in per], rel=0.05)
    assert len(batches) == 2
    assert any(len({int(row.sum()) for row in one.written}) > 1 for one in batches)  # so some are padded


def test_the_judge_says_what_transformers_says(pair: Pair, artifact: Path, tmp_path: Path) -> None:
    opened, found = prepared(pair, tmp_path / "none")
    batches = batched(held_back(opened.finetuned, pair.data, SPEC, Enough(200, 0, 200)), at_most=2)
    assert found.skeleton is not None
    judged = Judge(found.skeleton, opened.finetuned, batches).judge(str(artifact), opened.base)
    restored = restore(artifact, base=pair.base, out=tmp_path / "restored")
    records = kls_of(pair, restored, batches)
    assert len(batches) == 2
    assert len(records) > 8
    assert judged.kl == pytest.approx(float(torch.cat(records).mean()), rel=1e-3)
    assert judged.tokens == sum(int(batch.written.sum()) for batch in batches)
    left_out = [float(torch.cat(records[:at] + records[at + 1 :]).mean()) for at in range(len(records))]
    jackknife = torch.tensor(left_out, dtype=torch.float64).var(unbiased=False).item() * (len(records) - 1)
    assert judged.error == pytest.approx(jackknife**0.5, rel=0.1)
    assert judged.bound == judged.kl + 1.645 * judged.error


def test_a_whole_model_has_all_groups_as_one_rung_restores_them(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the embedding as its reference, which an artifact of its own says."""
    made, weights = walking._Coded.restored, dict[str, dict[str, torch.Tensor]]()

    def restored(self: Any, rung: str) -> dict[str, torch.Tensor]:
        found = made(self, rung)
        weights.setdefault(rung, {}).update(found)
        return found

    monkeypatch.setattr(walking._Coded, "restored", restored)
    found, batches = walked(pair, tmp_path / "none")
    embedding = found.groups[0]
    rule = {"name": list(embedding.names), **RUNGS[embedding.reference].fields}
    pair.compress(tmp_path / "delta", recipe=Recipe.parse({"name": "one", "rules": [rule, {"codec": "exact"}]}))
    model = AutoModelForCausalLM.from_pretrained(
        restore(tmp_path / "delta", base=pair.base, out=tmp_path / "restored"), dtype=torch.float32
    )
    for rung, whole in found.whole.items():
        assert {*embedding.names, *weights[rung]} == {name for one in found.groups for name in one.names}
        model.load_state_dict(weights[rung], strict=False)
        model.save_pretrained(tmp_path / "whole")
        per = kls_of(pair, tmp_path / "whole", batches)
        assert whole.kl[0] / found.tokens[0] == pytest.approx(float(torch.cat(per).mean()), rel=1e-3), rung
        assert whole.records.tolist() == pytest.approx([float(record.sum()) for record in per], rel=1e-2), rung


@pytest.mark.parametrize("copies", [1, 5])
def test_tokens_of_one_record_are_one_draw(copies: int) -> None:
    """As often as they are repeated."""
    values = torch.rand(40, generator=torch.Generator().manual_seed(0))
    found = error_by_record(values.repeat_interleave(copies), torch.arange(40).repeat_interleave(copies))
    assert found == pytest.approx(float(values.std()) / 40**0.5, rel=1e-6)


def test_no_two_rungs_of_a_layer_are_in_memory(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As restored weights: a layer's take four bytes each."""
    made = walking._Coded.restored
    live, most, asked = Counter[str](), Counter[str](), Counter[str]()

    def restored(self: Any, rung: str) -> dict[str, torch.Tensor]:
        found = made(self, rung)
        asked.update(list(found))
        for name, value in found.items():
            live[name] += 1
            most[name] = max(most[name], live[name])
            weakref.finalize(value, live.subtract, [name])
        return found

    monkeypatch.setattr(walking._Coded, "restored", restored)
    found, _ = walked(pair, tmp_path / "none")
    of_layers = {name for one in found.groups for name in one.names if ".layers." in name}
    assert of_layers
    for name in of_layers:
        assert (asked[name], most[name], live[name]) == (5, 1, 0), name


def test_rungs_are_in_order_and_groups_share_inputs(pair: Pair, tmp_path: Path) -> None:
    found, _ = walked(pair, tmp_path / "none")
    assert [len(one.names) for one in found.groups] == [1, 3, 1, 2, 1, 3, 1, 2, 1, 1]
    for one in found.groups[1:]:
        assert [step.rung for step in one.steps] == [rung.name for rung in CALIBRATED]
        drawn = [step for step in one.steps if RUNGS[step.rung].drawn]
        steps = [step for step in one.steps if not RUNGS[step.rung].drawn]
        assert steps[0].bytes < steps[3].bytes < steps[-1].bytes  # frames outweigh a step between two
        assert sorted(steps[1:], key=lambda step: -step.loss) == steps[1:]  # of the first hardly a code is left
        assert drawn[0].bytes <= drawn[3].bytes <= drawn[-1].bytes  # rows start on bytes
        assert drawn[0].loss > drawn[3].loss > drawn[-1].loss > 1 / 2  # signs of half of them are half of it all


def test_rungs_of_whole_models_are_measured_on_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others on some of them: loss and bytes in proportion to those of the reference, or of signs by lot."""
    monkeypatch.setattr(ladder, "LEAST_ROWS", 1)
    monkeypatch.setattr(ladder, "SHARE", 4)
    chance = torch.Generator().manual_seed(0)
    delta, inputs = torch.randn(64, 32, generator=chance), torch.randn(200, 32, generator=chance)
    delta[1::4] *= 3  # as rows that are not looked at
    monkeypatch.setattr(ladder, "told_of_coded", lambda *_: 1000)
    fine = RUNGS["4 bits, steps of 0.5"]
    hessian = 2 / len(inputs) * inputs.T.double() @ inputs.double()
    hessian += 0.3 * hessian.diagonal().mean() * torch.eye(32, dtype=torch.float64)

    def climbed(linear: LinearToEncode) -> dict[str, ladder.Step]:
        sums = HessianAccumulator(32, device=torch.device("cpu"), asymmetric=False)
        sums.add(inputs)
        plan: Any = SimpleNamespace(name="w")
        steps, encoded = ladder.Ladder([plan], [linear], sums, coder("none")).climb(CALIBRATED)
        assert set(encoded) == {one.name for one in (REFERENCE, COARSE, WIDEST, DRAWN)}
        for name, found in encoded.items():
            zeros = torch.zeros_like(linear.delta)
            one = found["w"]
            error = restore_tensor(one.format, one.params, one.parts, zeros, linear.delta, "w") - linear.delta
            lost, energy = (float(((of.double() @ hessian) * of.double()).sum()) for of in (error, linear.delta))
            assert next(step.loss for step in steps if step.rung == name) == pytest.approx(lost / energy, rel=1e-3)
        return {step.rung: step for step in steps}

    every, few = climbed(LinearToEncode("w", delta, delta)), climbed(LinearToEncode("w", delta[::4], delta[::4]))
    assert every[fine.name].bytes == 1000 + sum(4 * 64 * 32 // 8 for _ in "w") + 64 * 2
    assert every[fine.name].loss / every[REFERENCE.name].loss == pytest.approx(
        few[fine.name].loss / few[REFERENCE.name].loss, rel=0.1
    )


def an_eighth_of_a_ladder(monkeypatch: pytest.MonkeyPatch) -> tuple[ladder.Ladder, LinearToEncode]:
    """Of one linear; and the rows of it that the most rungs are measured on."""
    monkeypatch.setattr(ladder, "LEAST_ROWS", 1)
    monkeypatch.setattr(ladder, "told_of_coded", lambda *_: 1000)
    chance = torch.Generator().manual_seed(0)
    delta, inputs = torch.randn(64, 256, generator=chance), torch.randn(300, 256, generator=chance)
    sums = HessianAccumulator(256, device=torch.device("cpu"), asymmetric=False)
    sums.add(inputs)
    plan: Any = SimpleNamespace(name="w")
    one = ladder.Ladder([plan], [LinearToEncode("w", delta, delta)], sums, coder("zstd"))
    return one, LinearToEncode("w", delta[::8], delta[::8])


def test_bytes_of_some_rows_are_taken_for_all_but_for_frames_and_what_all_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream its frame is there once; tables of a coder that take more where rows are few, as the reference's."""
    one, some = an_eighth_of_a_ladder(monkeypatch)
    zstd = coder("zstd")
    told = {step.rung: step.bytes for step in one.climb(CALIBRATED)[0]}
    frame = len(zstd.encode(b""))
    fine, few = RUNGS["4 bits, steps of 0.5"], dict[str, float]()
    for rung in (fine, REFERENCE):
        parts = one._encoded([some], rung)["w"]
        streams = [len(zstd.encode(part)) for part in to_code(parts)]
        few[rung.name] = sum(frame + 8 * (stream - frame) for stream in streams)
        assert part_bytes(parts, zstd, 8) == few[rung.name]
        assert part_bytes(parts, coder("none"), 8) == 8 * sum(part.nbytes for part in parts.parts.values())
    assert told[fine.name] - few[fine.name] == pytest.approx(told[REFERENCE.name] - few[REFERENCE.name], abs=1)
    assert abs(told[REFERENCE.name] - 1000 - few[REFERENCE.name]) > 2


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_what_no_fewer_codes_make_fewer_bytes_is_told(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the manifest holds; where nothing is coded, all."""
    one, _ = an_eighth_of_a_ladder(monkeypatch)
    one._coder = coder(codec)
    steps = one.climb(CALIBRATED)[0]
    assert len(steps) == len(CALIBRATED)
    assert all(step.fixed == (step.bytes if codec == "none" else 1000) for step in steps)
    assert min(step.bytes for step in steps) > 1000


def test_rungs_that_are_solved_together_lose_what_each_does_by_its_own_damping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, some = an_eighth_of_a_ladder(monkeypatch)
    losses = {step.rung: step.loss for step in one.climb(CALIBRATED)[0]}
    with closing(ladder._Sizes(one._coder, torch.device("cpu"))) as sizes:
        alone = {rung.name: one._step([some], one._encoded([some], rung), sizes)[1] for rung in CALIBRATED}
    for like in (REFERENCE, DRAWN):
        for rung in CALIBRATED:
            if rung.drawn is like.drawn and rung not in (COARSE, WIDEST):
                assert losses[rung.name] / losses[like.name] == pytest.approx(alone[rung.name] / alone[like.name], 1e-3)


def encoded_of(rows: int) -> Encoded:
    return Encoded("none", {}, {"a": torch.arange(rows * 700).to(torch.uint8)})


def test_threads_count_bytes_behind_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lossless codec runs is told to it; a rung is begun once no more than so many wait."""
    entered, begun, go = list[torch.device](), Semaphore(0), Event()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        begun.release()
        assert go.wait(60)
        yield

    monkeypatch.setattr(ladder, "current", current)
    zstd, gpu, waiting = coder("zstd"), torch.device("cuda", 1), range(1, ladder._BEHIND * ladder._CODED_AT_ONCE + 1)
    with closing(ladder._Sizes(zstd, gpu)) as sizes:
        found = [sizes.of([(encoded_of(k), 2.0), (encoded_of(1), 1.0)]) for k in waiting]
        assert all(begun.acquire(timeout=60) for _ in range(ladder._CODED_AT_ONCE))  # beside each other
        Timer(0.2, go.set).start()
        found.append(sizes.of([(encoded_of(3), 2.0)]))
        assert go.is_set()  # it waited for the first
        told = [one() for one in found]
    assert entered == [gpu] * (len(waiting) + 1)
    own = part_bytes(encoded_of(1), zstd)
    assert told == [part_bytes(encoded_of(k), zstd, 2.0) + own for k in waiting] + [
        part_bytes(encoded_of(3), zstd, 2.0)
    ]
    entered.clear()
    with closing(ladder._Sizes(zstd, torch.device("cpu"))) as sizes:
        assert sizes.of([(encoded_of(1), 1.0)])() == own
    assert not entered
    there = torch.empty(10, device="meta")  # of which nothing can be copied
    assert ladder._Sizes(coder("none"), gpu).of([(Encoded("none", {}, {"a": there}), 3.0)])() == 120


@pytest.mark.parametrize(("codec", "at_once"), [("zstd", ladder._CODED_AT_ONCE), ("gdeflate", 1)])
def test_what_no_thread_has_begun_to_count_is_dropped(
    monkeypatch: pytest.MonkeyPatch, codec: str, at_once: int
) -> None:
    """A codec that runs on the GPU itself has one."""
    entered, begun, go = list[torch.device](), Semaphore(0), Event()
    counting: Any = SimpleNamespace(codec=codec, coded_bytes=len)

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        begun.release()
        assert go.wait(60)
        yield

    def failed() -> None:
        with closing(ladder._Sizes(counting, torch.device("cuda", 0))) as sizes:
            for k in range(ladder._BEHIND * at_once):
                sizes.of([(encoded_of(k + 1), 1.0)])
            assert all(begun.acquire(timeout=60) for _ in range(at_once))
            Timer(0.2, go.set).start()
            raise ZeroDivisionError

    monkeypatch.setattr(ladder, "current", current)
    with pytest.raises(ZeroDivisionError):
        failed()
    assert len(entered) == at_once


def test_a_tensor_is_judged_on_a_gpu_where_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    by = Judge.__new__(Judge)
    skeleton: Any = SimpleNamespace(device=torch.device("cuda", 1))
    by._skeleton = skeleton
    monkeypatch.setattr(judging, "free_bytes", lambda device: 6400 * (device.index + 1))
    assert [by._place(numel) for numel in (200, 201)] == [torch.device("cuda", 1), None]
    skeleton.device = torch.device("cpu")
    assert by._place(1) is None


def test_the_judge_reads_no_tensor_that_the_model_does_not_use(pair: Pair, tmp_path: Path) -> None:
    opened, ready = prepared(pair, tmp_path / "none")
    skeleton = ready.skeleton
    assert skeleton is not None
    records = held_back(opened.finetuned, pair.data, SPEC, Enough(100, 0, 100))
    wanted = Judge(skeleton, opened.finetuned, batched(records, at_most=1))._targets
    skeleton._names = [*skeleton._names, "model.mtp.weight"]
    assert not skeleton.uses("model.mtp.weight")
    found = Judge(skeleton, opened.finetuned, batched(records, at_most=1))._targets
    assert torch.equal(wanted[0], found[0])


@pytest.mark.parametrize(("one_in", "which"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [0, 1, 2, 3])])
def test_of_the_base_one_in_so_many_batches_is_asked(pair: Pair, tmp_path: Path, one_in: int, which: list[int]) -> None:
    """As if there were no others; of fewer than two all. The base is not the fine-tuned model."""
    opened, found = prepared(pair, tmp_path / "none")
    batches = batched(held_back(opened.finetuned, pair.data, SPEC, Enough(200, 0, 200)), at_most=4)
    skeleton, pairing = found.skeleton, found.plan.pairing
    assert skeleton is not None
    of = Judge(skeleton, opened.finetuned, batches).against_base(pairing, one_in=one_in)
    wanted = Judge(skeleton, opened.finetuned, [batches[k] for k in which]).against_base(pairing)
    assert len(batches) == 4
    assert of == wanted
    assert of.kl > 0
    assert of.loss != of.finetuned_loss


def test_judging_keeps_to_the_memory_that_was_given(
    pair: Pair, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    @contextmanager
    def limited(device: torch.device, nbytes: int | None) -> Iterator[None]:
        asked.append(nbytes)
        yield

    monkeypatch.setattr(measuring, "limited_memory", limited)
    job = job_of(pair, tmp_path / "out").model_copy(update={"device_memory": 1 << 30})
    surveyed = measuring.survey_pair(job, Inputs(), SILENT)
    surveyed.judge(str(artifact))
    surveyed.against_base()
    assert asked == [1 << 30] * 3


def test_records_run_in_batches_of_about_as_many_tokens() -> None:
    """Of 40 records of 10 to 49 tokens, 1180 in all, at 512 a batch: three, and little to fill up."""
    records: Records = [(list(range(10 + k)), 5) for k in range(40)]
    found = measuring._batches(records, torch.device("cpu"))
    assert len(found) == 3
    assert sum(one.ids.numel() for one in found) < 1.25 * 1180
    assert len(measuring._batches(records[:2], torch.device("cpu"))) == 1
    assert len(measuring._batches(records, torch.device("cuda"))) == 1


def test_as_many_tokens_run_at_once_as_in_a_compression(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    capture = walking.capture_calls

    def captured(skeleton: Any, ids: torch.Tensor, size: int) -> Any:
        asked.append(size)
        return capture(skeleton, ids, size)

    monkeypatch.setattr(walking, "capture_calls", captured)
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 48})
    walked(pair, tmp_path / "none")
    assert asked == [3]  # of 16 tokens each


@pytest.mark.parametrize(
    ("inputs", "seq_len", "samples", "few"),
    [(512, 256, 256, 8), (1025, 256, 256, 9), (3000, 256, 256, 16), (512, 2048, 256, 8), (512, 100, 8, 21)],
)
def test_few_sequences_are_enough_to_measure_by(inputs: int, seq_len: int, samples: int, few: int) -> None:
    """One in 32, of 2048 tokens at least; where linears are wide, twice as many as they have inputs, up to 4096."""
    linear, other = (SimpleNamespace(inputs=size, calibrated=has) for size, has in ((inputs, True), (10**6, False)))
    plan: Any = SimpleNamespace(tensors={"linear": linear, "embedding": other})
    assert measuring._few(CalibrationSpec(samples=samples, seq_len=seq_len), plan) == few


def test_a_walk_sees_these_sequences_alone(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_LEAST_TOKENS", 32)
    monkeypatch.setattr(measuring, "_MORE_TOKENS", 0)

    def seen(_: Plan, __: Any, ids: torch.Tensor, *___: Any) -> Walked:
        raise CalibrationError(f"{tuple(ids.shape)} are seen")

    monkeypatch.setattr(measuring, "walk", seen)
    with pytest.raises(CalibrationError, match=r"\(2, 16\) are seen"):
        measuring.survey_pair(job_of(pair, tmp_path / "none"), Inputs(), SILENT)


def test_a_survey_predicts_the_bytes_of_an_artifact(pair: Pair, tmp_path: Path) -> None:
    opened, ready = prepared(pair, tmp_path / "none")
    found, _ = walked(pair, tmp_path / "none")
    fixed = fixed_bytes(ready.plan, opened.coder)
    survey = survey_of(found, finetuned_bytes=opened.finetuned.nbytes, fixed_bytes=fixed)
    picks = [
        [one.rung for one in group.options].index(
            "2 bits, steps of 2.1" if group.kind != "embedding" else "4 bits, rounded"
        )
        for group in survey.groups
    ]
    recipe = recipe_of("all", "", survey.chosen(picks), SPEC)
    made = pair.compress(tmp_path / "delta", recipe=recipe)
    assert survey.bytes(picks) == pytest.approx(made.summary["artifact_bytes"], rel=0.1)  # mostly frames
    taken = group_bytes(load_delta(made.out).manifest, (group.names for group in survey.groups))
    told = [group.options[pick].bytes for group, pick in zip(survey.groups, picks, strict=True)]
    assert taken == pytest.approx(told, rel=0.2)
    assert made.summary["artifact_bytes"] - sum(taken) == pytest.approx(survey.fixed_bytes, rel=0.1)


def test_side_files_are_counted_as_they_are_stored(pair: Pair, tmp_path: Path) -> None:
    large = Pair(pair.base, shutil.copytree(pair.finetuned, tmp_path / "tuned"), pair.data)
    (large.finetuned / "merges.txt").write_text("a b\n" * 30_000)
    sizes = []
    for made in (pair, large):
        opened, ready = prepared(made, tmp_path / "none")
        sizes.append(fixed_bytes(ready.plan, opened.coder))
    assert 0 < sizes[1] - sizes[0] < 200


def test_a_group_that_cannot_be_solved_is_rounded(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsolved(walking.Ladder):
        def __init__(self, tensors, *others):  # type: ignore[no-untyped-def]
            if "layers.1.mlp.down" in tensors[0].name:
                raise NumericsError("the Hessian is odd")
            super().__init__(tensors, *others)

    monkeypatch.setattr(walking, "Ladder", Unsolved)
    recorder = Recorder()
    found, _ = walked(pair, tmp_path / "none", recorder)
    odd = next(one for one in found.groups if "layers.1.mlp.down" in one.names[0])
    assert [step.rung for step in odd.steps] == [
        "2 bits, rounded",
        "3 bits, rounded",
        "4 bits, rounded",
        "8 bits, rounded",
    ]
    assert odd.probe.kl[0] > 0
    assert recorder.notes == [f"{odd.names[0]}: the Hessian is odd: for its group only rounding is left"]


def test_layers_are_read_ahead_and_what_an_interrupt_leaves_is_dropped(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a GPU."""
    asked, dropped = list[str](), list[str]()
    ahead, forget = Plan.read_ahead, Checkpoint.forget_ahead

    def read_ahead(plan: Plan, names: list[str], device: torch.device) -> None:
        ahead(plan, names, device)
        assert not plan.finetuned._ahead  # a CPU has no time to spare
        for name in names:
            if plan.tensors[name].calibrated:
                plan.finetuned._ahead[name] = Future()
                plan.finetuned._ahead[name].set_result(plan.finetuned._read(name, pinned=False))
        asked.extend(names)

    def forget_ahead(checkpoint: Checkpoint) -> None:
        dropped.extend(checkpoint._ahead)
        forget(checkpoint)

    monkeypatch.setattr(Plan, "read_ahead", read_ahead)
    monkeypatch.setattr(Checkpoint, "forget_ahead", forget_ahead)
    job = job_of(pair, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        measuring.survey_pair(job, Inputs(), Recorder(1))  # at the end of layer 0
    layers = [name for name in Checkpoint.open(pair.finetuned).tensors if ".layers." in name]
    assert sorted(asked) == sorted(layers)  # each once
    assert sorted(dropped) == sorted(name for name in layers if ".layers.1." in name and "_proj" in name)


def test_what_is_not_finite_is_told(pair: Pair, tmp_path: Path) -> None:
    found, _ = walked(pair, tmp_path / "none")
    found.groups[2].probe.kl[0] = float("nan")
    with pytest.raises(NumericsError, match="not finite on the data held back"):
        survey_of(found, finetuned_bytes=1, fixed_bytes=1)


def test_records_held_back_are_beyond_those_calibrated_on(pair: Pair) -> None:
    """In the order of calibration: its stream of tokens goes on with them."""
    opened = Checkpoint.open(pair.finetuned)
    used = calibration_tokens(opened, pair.data, SPEC).ids.flatten().tolist()
    more = calibration_tokens(opened, pair.data, SPEC.model_copy(update={"samples": 20})).ids.flatten().tolist()
    records: Records = held_back(opened, pair.data, SPEC, Enough(100, 0, 100))
    stream = [token for ids, _ in records for token in ids]
    at = next(i for i in range(len(used), len(more)) if more[i] == 1)  # the next record's <s>
    assert more[at : at + len(stream)] == stream
    assert 100 <= len(stream) < 100 + 20
    assert {given for _, given in records} == {1}


def test_long_records_are_no_fewer_than_it_takes_to_judge(pair: Pair) -> None:
    """Where a few of them already have tokens enough."""
    opened = Checkpoint.open(pair.finetuned)
    assert len(held_back(opened, pair.data, SPEC, Enough(20, 0, 20))) == FEWEST


def test_records_that_calibration_cuts_are_counted_as_cut(pair: Pair, tmp_path: Path) -> None:
    """What is calibrated on is cut to the model's context, so that more records are used than by their whole length."""
    short = changed(pair, tmp_path, lambda weights: weights, max_position_embeddings=16).finetuned
    records = [{"prompt": f"{'a ' * 40}{i}", "completion": f"b {i}"} for i in range(40)]
    used = calibration_tokens(Checkpoint.open(short), records, SPEC)
    assert used.records == 8  # of 16 tokens each
    assert len(held_back(Checkpoint.open(short), records, SPEC, Enough(10_000, 0, 10_000))) == 40 - used.records


def test_short_answers_take_more_records_up_to_a_limit() -> None:
    """Each record has 10 tokens, of which 2 are to be written."""
    records: Records = [(list(range(10)), 8)] * 100
    assert len(Enough(30, 0, 1000).of(records)) == 3
    assert len(Enough(30, 20, 1000).of(records)) == 10
    assert len(Enough(30, 20, 70).of(records)) == 7
    assert len(Enough(30, 500, 5000).of(records)) == 100


def test_records_to_judge_by_may_be_others(pair: Pair, tmp_path: Path) -> None:
    """All of them count, none is what is calibrated on; the same file is refused, also a link to it, a copy,
    one in another order, and a part.
    """
    opened, enough = Checkpoint.open(pair.finetuned), Enough(10_000, 0, 10_000)
    others = [{"prompt": f"ask {i}", "completion": f"b {i}"} for i in range(FEWEST)]
    found = held_back(opened, pair.data, SPEC, enough, judge=others)
    assert len(found) == FEWEST
    assert all(given > 1 for _, given in found)
    with pytest.raises(CalibrationError, match=f"judge .*: {FEWEST - 1} records to judge by; give at least {FEWEST}"):
        held_back(opened, pair.data, SPEC, enough, judge=others[1:])
    with pytest.raises(CalibrationError, match=r"judge .* is calibration data"):
        held_back(opened, tuple(others), SPEC, enough, judge=list(others))
    link = tmp_path / "same.jsonl"
    link.symlink_to(pair.data)
    copy = shutil.copy(pair.data, tmp_path / "copy.jsonl")
    lines = pair.data.read_text().splitlines(keepends=True)
    turned, part = tmp_path / "turned.jsonl", tmp_path / "part.jsonl"
    turned.write_text("".join(reversed(lines)))
    part.write_text("".join(lines[3:]))
    for same in (pair.data, link, copy, turned, part):
        with pytest.raises(CalibrationError, match=r"judge .* is calibration data"):
            held_back(opened, pair.data, SPEC, enough, judge=same)
    raw = pair.data.read_bytes()
    copy.write_bytes(raw.replace(b"w1", b"w2"))  # as long, and other records
    held_back(opened, pair.data, SPEC, enough, judge=copy)


def test_batches_mark_what_is_written() -> None:
    (short, long) = batched([([1, 5, 6, 7, 2], 3), ([1, 8, 2], 1)], at_most=2)
    assert short.ids.tolist() == [[1, 8, 2]]
    assert short.written.tolist() == [[True, True, False]]
    assert long.written.tolist() == [[False, False, True, True, False]]
    assert long.given.tolist() == [[True, True, False, False, False]]
    (both,) = batched([([1, 5, 6, 7, 2], 3), ([1, 8, 2], 1)], at_most=1)
    assert both.ids.tolist() == [[1, 8, 2, 0, 0], [1, 5, 6, 7, 2]]
    assert both.written.tolist() == [[True, True, False, False, False], [False, False, True, True, False]]
