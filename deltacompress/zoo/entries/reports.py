"""Reports: what somebody measured of a version later, so never a part of the entry, but attached to it.

There are two kinds, and one way in for both: report.json of `deltacompress eval` (evaluations), which says itself of
which artifact it speaks; and any other JSON object, whose numbers are all taken for the version's own.
"""

from __future__ import annotations

from pathlib import Path

from deltacompress.checkpoints.header import load_json_object
from deltacompress.errors import CheckpointError, InputError
from deltacompress.files.canonical_json import canonical_bytes
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.regular import ANYWHERE, read_bytes, unreadable
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.artifact import Described
from deltacompress.zoo.entries.evaluations import describe_evaluation, is_evaluation
from deltacompress.zoo.entries.scores import MAX_SCORES, numbers_in
from deltacompress.zoo.ledger import canonical
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import REPORT, Descriptor, EntryManifest
from deltacompress.zoo.ledger.versions import Resolved

MAX_REPORT_BYTES = 4 << 20


def read_report(path: Path, found: Resolved, entry: EntryManifest) -> Described:
    """The report in the file `path`, of either kind, as an attachment of a version.

    Raises:
        InputError: not a JSON object, too large, or an evaluation of something else.
        IntegrityError: an evaluation that was edited, is damaged, or newer.
        NotFoundError: an evaluation, and the entry is no delta and no adapter.
    """
    try:
        raw = read_bytes(path, at_most=MAX_REPORT_BYTES, links=ANYWHERE)
    except OSError as error:
        raise unreadable(InputError, path, error) from error
    return describe_report(raw, found, entry, str(path))


def describe_report(raw: bytes, found: Resolved, entry: EntryManifest, where: str) -> Described:
    """As read_report, of the bytes of a report; `where` names it."""
    if not canonical.fits(raw, MAX_REPORT_BYTES):
        raise InputError(
            f"over {MAX_REPORT_BYTES} bytes, or of too many values", where=where, way_out="attach a summary instead"
        )
    try:
        data = load_json_object(raw, where)
        if is_evaluation(data):
            return describe_evaluation(data, found, entry, where)
        spelled = canonical_bytes(data)
    except (CheckpointError, ValueError, RecursionError) as error:
        why = error.what if isinstance(error, CheckpointError) else str(error)
        told = " ".join(why.split())[:200]
        raise InputError(f"not a JSON object ({told})", where=where) from error
    numbers: dict[str, str | int | float | None] = {}
    for key, value in numbers_in(data):
        if len(numbers) < MAX_SCORES:
            numbers.setdefault(key, value)
    blob = Blob(sha256_hex(spelled), len(spelled), lambda: (spelled,), where)
    attached = EntryManifest(
        kind="report",
        config=Descriptor(media_type=REPORT, digest=blob.digest, size=blob.size),
        summary=numbers,
        subject=found.manifest,
    )
    return Described(attached, [blob])


def scores(zoo: Catalog, name: str) -> dict[str, float]:
    """Every score of the reports attached to a version. Of two that speak of one score, that with the higher digest
    counts: reports have no order; attach one, not two.

    Raises:
        ZooError: no such entry, or a damaged report.
    """
    found: dict[str, float] = {}
    for entry in sorted(zoo.referrers(name), key=lambda one: one.digest):
        if entry.kind == "report":
            found |= {key: float(value) for key, value in entry.summary.items() if isinstance(value, int | float)}
    return found
