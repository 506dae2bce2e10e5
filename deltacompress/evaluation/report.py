"""report.json: what was measured on what, as versioned data that other programs may rely on.

The file holds a digest over itself, like a manifest: a gate decides on it, so a report edited by hand is refused.
Scores and drops are fractions, sizes bytes, divergences nats per token, times seconds.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltacompress.errors import ChecksumError, FormatError, InputError, SchemaVersionError
from deltacompress.files.output import write_once
from deltacompress.files.regular import ANYWHERE, read_bytes, told
from deltacompress.json_memory import MAX_DEPTH, is_deep, parsed_bytes

SCHEMA_VERSION = 1
REPORT = "report.json"
_MAX_BYTES = 64 << 20
_MARKS = {"subjects", "tasks", "scores"}  # two of them tell a report, damaged or not, from another program's JSON
_WRITES = f"such as `deltacompress eval ... --out DIR` writes as DIR/{REPORT}"
_MAX_MEMORY = 128 << 20  # of the parsed report, by the estimate
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0, le=1)]
Role = Literal["finetuned", "base", "delta", "checkpoint"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerRecord(_Record):
    """One decoder layer of a delta, from its manifest: mean relative loss of its coded tensors, and their bits."""

    layer: str
    loss: float | None
    bits_per_weight: float


class SubjectRecord(_Record):
    """One model that was measured.

    role: "finetuned" (the reference), "base", "delta" (an artifact, run decoupled) or "checkpoint" (any other, plain).
    identity: content hash of its weights, or the manifest digest of a delta. bytes: of all its files; ratio: bytes of
    the fine-tuned checkpoint / bytes of the artifact. seconds: spent computing, shared by models of one batch.
    """

    label: str
    role: Role
    source: str
    identity: Sha256
    manifest_digest: Sha256 | None = None
    recipe: str | None = None
    calibration: str | None = None
    bytes: int
    ratio: float | None = None
    linear_bits_per_weight: float | None = None
    compress_seconds: float | None = None
    seconds: float
    layers: tuple[LayerRecord, ...] = ()


class TaskInfo(_Record):
    """One task. data_sha256: over the samples, where they are local; metric: of lm-eval."""

    name: str
    description: str
    kind: Literal["choose", "generate", "suite"]
    metric: str
    higher_is_better: bool
    samples: int
    few_shot: int
    source: str
    data_sha256: Sha256 | None


class OverlapRecord(_Record):
    """One task against what one delta was calibrated on. forced: evaluated although they overlap."""

    task: str
    subject: str
    verdict: Literal["none used", "disjoint", "overlaps", "not checked"]
    overlapping: int
    told: str
    forced: bool


class PairedRecord(_Record):
    """A subject against the fine-tuned model on the same samples; see statistics.PairedResult."""

    drop: float
    stderr: float
    low: float
    high: float
    upper: float
    p_value: Share
    method: Literal["mcnemar", "bootstrap"]
    gained: int | None
    lost: int | None
    recovery: float | None
    same_answers: int
    noninferior: bool

    @property
    def change(self) -> float:
        """What became of the score, a loss being negative; never a negative zero."""
        return 0.0 - self.drop


class FidelityRecord(_Record):
    """A subject against the fine-tuned model, per answer token; see fidelity.FidelityResult."""

    tokens: int
    kl: float
    kl_low: float
    kl_high: float
    top1: Share
    perplexity_ratio: float
    loss: float
    reference_loss: float


class ScoreRecord(_Record):
    """One subject on one task. paired, fidelity: None for the reference itself and where there is none."""

    task: str
    subject: str
    value: float
    stderr: float
    samples: int
    paired: PairedRecord | None = None
    fidelity: FidelityRecord | None = None


class Agreement(_Record):
    """How many samples of a task two subjects answer alike, right or wrong."""

    task: str
    first: str
    second: str
    same: int
    samples: int


class Disagreement(_Record):
    """A sample that the fine-tuned model and another subject answer differently, and one of them rightly."""

    task: str
    subject: str
    doc_id: int
    doc_hash: str
    prompt: str
    target: str
    reference_answer: str
    answer: str
    reference_right: bool
    right: bool


class Settings(_Record):
    """How it was measured. margin: of non-inferiority, in units of the metric; confidence: of every interval."""

    limit: int | None
    seed: int
    batch_size: int
    confidence: Share
    margin: float
    dtype: str
    device: str
    runtime: str
    threads: int


class Check(_Record):
    """One line of a gate's verdict."""

    name: str
    subject: str
    task: str | None
    measured: float | str | None
    wanted: str
    passed: bool
    told: str


