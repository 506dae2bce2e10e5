"""What report.json holds, record by record: plain data that Markdown, pages and charts are made of."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 2
"""Version 1 is the same without adapters; it is written where there are none, so that earlier programs read it."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0, le=1)]
Role = Literal["finetuned", "base", "delta", "adapter", "checkpoint"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerRecord(_Record):
    """One decoder layer of a delta, from its manifest: mean relative loss of its coded tensors, and their bits."""

    layer: str
    loss: float | None
    bits_per_weight: float


class SubjectRecord(_Record):
    """One model that was measured.

    role: "finetuned" (the reference), "base", "delta" (an artifact, run decoupled), "adapter" (of PEFT, run beside its
    base) or "checkpoint" (any other, plain).
    identity: content hash of its weights, the manifest digest of a delta, or the digest of an adapter's config and
    tensors. bytes: of all its files; ratio: bytes of the fine-tuned checkpoint / bytes of the artifact; of an adapter,
    bytes of the base checkpoint / bytes of the adapter. recipe: of an adapter, its kind. seconds: spent computing,
    shared by models of one batch.
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


class AnswersRecord(_Record):
    """Probability that was lost against the fine-tuned model, 0.01 = one point; see statistics.AnswersResult.

    lost: of the right answer (generation), or the most that can have moved between the choices (multiple choice).
    upper: its one-sided upper bound. right: mean probability that the fine-tuned model gives to the right answers.
    """

    lost: float
    upper: float
    right: Share | None


class ScoreRecord(_Record):
    """One subject on one task. paired, fidelity, answers: None for the reference itself and where there is none."""

    task: str
    subject: str
    value: float
    stderr: float
    samples: int
    paired: PairedRecord | None = None
    fidelity: FidelityRecord | None = None
    answers: AnswersRecord | None = None


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
    """What a gate says about one delta or adapter."""

    policy: str
    subject: str
    passed: bool
    checks: tuple[Check, ...]


class ReportData(_Record):
    """The fields of a report; reference: label of the fine-tuned model, if it was measured."""

    schema_version: Literal[1, 2] = 1
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

    @model_validator(mode="after")
    def _version(self) -> Self:
        if self.schema_version == 1 and any(one.role == "adapter" for one in self.subjects):
            raise ValueError("an adapter in a report of version 1")
        return self

    def subject(self, label: str) -> SubjectRecord:
        """The subject named `label`; KeyError if there is none."""
        return {one.label: one for one in self.subjects}[label]

    def score(self, task: str, subject: str) -> ScoreRecord | None:
        """One cell of the table."""
        return next((one for one in self.scores if (one.task, one.subject) == (task, subject)), None)

    @property
    def deltas(self) -> tuple[SubjectRecord, ...]:
        """The artifacts that were measured: deltas, and adapters."""
        return tuple(one for one in self.subjects if one.role in ("delta", "adapter"))
