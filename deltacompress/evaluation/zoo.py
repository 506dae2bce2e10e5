"""Reports attached to what they are about.

A report becomes a referrer of the entry: the entry's manifest stays as it is, and the report names the artifact by its
manifest digest (an adapter by that of its files), so it fits no other.
"""

from __future__ import annotations

import json
from pathlib import Path

from deltacompress.artifact.manifest import read_manifest
from deltacompress.errors import InputError, option, switch
from deltacompress.evaluation.report.data import Report
from deltacompress.zoo.entries.beneath import OVER, delta_under
from deltacompress.zoo.entries.evaluations import describe_evaluation, need_measurable
from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.exchange.resolve import open_zoo


def pinned(zoo: str | None, given: str) -> str:
    """`name@version` of the artifact or adapter that a name means now: an alias may move while it is measured.

    Raises:
        InputError: a directory, which has no entry that a report could be attached to; as need_measurable.
        ZooError: no zoo was given, or it has no such artifact.
    """
    if Path(given).is_dir():
        raise InputError(
            f"{given} is a directory",
            where=switch("attach"),
            way_out=f"give the name of its entry in {option('zoo')}, or leave out {switch('attach')}",
        )
    found, entry = open_zoo(zoo).show(given)
    need_measurable(found, entry)
    return str(found)


def check_over(zoo: str | None, name: str, delta: Path, where: str) -> None:
    """Make sure that `delta` is what the adapter `name` goes over, so that a report of it over that is of the entry.

    where: what says that it is, for messages. Of an entry that is no adapter nothing is said.

    Raises:
        InputError: it is another.
        ZooError: no zoo was given, or it has no such entry.
    """
    opened = open_zoo(zoo)
    found, entry = opened.show(name)
    own = entry.summary.get(OVER)
    if entry.kind != "adapter" or read_manifest(delta).digest == own:
        return
    try:
        told = "its base" if own is None else delta_under(opened, name)
    except NotFoundError:
        told = f"another delta ({str(own)[:12]}, not in this zoo)"
    raise InputError(
        f"{found} goes over {told}, and a report of it over this one is not of that entry",
        where=where,
        way_out=f"leave that out, or {switch('attach')}",
    )


def attach_report(zoo: str | None, name: str, label: str, report: Report) -> str:
    """Attach a report to the entry `name` that it measured as `label`; the digest of the attachment.

    The entry's list shows a score for every task and metric (`sst2.acc`), and its divergence (`sst2.kl`). `Zoo.attest`
    does the same with a report in a file.

    Raises:
        InputError: the report measures nothing under that label, or another artifact.
        ZooError: no zoo was given, the zoo has no such name, or cannot be written.
    """
    opened = open_zoo(zoo)
    data = json.loads(report.to_bytes())
    described = describe_evaluation(data, *opened.show(name), "report.json", label=label)
    return opened.attach(described.entry, described.blobs)
