"""Were the evaluation samples seen in calibration? A compressed model is fitted to its calibration data.

The manifest records the name of the calibration file and a hash of the token ids it gave. The ids can be made again
from a file, so that a file that is given (or found beside the samples) proves to be the one that was used, or not; if
it is, its texts are compared with the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltacompress.artifact.records import CalibrationRecord
from deltacompress.calibration.data import load_calibration
from deltacompress.calibration.sources import IN_MEMORY, Calibration, open_source
from deltacompress.errors import CalibrationError, InputError, option, switch
from deltacompress.evaluation.tasks.encoding import Encoder
from deltacompress.evaluation.tasks.load import TRAIN, LocalTask, Task
from deltacompress.evaluation.tasks.records import text_hash

Verdict = Literal["none used", "disjoint", "overlaps", "not checked"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """One task against the calibration of one delta. overlapping: samples whose text is in the calibration file."""

    verdict: Verdict
    overlapping: int
    told: str


def check(task: Task, calibration: CalibrationRecord | None, given: Path | None, encoder: Encoder) -> Overlap:
    """Compare a task's samples with what a delta was calibrated on.

    given: --calibration FILE.

    Raises:
        InputError: the given file is not the one that the manifest names.
    """
    if calibration is None:
        return Overlap("none used", 0, "the recipe calibrates on nothing")
    if not isinstance(task, LocalTask):
        return Overlap("not checked", 0, f"calibrated on {calibration.source}; a suite's samples were not compared")
    if given is not None:
        if _ids_hash(given, calibration, encoder) != calibration.sha256:
            raise InputError(
                f"not what this delta was calibrated on ({calibration.source}, {calibration.samples} x "
                f"{calibration.seq_len} tokens, seed {calibration.seed})",
                where=f"{option('calibration')} {given}",
                way_out="give that file",
            )
        return _compare(task, calibration, given)
    for file in (task.path, task.path.with_name(TRAIN)):
        if file.is_file() and _ids_hash(file, calibration, encoder) == calibration.sha256:
            return _compare(task, calibration, file)
    return Overlap(
        "not checked",
        0,
        f"calibrated on {calibration.source}, which is not beside the samples; its texts were not compared "
        "(give --calibration FILE)",  # a report holds it, whoever made that
    )


def _compare(task: LocalTask, calibration: CalibrationRecord, file: Path) -> Overlap:
    """Sample by sample against the file that was used."""
    if count := _seen(task, _texts(file)):
        told = f"{count} of {len(task.samples)} samples are in the calibration file {calibration.source}"
        return Overlap("overlaps", count, told)
    return Overlap("disjoint", 0, f"no sample is in the calibration file {calibration.source}, compared text by text")


def refuse(found: Sequence[tuple[str, Overlap]], *, force: bool) -> None:
    """Stop at samples that were seen in calibration.

    Raises:
        InputError: some overlap and it is not forced.
    """
    for task, overlap in found:
        if overlap.verdict == "overlaps" and not force:
            raise InputError(
                overlap.told,
                where=f"task {task}",
                way_out=f"evaluate on held-out samples, or record it with {switch('allow_overlap')}",
            )


def refuse_data(tasks: Sequence[Task], calibration: Calibration) -> None:
    """Stop, before anything is calibrated on a file or on records, at samples that are in it.

    Raises:
        InputError: some are, or it cannot be read.
    """
    texts = _texts(calibration)
    data = f"calibration file {calibration}" if isinstance(calibration, str | Path) else f"calibration {IN_MEMORY}"
    for task in tasks:
        if isinstance(task, LocalTask) and (count := _seen(task, texts)):
            raise InputError(
                f"{count} of {len(task.samples)} samples are in the {data}",
                where=f"task {task.name}",
                way_out="calibrate on other data, or set allow_overlap in the policy",
            )


def _seen(task: LocalTask, texts: set[str]) -> int:
    return sum(sample.text_hash in texts for sample in task.samples)


def _ids_hash(path: Path, calibration: CalibrationRecord, encoder: Encoder) -> str | None:
    """The hash of the tokens that `path` gives under the manifest's settings; None if it cannot give any."""
    try:
        tokens = load_calibration(
            path,
            encoder.tokenizer,
            samples=calibration.samples,
            seq_len=calibration.seq_len,
            seed=calibration.seed,
            max_positions=encoder.positions,
        )
    except CalibrationError:
        return None
    return tokens.sha256


def _texts(data: Calibration) -> set[str]:
    opened = open_source(data)
    seen = set()
    for record in opened.shuffled(0):
        fields = record.fields
        if opened.format == "prompt+completion":
            seen.add(text_hash(f"{fields['prompt']}{fields['completion']}"))
        elif opened.format == "text":
            seen.add(text_hash(fields["text"]))
        else:
            seen.add(text_hash(" ".join(str(message.get("content", "")) for message in fields["messages"])))
    return seen
