"""Reports attached to what they are about.

A report becomes a referrer of the entry: the entry's manifest stays as it is, and the report names the artifact's
manifest digest, so it fits no other.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from deltacompress.errors import InputError
from deltacompress.evaluation.report import Report
from deltacompress.zoo.blobs import Blob
from deltacompress.zoo.entry import REPORT, Descriptor, EntryManifest
from deltacompress.zoo.read import need_kind
from deltacompress.zoo.reports import MAX_SCORES
from deltacompress.zoo.resolve import open_zoo


def pinned(zoo: str | None, given: str) -> str:
    """`name@version` of the artifact that a name means now: an alias may move while it is measured.

    Raises:
        InputError: a directory, which has no entry that a report could be attached to.
        ZooError: no zoo was given, or it has no such artifact.
    """
    if Path(given).is_dir():
        raise InputError(
            f"--attach: {given} is a directory; give the name of its entry in --zoo, or leave out --attach"
        )
    found, entry = open_zoo(zoo).show(given)
    need_kind(found, entry, "delta")
    return str(found)


def attach_report(zoo: str | None, name: str, label: str, report: Report) -> str:
    """Attach a report to the entry `name` that it measured as `label`; the digest of the attachment.

    The entry's list shows a score for every task and metric (`sst2.accuracy`), and its divergence (`sst2.kl`).

    Raises:
        InputError: the report measures nothing under that label, or another artifact.
        ZooError: no zoo was given, the zoo has no such name, or cannot be written.
    """
    if label not in {one.label for one in report.subjects}:
        raise InputError(f"the report measures no {label}, so it cannot be attached to {name}")
    opened = open_zoo(zoo)
    resolved, measured = opened.show(name)
    need_kind(resolved, measured, "delta")
    if report.subject(label).manifest_digest != measured.summary.get("artifact"):
        raise InputError(
            f"{resolved}: not the artifact that the report measured as {label}; evaluate {resolved} itself"
        )
    raw = report.to_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    verdict = next((one for one in report.verdicts if one.subject == label), None)
    entry = EntryManifest(
        kind="report",
        config=Descriptor(media_type=REPORT, digest=digest, size=len(raw), annotations={"file": "report.json"}),
        summary={
            "tasks": ",".join(task.name for task in report.tasks)[:500],
            "gate": None if verdict is None else verdict.policy,
            "passed": None if verdict is None else str(verdict.passed).lower(),
        }
        | _scores(report, label),
        subject=resolved.manifest,
    )
    return opened.attach(entry, [Blob(digest, len(raw), lambda: [raw], "report.json")])


def _scores(report: Report, label: str) -> dict[str, float]:
    """What `zoo list --score` finds, by task and metric."""
    metrics = {task.name: task.metric for task in report.tasks}
    found: dict[str, float] = {}
    for score in report.scores:
        if score.subject == label:
            task = re.sub(r"[^a-z0-9_.-]+", "-", score.task.lower())
            found[f"{task}.{metrics[score.task]}"[:64]] = score.value
            if score.fidelity is not None:
                found[f"{task}.kl"[:64]] = score.fidelity.kl
    return dict(list(found.items())[:MAX_SCORES])
