"""report.json of `deltacompress eval`, as much of it as a zoo needs: is it whole, what is it about, what counts.

Such a report speaks of several models, the fine-tuned one among them. What is filed under an artifact is what was
measured of that artifact, which the report names by the digest of its manifest (an adapter: of its config and tensors);
so it fits no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from deltacompress.adapters.adapter import ANEW, adapter_identity
from deltacompress.errors import ChecksumError, InputError
from deltacompress.files.canonical_json import canonical_digest
from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo.entries.adapters import IDENTITY
from deltacompress.zoo.entries.artifact import Described
from deltacompress.zoo.entries.beneath import OVER
from deltacompress.zoo.entries.scores import MAX_SCORES, score_key
from deltacompress.zoo.errors import ZooFormatError
from deltacompress.zoo.ledger import canonical
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import REPORT, Descriptor, EntryManifest
from deltacompress.zoo.ledger.read import need_kind
from deltacompress.zoo.ledger.versions import Resolved

VERSIONS = (1, 2)
"""Of the report's schema (evaluation/report/records.py)."""


class _Part(BaseModel):
    """What is read of a record; the rest is under the report's digest, and others check it."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Subject(_Part):
    label: str
    role: str
    identity: str
    manifest_digest: str | None


class _Task(_Part):
    name: str
    metric: str


class _Fidelity(_Part):
    kl: float


class _Score(_Part):
    task: str
    subject: str
    value: float
    fidelity: _Fidelity | None


class _Verdict(_Part):
    policy: str
    subject: str
    passed: bool


class _Evaluation(_Part):
    subjects: tuple[_Subject, ...]
    tasks: tuple[_Task, ...]
    scores: tuple[_Score, ...]
    verdicts: tuple[_Verdict, ...]


def is_evaluation(data: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a report of `deltacompress eval` (or was, before somebody edited it)."""
    return data.keys() >= {"schema_version", "subjects", "scores"}


def need_measurable(found: Resolved, entry: EntryManifest) -> None:
    """Make sure that a report can be about the entry `found`.

    Raises:
        NotFoundError: it is no delta and no adapter.
        InputError: it does not say what reports call it.
    """
    need_kind(found, entry, "delta", "adapter")
    if entry.kind == "adapter" and IDENTITY not in entry.summary:
        raise InputError(
            "an earlier version of the program added this adapter, without the digest that reports name it by",
            where=found,
            way_out="add the adapter again, and evaluate that version",
        )


def describe_evaluation(
    data: Mapping[str, Any], found: Resolved, entry: EntryManifest, where: str, *, label: str | None = None
) -> Described:
    """What the report `data` measured of the version `found`, as an attachment of it; `where` names the report.

    label: under which the report has it (None: found by the artifact's digest).

    Raises:
        ChecksumError, ZooFormatError, DamagedRecordError: the report was edited, is newer, or not as one is written.
        NotFoundError, InputError: as need_measurable; or the report measured something else.
    """
    need_measurable(found, entry)
    report = _parse(data, where)
    label = _label_of(report, entry) if label is None else label
    subject = next((one for one in report.subjects if one.label == label), None)
    if subject is None:
        raise InputError(f"the report measures no {label}, so it cannot be attached to {found}")
    if not _is_of(subject, entry):
        raise InputError(
            f"not the artifact that the report measured as {label}",
            where=found,
            way_out=f"evaluate {found} itself{ANEW if entry.kind == 'adapter' else ''}",
        )
    verdict = next((one for one in report.verdicts if one.subject == label), None)
    raw = (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()
    blob = Blob(sha256_hex(raw), len(raw), lambda: (raw,), where)
    facts: dict[str, str | int | float | None] = {
        "tasks": ",".join(task.name for task in report.tasks)[:500],
        "gate": None if verdict is None else verdict.policy,
        "passed": None if verdict is None else str(verdict.passed).lower(),
    }
    attached = EntryManifest(
        kind="report",
        config=Descriptor(media_type=REPORT, digest=blob.digest, size=blob.size, annotations={"file": "report.json"}),
        summary=facts | _scores(report, label),
        subject=found.manifest,
    )
    return Described(attached, [blob])


def _parse(data: Mapping[str, Any], where: str) -> _Evaluation:
    content = {key: value for key, value in data.items() if key != "digest"}
    try:
        digest = canonical_digest(content)
    except (ValueError, RecursionError):  # a NaN
        digest = None
    if digest is None or data.get("digest") != digest:
        raise ChecksumError(
            "its content differs from its digest (edited, or damaged)", where=where, way_out="evaluate again"
        )
    if content["schema_version"] not in VERSIONS:
        told = ascii(str(content["schema_version"])[:20])
        raise ZooFormatError(
            f"report version {told}, this program reads up to {VERSIONS[-1]}",
            where=where,
            way_out="upgrade deltacompress",
        )
    return canonical.checked(_Evaluation, content, where)


def _label_of(report: _Evaluation, entry: EntryManifest) -> str:
    """The artifact's label; that of another if none fits, to be told."""
    of_kind = [one for one in report.subjects if one.role == entry.kind]
    fitting = [one for one in of_kind if _is_of(one, entry)]
    return next((one.label for one in (*fitting, *of_kind)), entry.kind)


def _is_of(subject: _Subject, entry: EntryManifest) -> bool:
    """Whether a subject is what the entry holds."""
    if entry.kind == "delta":
        return subject.manifest_digest == entry.summary.get("artifact")
    told = entry.summary.get(OVER)
    over = None if told is None else str(told)
    return subject.role == "adapter" and subject.identity == adapter_identity(str(entry.summary[IDENTITY]), over)


def _scores(report: _Evaluation, label: str) -> dict[str, str | int | float | None]:
    """By task and metric, as `zoo list --score` knows them."""
    metrics = {task.name: task.metric for task in report.tasks}
    found: dict[str, str | int | float | None] = {}
    for score in report.scores:
        if score.subject == label:
            found[score_key(f"{score.task}.{metrics.get(score.task, 'score')}")] = score.value
            if score.fidelity is not None:
                found[score_key(f"{score.task}.kl")] = score.fidelity.kl
    return dict(list(found.items())[:MAX_SCORES])
