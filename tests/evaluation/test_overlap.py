"""Held out or not: every form that calibration data may have, and which file is compared with the samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltacompress.artifact.records import CalibrationRecord
from deltacompress.calibration.data import load_calibration
from deltacompress.errors import InputError
from deltacompress.evaluation.tasks import overlap
from deltacompress.evaluation.tasks.encoding import Encoder
from deltacompress.evaluation.tasks.load import LocalSpec, LocalTask, SuiteSpec, SuiteTask
from deltacompress.evaluation.tasks.records import Sample

if TYPE_CHECKING:
    from pairs import Pair

SAMPLES = tuple(Sample(f"w{n} w{n + 1} w{n + 2}", f" w{n + 3} w{n + 4}") for n in range(20))
PARTS = [(one.prompt, one.completion) for one in SAMPLES]


def task(folder: Path, samples: tuple[Sample, ...] = SAMPLES) -> LocalTask:
    folder.mkdir(parents=True, exist_ok=True)
    return LocalTask(LocalSpec(task="mine", kind="generate"), samples, (), folder / "validation.jsonl")


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def as_prompts(parts: list[tuple[str, str]]) -> str:
    return lines([{"prompt": prompt, "completion": completion} for prompt, completion in parts])


def as_texts(parts: list[tuple[str, str]]) -> str:
    return lines([{"text": prompt + completion} for prompt, completion in parts])


def as_messages(parts: list[tuple[str, str]]) -> str:
    roles = ("user", "assistant")
    return lines(
        [{"messages": [{"role": r, "content": c} for r, c in zip(roles, part, strict=True)]} for part in parts]
    )


@pytest.mark.parametrize("write", [as_prompts, as_texts, as_messages])
def test_samples_in_a_calibration_file_are_refused_whatever_its_form(
    write: Callable[[list[tuple[str, str]]], str], tmp_path: Path
) -> None:
    other = [(f"w{n}", " w1") for n in range(30, 60)]
    file = tmp_path / "calibration.jsonl"
    file.write_text(write([*other, PARTS[3], PARTS[17]]))
    with pytest.raises(InputError, match=r"task mine: 2 of 20 samples are in the calibration file .*calibration.jsonl"):
        overlap.refuse_data([task(tmp_path / "mine")], file)
    file.write_text(write(other))
    overlap.refuse_data([task(tmp_path / "mine")], file)


def test_case_and_white_space_make_no_other_sample(tmp_path: Path) -> None:
    prompt, completion = PARTS[5]
    file = tmp_path / "calibration.jsonl"
    file.write_text(as_texts([(f"\n {prompt.upper()}\t", f"{completion}\n")]))
    with pytest.raises(InputError, match="1 of 20 samples"):
        overlap.refuse_data([task(tmp_path / "mine")], file)


def test_every_task_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "calibration.jsonl"
    file.write_text(as_prompts([PARTS[0]]))
    suite = SuiteTask(SuiteSpec(task="theirs", kind="suite", suite="any"))
    held_out = task(tmp_path / "other", SAMPLES[1:])
    overlap.refuse_data([suite, held_out], file)
    with pytest.raises(InputError, match="1 of 20 samples"):
        overlap.refuse_data([suite, held_out, task(tmp_path / "mine")], file)


@pytest.fixture
def encoder(pair: Pair) -> Encoder:
    return Encoder.open(pair.finetuned, {"max_position_embeddings": 64})


def record(file: Path, encoder: Encoder) -> CalibrationRecord:
    """What a manifest says after calibrating on that file."""
    tokens = load_calibration(file, encoder.tokenizer, samples=4, seq_len=16, seed=3, max_positions=64)
    return CalibrationRecord(
        source=file.name, format=tokens.format, sha256=tokens.sha256, records=tokens.records, samples=4, seq_len=16,
        tokens=tokens.tokens, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("config", [{"max_position_embeddings": 64}, {}])
def test_it_is_known_where_a_tokenizer_takes_less_than_the_model(
    pair: Pair, config: dict[str, Any], tmp_path: Path
) -> None:
    """Calibration sequences are packed records, which the tokenizer's own limit says nothing of."""
    encoder = Encoder.open(pair.finetuned, config)
    encoder.tokenizer.model_max_length = encoder.max_length = 8
    mine = task(tmp_path / "mine")
    mine.path.write_text(as_prompts(PARTS))
    assert overlap.check(mine, record(mine.path, encoder), None, encoder).verdict == "overlaps"


def test_what_a_delta_was_calibrated_on_is_known_by_its_tokens(encoder: Encoder, tmp_path: Path) -> None:
    mine = task(tmp_path / "mine")
    train = tmp_path / "mine" / "train.jsonl"
    train.write_text(as_prompts([(f"w{n}", " w1 w2 w3") for n in range(30, 60)]))
    mine.path.write_text(as_prompts(PARTS))
    used = record(train, encoder)
    assert overlap.check(mine, None, None, encoder).verdict == "none used"
    suite = SuiteTask(SuiteSpec(task="theirs", kind="suite", suite="any"))
    assert overlap.check(suite, used, train, encoder).verdict == "not checked"
    assert overlap.check(mine, used, None, encoder) == overlap.check(mine, used, train, encoder)
    assert overlap.check(mine, used, train, encoder).verdict == "disjoint"
    with pytest.raises(InputError, match=r"not what this delta was calibrated on \(train.jsonl, 4 x 16 tokens, seed 3"):
        overlap.check(mine, used, mine.path, encoder)
    for changed in ({"seed": 4}, {"samples": 3}, {"seq_len": 8}):
        with pytest.raises(InputError, match="not what this delta was calibrated on"):
            overlap.check(mine, used.model_copy(update=changed), train, encoder)


def test_calibrated_on_the_samples_themselves(encoder: Encoder, tmp_path: Path) -> None:
    mine = task(tmp_path / "mine")
    mine.path.write_text(as_prompts(PARTS))
    used = record(mine.path, encoder)
    found = overlap.check(mine, used, None, encoder)
    assert (found.verdict, found.overlapping) == ("overlaps", 20)
    half = overlap.check(replace(mine, samples=(*SAMPLES[:10], Sample("w80", " w81"))), used, None, encoder)
    assert (half.verdict, half.overlapping) == ("overlaps", 10)
    with pytest.raises(InputError, match=r"task mine: 20 of 20 samples .* allow_overlap=True"):
        overlap.refuse([("other", overlap.check(mine, None, None, encoder)), ("mine", found)], force=False)
    overlap.refuse([("mine", found)], force=True)


def test_a_file_that_is_not_at_hand_is_not_compared(encoder: Encoder, tmp_path: Path) -> None:
    mine, elsewhere = task(tmp_path / "mine"), tmp_path / "elsewhere.jsonl"
    mine.path.write_text(as_prompts(PARTS))
    elsewhere.write_text(as_prompts([(f"w{n}", " w1 w2 w3") for n in range(30, 60)]))
    (tmp_path / "mine" / "train.jsonl").write_text(as_prompts(PARTS[:15]))  # of the task, but not what was used
    found = overlap.check(mine, record(elsewhere, encoder), None, encoder)
    assert (found.verdict, found.overlapping) == ("not checked", 0)
    assert "give --calibration FILE" in found.told