class Verdict(_Record):
    """What a gate says about one delta."""

    policy: str
    subject: str
    passed: bool
    checks: tuple[Check, ...]


class Report(_Record):
    """The whole report; reference: label of the fine-tuned model, if it was measured."""

    schema_version: Literal[1] = 1
    created: str
    base: str
    base_sha256: Sha256
    reference: str | None
    settings: Settings
    subjects: tuple[SubjectRecord, ...]
    tasks: tuple[TaskInfo, ...]
    scores: tuple[ScoreRecord, ...]
    agreement: tuple[Agreement, ...]
    overlap: tuple[OverlapRecord, ...]
    disagreements: tuple[Disagreement, ...]
    verdicts: tuple[Verdict, ...] = ()
    tools: dict[str, str]

    def subject(self, label: str) -> SubjectRecord:
        """The subject named `label`; KeyError if there is none."""
        return {one.label: one for one in self.subjects}[label]

    def score(self, task: str, subject: str) -> ScoreRecord | None:
        """One cell of the table."""
        return next((one for one in self.scores if (one.task, one.subject) == (task, subject)), None)

    def _repr_markdown_(self) -> str:
        """What a notebook shows: report.md."""
        from deltacompress.evaluation.markdown import markdown

        return markdown(self)

    @property
    def deltas(self) -> tuple[SubjectRecord, ...]:
        """The artifacts that were measured."""
        return tuple(one for one in self.subjects if one.role == "delta")

    def to_bytes(self) -> bytes:
        """The file's bytes, digest included."""
        data = self.model_dump(mode="json")
        return (json.dumps(data | {"digest": _digest(data)}, indent=1, allow_nan=False) + "\n").encode()

    def write(self, path: Path) -> None:
        """Write report.json; raises OutputError."""
        write_once(path, self.to_bytes(), replace=True)


def read_report(path: str | Path) -> Report:
    """Read and check a report (a file, or the directory that holds report.json).

    Raises:
        InputError: there is none, or another program's JSON.
        ChecksumError, SchemaVersionError, FormatError: damaged or edited, newer, or breaking the schema.
    """
    file = Path(path)
    file = file / REPORT if file.is_dir() else file
    try:
        raw = read_bytes(file, at_most=_MAX_BYTES, links=ANYWHERE)
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such report, {_WRITES}") from error
    except OSError as error:
        raise InputError(f"{file}: {told(error, 'give another report')}") from error
    if parsed_bytes(raw) > _MAX_MEMORY:
        raise FormatError(f"{file}: holds more values than any report does; evaluate again")
    try:
        data = json.loads(raw)
        spelled = _digest({key: value for key, value in data.items() if key != "digest"}) if type(data) is dict else ""
    except (ValueError, RecursionError) as error:  # NaN and what is beyond all floats is no JSON either
        raise ChecksumError(f"{file}: not JSON ({error}); evaluate again") from error
    if is_deep(raw):
        raise FormatError(f"{file}: nested deeper than {MAX_DEPTH} levels, as no report is; evaluate again")
    if not isinstance(data, dict) or len(_MARKS & data.keys()) < 2:
        raise InputError(f"{file}: not a report of `deltacompress eval`, {_WRITES}")
    claimed = data.pop("digest", None)
    version = data.get("schema_version")
    if claimed != spelled:
        raise ChecksumError(f"{file}: its content differs from its digest (edited, or damaged); evaluate again")
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{file}: report version {version!r}, this program reads {SCHEMA_VERSION}; upgrade deltacompress"
        )
    try:
        return Report.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{file}: {at}: {first['msg']}") from error


def report_schema() -> dict[str, Any]:
    """JSON Schema of report.json. Every field is required: the writer leaves none out."""
    schema = Report.model_json_schema(mode="serialization")
    schema["properties"]["digest"] = {
        "description": "sha256 over the canonical JSON of all other fields",
        "pattern": "^[0-9a-f]{64}$",
        "title": "Digest",
        "type": "string",
    }
    for record in (schema, *schema["$defs"].values()):
        if "properties" in record:
            record["required"] = sorted(record["properties"])
    return schema


def _digest(data: dict[str, Any]) -> str:
    spelled = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(spelled.encode()).hexdigest()
